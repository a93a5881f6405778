"""What the copy engine of Hopper is told about tensors."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["Descriptors", "describable", "shared_layout"]

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_MOST_DESCRIPTORS = 1024  # two for each layer; more are those of tensors long gone
_MOST_STRIDE = 1 << 40  # of what a descriptor can say, in bytes


def describable(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can read the tensor as it lies in memory."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()[:-1]]
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(0 < stride < _MOST_STRIDE and stride % 16 == 0 for stride in strides)
    )


def shared_layout(block: list[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(block, _DTYPES[dtype])


class Descriptors:
    """Descriptors of caches, read in boxes of one shape.

    block: [1, rows, heads, D], or [1, heads, rows, D] with by_head, in which order a box then lies
    in shared memory.
    """

    def __init__(self, block: list[int], dtype: torch.dtype, *, by_head: bool = False) -> None:
        self.block, self._by_head = block, by_head
        self.layout = shared_layout(block, dtype)
        self._made: dict[tuple[object, ...], TensorDescriptor | None] = {}

    def of(self, cache: torch.Tensor) -> TensorDescriptor | None:
        """Made once for each cache, as columns never move; None where none can be."""
        key = (cache.data_ptr(), cache.shape, cache.stride())
        if key not in self._made:
            if len(self._made) == _MOST_DESCRIPTORS:
                self._made.clear()
            made = None
            if describable(cache):
                # Only the address is kept: a descriptor must not keep the cache alive.
                columns = cache.permute((1, 2, 0, 3) if self._by_head else (1, 0, 2, 3))
                made = TensorDescriptor(
                    _Address(cache.data_ptr(), cache.dtype),
                    list(columns.shape),
                    list(columns.stride()),
                    self.block,
                    self.layout,
                )
            self._made[key] = made
        return self._made[key]

    def of_layer(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> tuple[TensorDescriptor, TensorDescriptor] | None:
        """Those of K and V; None where the tensors lie so that a kernel for Hopper cannot serve."""
        if query.stride(2) != 1 or out.stride(2) != 1:
            return None
        keys, values = self.of(key_cache), self.of(value_cache)
        return None if keys is None or values is None else (keys, values)


class _Address:
    """As much of a tensor as a descriptor asks for."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address
