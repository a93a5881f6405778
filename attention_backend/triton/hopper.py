"""The launch of the long segments' kernel for Hopper."""

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .buffers import Buffers
from .config import Cut, HopperTiles
from .device import OPTIONS, overlap, processors
from .kernels import prefill_hopper

__all__ = ["HopperLaunch"]

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
CONSUMER_ROWS = 64
_MOST_DESCRIPTORS = 1024  # two for each layer; more are those of tensors long gone
_MOST_STRIDE = 1 << 40  # of what a descriptor can say, in bytes


def _describable(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can read the tensor as it lies in memory."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()[:-1]]
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(0 < stride < _MOST_STRIDE and stride % 16 == 0 for stride in strides)
    )


class HopperLaunch:
    """``attend_long_hopper`` for layers of one shape, dtype and kind of mask."""

    def __init__(
        self,
        tiles: HopperTiles,
        cut: Cut,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        windowed: bool,
        causal: bool,
    ) -> None:
        self.tiles, self.cut = tiles, cut
        self._block = [1, tiles.keys, 1, head_size]
        self._layout = gl.NVMMASharedLayout.get_default_for(self._block, _DTYPES[dtype])
        # The copy engine takes whole groups: as many tokens as a consumer has rows for.
        self._copies_queries = tiles.query_places > 0 and CONSUMER_ROWS % cut.group == 0
        if self._copies_queries:
            self._query_block = [CONSUMER_ROWS // cut.group, cut.group, head_size]
            self._query_layout = gl.NVMMASharedLayout.get_default_for(
                self._query_block, _DTYPES[dtype]
            )
        self._descriptors: dict[tuple[object, ...], TensorDescriptor | None] = {}
        self.constants: dict[str, Any] = {
            "H": cut.heads,
            "G": cut.group,
            "D": head_size,
            "BN": tiles.keys,
            "STAGES": tiles.stages,
            "CONSUMERS": tiles.consumers,
            "REGISTERS": tiles.registers,
            "CAUSAL": causal,
            "WINDOWED": windowed,
            "TURNS": tiles.turns,
            "OUT_DIRECT": tiles.direct,
            "BY_HAND": tiles.by_hand,
            "COUNTED": tiles.counted,
            "HEADS_FIRST": tiles.heads_first,
            "JOINED": tiles.joined,
            "num_warps": 4,
            **OPTIONS,
            **overlap(device),
        }

    def _query_descriptor(self, query: torch.Tensor) -> TensorDescriptor | None:
        """None where the copy engine cannot bring the queries."""
        if not self._copies_queries or not _describable(query):
            return None
        return TensorDescriptor(
            query,
            list(query.shape),
            list(query.stride()),
            self._query_block,
            self._query_layout,
        )

    def _descriptor(self, cache: torch.Tensor) -> TensorDescriptor | None:
        """Made once for each cache, as columns never move; None where none can be."""
        key = (cache.data_ptr(), cache.shape, cache.stride())
        if key not in self._descriptors:
            if len(self._descriptors) == _MOST_DESCRIPTORS:
                self._descriptors.clear()
            made = None
            if _describable(cache):
                # Only the address is kept: a descriptor must not keep the cache alive.
                columns = cache.transpose(0, 1)
                made = TensorDescriptor(
                    _Address(cache.data_ptr(), cache.dtype),
                    list(columns.shape),
                    list(columns.stride()),
                    self._block,
                    self._layout,
                )
            self._descriptors[key] = made
        return self._descriptors[key]

    def query_constants(self, queries: TensorDescriptor | None) -> dict[str, Any]:
        """What the launch is told of the way that queries take."""
        copied = queries is not None
        return {"Q_COPIED": copied, "Q_PLACES": self.tiles.query_places if copied else 1}

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor,
        seq_info: torch.Tensor,
        buffers: Buffers,
        max_tiles: int,
        *,
        rows: int,
        window: int,
        scale: float,
    ) -> bool:
        """One launch, or False and none where the tensors lie so that this kernel cannot."""
        if query.stride(2) != 1 or out.stride(2) != 1:
            return False
        keys, values = self._descriptor(key_cache), self._descriptor(value_cache)
        if keys is None or values is None:
            return False
        queries = self._query_descriptor(query)
        programs = min(processors(query.device), max_tiles * self.cut.heads)
        prefill_hopper.attend_long_hopper[(programs,)](
            query,
            queries,
            keys,
            values,
            out,
            seq_info,
            buffers.tiles,
            buffers.progress,
            query.shape[0],
            rows,
            window,
            scale,
            *seq_info.stride(),
            *query.stride()[:2],
            *out.stride()[:2],
            **self.query_constants(queries),
            **self.constants,
        )
        return True


class _Address:
    """As much of a tensor as a descriptor asks for."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address
