"""The launch of the long segments' kernel for Hopper."""

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .buffers import Buffers
from .config import Cut, HopperLong
from .descriptors import Descriptors, describable, shared_layout
from .device import OPTIONS, overlap, processors
from .kernels.hopper import layouts, long, long_items

__all__ = ["HopperLongLaunch"]

CONSUMER_ROWS: int = long_items.CONSUMER_ROWS.value


class HopperLongLaunch:
    """``attend_long_hopper`` for layers of one shape, dtype and kind of mask."""

    def __init__(
        self,
        tiles: HopperLong,
        cut: Cut,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        windowed: bool,
        causal: bool,
    ) -> None:
        self.tiles, self.cut = tiles, cut
        self.descriptors = Descriptors([1, tiles.keys, 1, head_size], dtype)
        # The copy engine takes whole groups: as many tokens as a consumer has rows for.
        self._copies_queries = CONSUMER_ROWS % cut.group == 0
        if self._copies_queries:
            self._query_block = [CONSUMER_ROWS // cut.group, cut.group, head_size]
            self._query_layout = shared_layout(self._query_block, dtype)
        self.constants: dict[str, Any] = {
            "H": cut.heads,
            "G": cut.group,
            "D": head_size,
            "BN": tiles.keys,
            "STAGES": tiles.stages,
            "CAUSAL": causal,
            "WINDOWED": windowed,
            "TURNS": tiles.turns,
            "OUT_DIRECT": tiles.direct,
            "HEADS_FIRST": tiles.heads_first,
            "num_warps": layouts.WARPS.value,
            **OPTIONS,
            **overlap(device),
        }

    def query_descriptor(self, query: torch.Tensor) -> TensorDescriptor | None:
        """None where the copy engine cannot bring the queries."""
        if not self._copies_queries or not describable(query):
            return None
        return TensorDescriptor(
            query,
            list(query.shape),
            list(query.stride()),
            self._query_block,
            self._query_layout,
        )

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
        described = self.descriptors.of_layer(query, key_cache, value_cache, out)
        if described is None:
            return False
        queries = self.query_descriptor(query)
        programs = min(processors(query.device), max_tiles * self.cut.heads)
        long.attend_long_hopper[(programs,)](
            query,
            queries,
            *described,
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
