"""The launch of the short segments' kernel for Hopper."""

from typing import Any

import torch

from .buffers import GAP_ROWS, Buffers
from .config import Cut, HopperDecode, power_of_two
from .descriptors import Descriptors
from .device import OPTIONS, overlap
from .kernels.hopper import decode

__all__ = ["HopperDecodeLaunch"]

PARTS_AT_ONCE, MERGED_NUMBERS = 8, 128  # of a thread


class HopperDecodeLaunch:
    """``attend_decodes_hopper`` for layers of one shape, dtype and kind of mask.

    drafts: for steps that may have drafts, on the runs cut for those.
    """

    def __init__(
        self,
        tiles: HopperDecode,
        cut: Cut,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        windowed: bool,
        causal: bool,
        drafts: bool = False,
    ) -> None:
        self.tiles, self.cut, self.drafts = tiles, cut, drafts
        self.descriptors = Descriptors([1, tiles.heads, tiles.keys, head_size], dtype, by_head=True)
        numbers = MERGED_NUMBERS * 32 // (PARTS_AT_ONCE * head_size)
        self.constants: dict[str, Any] = {
            "H": cut.heads,
            "G": cut.group,
            "D": head_size,
            "HB": tiles.heads,
            "MT": tiles.row_tiles,
            "BN": tiles.keys,
            "STAGES": tiles.stages,
            "REGISTERS": 24,
            "ROWS": cut.short_rows,
            "KEYS": cut.tile_keys(drafts),
            "CAUSAL": causal,
            "WINDOWED": windowed,
            "RB": min(power_of_two(cut.group), max(1, numbers)) * tiles.row_tiles,
            "BP": PARTS_AT_ONCE,
            "BG": GAP_ROWS,
            "num_warps": tiles.heads * tiles.row_tiles,
            "maxnreg": tiles.registers,
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
    ) -> bool:
        """One launch, or False and none where the tensors lie so that this kernel cannot."""
        described = self.descriptors.of_layer(query, key_cache, value_cache, out)
        if described is None:
            return False
        runs = self.cut.draft_runs if self.drafts else self.cut.runs
        programs = runs * (self.cut.heads // self.tiles.heads)
        decode.attend_decodes_hopper[(programs,)](
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
            *seq_info.stride(),
            *query.stride()[:2],
            *out.stride()[:2],
            **self.constants,
        )
        return True
