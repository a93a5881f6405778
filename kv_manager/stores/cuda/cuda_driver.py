"""Virtual memory of a CUDA device, through cuda-bindings."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...errors import StoreError, StoreFullError
from .driver import Driver

__all__ = ["CudaDriver"]


class CudaDriver(Driver):
    """The CUDA driver API in the device's primary context, which torch uses too.

    ``device`` is torch's number of the device; None: torch's current one. Raises StoreError when
    cuda-bindings is missing or the device cannot map memory.
    """

    def __init__(self, device: int | None = None) -> None:
        self._cu = _bindings()
        if not torch.cuda.is_available():
            raise StoreError("torch finds no CUDA device; use the store 'host' or 'dense'")
        torch.cuda.init()
        self.device = torch.cuda.current_device() if device is None else device
        cu = self._cu
        self._call("cuInit", 0)
        ordinal = self._call("cuDeviceGet", self.device)
        attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call("cuDeviceGetAttribute", attribute, ordinal):
            raise StoreError(
                f"CUDA device {self.device} has no virtual memory management; use the store 'dense'"
            )
        self._context = self._call("cuDevicePrimaryCtxRetain", ordinal)
        self._properties = cu.CUmemAllocationProp()
        self._properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = self.device
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = [access]
        self.granularity = int(
            self._call(
                "cuMemGetAllocationGranularity",
                self._properties,
                cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        )

    def push(self) -> None:
        self._call("cuCtxPushCurrent", self._context)

    def pop(self) -> None:
        self._call("cuCtxPopCurrent")

    def enter_thread(self) -> None:
        # Otherwise asking for an event would spoil a capture that another thread has begun.
        relaxed = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._call("cuThreadExchangeStreamCaptureMode", relaxed)

    def reserve(self, nbytes: int, alignment: int) -> int:
        try:
            return int(self._call("cuMemAddressReserve", nbytes, alignment, 0, 0, nbytes=nbytes))
        except StoreFullError as error:
            raise StoreError(f"{error}; lower max_seqs or capacity") from error

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes, nbytes=nbytes)

    def create(self, nbytes: int) -> Any:
        return self._call("cuMemCreate", nbytes, self._properties, 0, nbytes=nbytes)

    def release(self, extent: Any) -> None:
        self._call("cuMemRelease", extent)

    def map(self, address: int, nbytes: int, extent: Any) -> None:
        self._call("cuMemMap", address, nbytes, 0, extent, 0, nbytes=nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        self._call("cuMemSetAccess", address, nbytes, self._access, 1, nbytes=nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes, nbytes=nbytes)

    def tensor(self, address: int, nbytes: int, gone: Callable[[], None]) -> torch.Tensor:
        memory = _Memory(address, nbytes)
        weakref.finalize(memory, gone).atexit = False  # torch keeps `memory` with the storage
        with torch.inference_mode(False):
            return torch.as_tensor(memory, device=f"cuda:{self.device}")

    def free_bytes(self) -> int:
        return int(self._call("cuMemGetInfo")[0])

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def current_stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def is_capturing(self, stream: int) -> bool:
        cu = self._cu
        result, *values = cu.cuStreamIsCapturing(stream)
        if result == cu.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:  # default stream, and another
            return True  # stream is capturing
        self._check("cuStreamIsCapturing", result, None)
        return bool(values[0] != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", address, 0, nbytes, stream, nbytes=nbytes)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync", to, source, nbytes, stream, nbytes=nbytes)

    def record(self, stream: int) -> Any:
        flags = self._cu.CUevent_flags
        event = self._call(
            "cuEventCreate",
            int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC),
        )
        self._call("cuEventRecord", event, stream)
        return event

    def join(self, stream: int, event: Any) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def done(self, event: Any) -> bool:
        (result,) = self._cu.cuEventQuery(event)
        if result == self._cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check("cuEventQuery", result, None)
        return True

    def wait(self, event: Any) -> None:
        self._call("cuEventSynchronize", event)

    def drop(self, event: Any) -> None:
        self._call("cuEventDestroy", event)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any, nbytes: int | None = None) -> Any:
        """The result of a driver call: nothing, one value, or a tuple of several."""
        result, *values = getattr(self._cu, name)(*arguments)
        if result:
            self._check(name, result, nbytes)
        if len(values) > 1:
            return tuple(values)
        return values[0] if values else None

    def _check(self, call: str, result: Any, nbytes: int | None) -> None:
        cu = self._cu
        if result == cu.CUresult.CUDA_SUCCESS:
            return
        _, name = cu.cuGetErrorName(result)
        what = call if nbytes is None else f"{call} of {nbytes} bytes"
        message = f"{what} failed: {name.decode() if name else int(result)}"
        if result == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise StoreFullError(f"{message} on CUDA device {self.device}", 0)
        raise StoreError(f"{message} on CUDA device {self.device}; see the CUDA driver API manual")


class _Memory:
    """Addresses as torch takes them. As bytes, since bfloat16 has no name in this protocol."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise StoreError(
            f"the store 'cuda-vmm' needs cuda-bindings, and it cannot be imported ({error}); "
            f"install it with: pip install 'cuda-bindings>=13'"
        ) from error
    return driver
