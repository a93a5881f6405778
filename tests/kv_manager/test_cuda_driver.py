"""What can be said of the CUDA driver's wrapper where there is no device."""

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kv_columns.kv_manager import CacheGeometry, CudaVmmStore, StoreError, StoreFullError
from vllm_kv_columns.kv_manager.stores.cuda import cuda_driver
from vllm_kv_columns.kv_manager.stores.cuda.cuda_driver import CudaDriver

from .builders import config


class Bindings:
    """Enums and structs of cuda-bindings; calls are noted and answered from a table."""

    def __init__(self) -> None:
        self.real: Any = pytest.importorskip("cuda.bindings.driver")
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, tuple[Any, ...]] = {
            "cuDeviceGetAttribute": (0, 1),
            "cuMemGetAllocationGranularity": (0, 4096),
            "cuMemAddressReserve": (0, self.real.CUdeviceptr(1 << 40)),
            "cuMemGetInfo": (0, 123, 456),
            "cuStreamIsCapturing": (0, self.real.CUstreamCaptureStatus(0)),
        }

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        if not name.startswith("cu") or name == "cuGetErrorName":
            return found

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            result, *values = self.answers.get(name, (0, "value"))
            return (self.real.CUresult(result), *values)

        return call


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    made = Bindings()
    monkeypatch.setattr(made.real, "cuGetErrorName", name_of(made.real))
    monkeypatch.setattr(cuda_driver, "_bindings", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return made


def name_of(real: Any) -> Any:
    return lambda result: (real.CUresult(0), real.CUresult(result).name.encode())


def test_memory_is_asked_for_on_the_current_device(bindings: Bindings) -> None:
    driver = CudaDriver()
    assert driver.granularity == 4096
    driver.create(8192)
    name, (nbytes, properties, flags) = bindings.calls[-1]
    assert (name, nbytes, flags) == ("cuMemCreate", 8192, 0)
    device = bindings.real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    assert (properties.location.type, properties.location.id) == (device, 3)
    driver.allow(1 << 40, 4096)
    name, (address, nbytes, (access,), count) = bindings.calls[-1]
    assert (name, address, nbytes, count) == ("cuMemSetAccess", 1 << 40, 4096, 1)
    assert (access.location.type, access.location.id, int(access.flags)) == (device, 3, 3)
    driver.map(1 << 40, 4096, "extent of 4096 bytes")
    assert bindings.calls[-1] == ("cuMemMap", (1 << 40, 4096, 0, "extent of 4096 bytes", 0))
    assert driver.reserve(1 << 20, 4096) == 1 << 40
    assert driver.free_bytes() == 123
    assert not driver.is_capturing(0)


def test_an_event_is_done_or_not_ready(bindings: Bindings) -> None:
    driver = CudaDriver(0)
    bindings.answers["cuEventQuery"] = (0,)
    assert driver.done("event")
    bindings.answers["cuEventQuery"] = (bindings.real.CUresult.CUDA_ERROR_NOT_READY,)
    assert not driver.done("event")
    bindings.answers["cuEventQuery"] = (bindings.real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    with pytest.raises(StoreError, match="cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        driver.done("event")


def test_another_streams_capture_holds_the_default_stream_up(bindings: Bindings) -> None:
    driver = CudaDriver()
    implicit = bindings.real.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    bindings.answers["cuStreamIsCapturing"] = (implicit, None)
    assert driver.is_capturing(0)
    active = bindings.real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    bindings.answers["cuStreamIsCapturing"] = (0, active)
    assert driver.is_capturing(5)


def test_errors_carry_the_drivers_name_the_call_and_the_size(bindings: Bindings) -> None:
    driver = CudaDriver()
    bindings.answers["cuMemCreate"] = (bindings.real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    with pytest.raises(
        StoreFullError, match="cuMemCreate of 4096 bytes failed: CUDA_ERROR_OUT_OF_MEMORY on"
    ) as caught:
        driver.create(4096)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    bindings.answers["cuMemMap"] = (bindings.real.CUresult.CUDA_ERROR_INVALID_VALUE,)
    with pytest.raises(
        StoreError, match="cuMemMap of 4096 bytes failed: CUDA_ERROR_INVALID_VALUE on CUDA device 3"
    ):
        driver.map(1 << 40, 4096, "extent")


def test_addresses_that_are_too_many_are_no_shortage_of_memory(bindings: Bindings) -> None:
    driver = CudaDriver()
    out = bindings.real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    bindings.answers["cuMemAddressReserve"] = (out, None)
    with pytest.raises(StoreError, match="lower max_seqs or capacity") as caught:
        driver.reserve(1 << 60, 4096)
    assert not isinstance(caught.value, StoreFullError)


def test_a_device_that_cannot_map_is_refused(bindings: Bindings) -> None:
    bindings.answers["cuDeviceGetAttribute"] = (0, 0)
    with pytest.raises(StoreError, match="CUDA device 3 has no virtual memory management"):
        CudaDriver()


def test_missing_bindings_are_named_with_the_way_to_install_them() -> None:
    code = """
import sys
sys.modules["cuda"] = sys.modules["cuda.bindings"] = None
from vllm_kv_columns.kv_manager import CudaVmmStore, store_class
assert store_class("cuda-vmm") is CudaVmmStore
from vllm_kv_columns.kv_manager.stores.cuda.cuda_driver import CudaDriver
try:
    CudaDriver()
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("StoreError the store 'cuda-vmm' needs cuda-bindings"), done
    assert "pip install 'cuda-bindings>=13'" in done.stdout


def test_a_machine_without_a_device_is_told_of_the_other_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_driver, "_bindings", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StoreError, match="no CUDA device; use the store 'host' or 'dense'"):
        CudaVmmStore(CacheGeometry.of(config()))
