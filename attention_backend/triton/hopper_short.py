"""The launch of the short segments' kernel for Hopper."""

from typing import Any

import torch

from .buffers import GAP_ROWS, Buffers
from .config import SHORT_WORKERS, Cut, HopperShort, power_of_two
from .descriptors import Descriptors
from .device import OPTIONS, overlap
from .kernels.hopper import short

__all__ = ["HopperShortLaunch"]

MERGED_NUMBERS, WARPS = 128, 4  # of a thread, of a consumer


class HopperShortLaunch:
    """``attend_short_hopper`` for layers of one shape, dtype and kind of mask.

    drafts: for steps that may have drafts, on the runs cut for those.
    """

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
        drafts: bool,
    ) -> None:
        self.tiles, self.cut, self.drafts = tiles, cut, drafts
        self.descriptors = Descriptors([1, 1, tiles.keys, head_size], dtype, by_head=True)
        parts = 4 if drafts else 8
        merged_rows = WARPS * MERGED_NUMBERS * 32 // (parts * head_size)
        self.constants: dict[str, Any] = {
            "H": cut.heads,
            "G": cut.group,
            "D": head_size,
            "BN": tiles.keys,
            "STAGES": tiles.stages,
            "KEYS": cut.tile_keys(drafts),
            "CAUSAL": causal,
            "WINDOWED": windowed,
            "RB": merged_rows if drafts else min(merged_rows, max(WARPS, power_of_two(cut.group))),
            "BP": parts,
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
        runs = self.cut.draft_runs if self.drafts else self.cut.runs
        short.attend_short_hopper[(runs * self.cut.heads // SHORT_WORKERS,)](
            query,
            *described,
            out,
            seq_info,
            buffers.draft_pieces if self.drafts else buffers.pieces,
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
