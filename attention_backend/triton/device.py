"""The device that kernels are launched on."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

__all__ = ["OPTIONS", "current", "overlap", "processors"]

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
def overlap(device: torch.device) -> dict[str, bool]:
    """Launch arguments by which a kernel may start before the one in front has ended.

    That needs compute capability 9.0; see ``kernels/order.py``.
    """
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": able, "launch_pdl": able} if able else {"OVERLAP": False}
