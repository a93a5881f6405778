"""The launch of the short segments' kernel for Hopper."""

from typing import Any

import torch

from .buffers import GAP_ROWS, Buffers
from .config import SHORT_WORKERS, Cut, HopperShort, power_of_two
from .descriptors import Descriptors
from .device import OPTIONS, overlap
from .kernels.hopper import layouts, short

__all__ = ["HopperShortLaunch"]

WARPS: int = layouts.WARPS.value
PARTS_AT_ONCE, MERGED_NUMBERS = 8, 128  # of a thread


def merged_rows(group: int, head_size: int) -> int:
    """Rows that are merged at once: those of a decode, but no fewer than warps can share."""
    most = WARPS * MERGED_NUMBERS * 32 // (PARTS_AT_ONCE * head_size)
    return min(most, max(power_of_two(group), WARPS * max(128 // head_size, 1)))


class HopperShortLaunch:
    """``attend_short_hopper`` for layers of one shape, dtype and kind of mask."""

    def __init__(
        self,
        tiles: HopperShort,
        cut: Cut,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        windowed: bool,
        causal: bool,
    ) -> None:
        self.tiles, self.cut = tiles, cut
        self.descriptors = Descriptors([1, 1, tiles.keys, head_size], dtype, by_head=True)
        self.constants: dict[str, Any] = {
            "H": cut.heads,
            "G": cut.group,
            "D": head_size,
            "BN": tiles.keys,
            "STAGES": tiles.stages,
            "KEYS": cut.short_keys,
            "CAUSAL": causal,
            "WINDOWED": windowed,
            "RB": merged_rows(cut.group, head_size),
            "BP": PARTS_AT_ONCE,
            "BG": GAP_ROWS,
            "num_warps": WARPS,
            **OPTIONS,
            **overlap(device),
        }

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor,
        seq_info: torch.Tensor,
        buffers: Buffers,
        *,
        rows: int,
        window: int,
        scale: float,
        early: bool,
    ) -> bool:
        """One launch, or False and none where the tensors lie so that this kernel cannot."""
        described = self.descriptors.of_layer(query, key_cache, value_cache, out)
        if described is None:
            return False
        short.attend_short_hopper[(self.cut.runs * self.cut.heads // SHORT_WORKERS,)](
            query,
            *described,
            out,
            seq_info,
            buffers.pieces,
            buffers.live,
            buffers.gaps,
            buffers.arrivals,
            buffers.part_acc,
            buffers.part_sums,
            buffers.segments,
            query.shape[0],
            rows,
            window,
            scale,
            int(early),
            *seq_info.stride(),
            *query.stride()[:2],
            *out.stride()[:2],
            **self.constants,
        )
        return True
