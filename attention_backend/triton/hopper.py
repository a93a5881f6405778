"""The launch of the long segments' kernel for Hopper."""

from typing import Any

import torch

from .buffers import Buffers
from .config import Cut, HopperTiles
from .descriptors import Descriptors
from .device import OPTIONS, processors
from .kernels import prefill_hopper

__all__ = ["HopperLaunch"]


class HopperLaunch:
    """``attend_long_hopper`` for layers of one shape, dtype and kind of mask."""

    def __init__(
        self,
        tiles: HopperTiles,
        cut: Cut,
        head_size: int,
        dtype: torch.dtype,
        *,
        windowed: bool,
        causal: bool,
    ) -> None:
        self.tiles, self.cut = tiles, cut
        self.descriptors = Descriptors([1, tiles.keys, 1, head_size], dtype)
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
            "num_warps": 4,
            **OPTIONS,
        }

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
        keys, values = self.descriptors.of(key_cache), self.descriptors.of(value_cache)
        if keys is None or values is None:
            return False
        items = max_tiles * self.cut.heads
        prefill_hopper.attend_long_hopper[(min(processors(query.device), items),)](
            query,
            keys,
            values,
            out,
            seq_info,
            buffers.tiles,
            query.shape[0],
            rows,
            window,
            scale,
            items,
            *seq_info.stride(),
            *query.stride()[:2],
            *out.stride()[:2],
            **self.constants,
        )
        return True
