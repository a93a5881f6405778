"""The built-in attention kernels, registered through the same hook as anybody's."""

from ..kv_manager.hooks import hookimpl
from .cpu import CpuKernel
from .kernel import AttentionKernel

__all__ = ["kv_columns_kernels"]


@hookimpl
def kv_columns_kernels() -> dict[str, type[AttentionKernel]]:
    kernels: dict[str, type[AttentionKernel]] = {"torch-sdpa": CpuKernel}
    try:
        from .triton import TritonKernel
    except ImportError:  # no Triton for this platform
        return kernels
    return kernels | {"triton": TritonKernel}
