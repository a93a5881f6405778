"""How tensors lie in the registers of a warpgroup."""

from triton import constexpr_function
from triton.experimental.gluon import language as gl

WARPS = gl.constexpr(4)  # of a warpgroup


@constexpr_function
def product_layout(columns):
    """[rows, columns], what a product of a warpgroup leaves."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@constexpr_function
def row_layout(head_size):
    """[rows, head_size], eight numbers of a row to a thread: as memory likes it."""
    lanes = min(head_size // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
