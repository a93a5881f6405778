"""The machine of a run: names and versions, and what its memory and its tensor cores reach."""

import platform
import statistics
import subprocess
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .paged import vllm_version
from .timing import repeat

__all__ = ["describe", "measure"]

COPIED = 4 << 30  # bytes
MATRIX = 8192
SECONDS = 0.3


def describe(device: torch.device) -> dict[str, Any]:
    """Device, driver and versions; None for what is not there."""
    found: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "driver": None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": None,
        "vllm": vllm_version(),
        "vllm_kv_columns": None,
    }
    for name, distribution in (("triton", "triton"), ("vllm_kv_columns", "vllm-kv-columns")):
        with suppress(PackageNotFoundError):
            found[name] = version(distribution)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["processors"] = properties.multi_processor_count
        found["memory_gib"] = round(properties.total_memory / (1 << 30), 1)
        found["driver"] = _driver()
    return found


def measure(device: torch.device) -> dict[str, float]:
    """TB/s of a copy (read and written bytes) and of a sum, TFLOP/s of a matrix product.

    Of random numbers: products of zeros take less power and run faster.
    """
    copied, summed = _memory(device)
    left, right = torch.randn(2, MATRIX, MATRIX, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(left)
    multiplied = _median(lambda: torch.mm(left, right, out=product), device)
    return {
        "copy_tb_per_s": round(2 * COPIED / copied / 1e12, 3),
        "read_tb_per_s": round(COPIED / summed / 1e12, 3),
        "matmul_tflop_per_s": round(2 * MATRIX**3 / multiplied / 1e12, 1),
    }


def _memory(device: torch.device) -> tuple[float, float]:
    """Seconds of a copy and of a sum of COPIED bytes."""
    source = torch.empty(COPIED // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    numbers = source.view(torch.float32)  # two bfloat16 are a finite one
    return _median(lambda: target.copy_(source), device), _median(numbers.sum, device)


def _median(call: Callable[[], object], device: torch.device) -> float:
    return statistics.median(repeat(call, SECONDS, device))


def _driver() -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split()[0] if done.stdout.strip() else None
    return None
