"""The device that kernels are launched on."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

__all__ = ["OPTIONS", "capability", "current", "overlap", "processors"]

OPTIONS = {"enable_fp_fusion": True}  # of every launch; what Triton assumes differs by version

_NOTHING: AbstractContextManager[None] = nullcontext()


def current(device: torch.device) -> AbstractContextManager[None]:
    """Make ``device`` the current one for a launch, if it is not."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _NOTHING
    guard: AbstractContextManager[None] = torch.cuda.device(device)
    return guard


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 2 elsewhere, where kernels run in Triton's interpreter."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) elsewhere."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.get_device_capability(device)


@cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Launch arguments by which a kernel may start before the one in front has ended.

    That needs compute capability 9.0; see ``kernels/order.py``.
    """
    if capability(device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
