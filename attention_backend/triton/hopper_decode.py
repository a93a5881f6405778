"""The launch of the decodes' kernel for Hopper."""

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
    """``attend_decodes_hopper`` for layers of one shape, dtype and kind of mask."""

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
    ) -> None:
        self.tiles, self.cut = tiles, cut
        self.descriptors = Descriptors([1, tiles.heads, tiles.keys, head_size], dtype, by_head=True)
        numbers = MERGED_NUMBERS * 32 // (PARTS_AT_ONCE * head_size)
        self.constants: dict[str, Any] = {
            "H": cut.heads,
            "G": cut.group,
            "D": head_size,
            "HB": tiles.heads,
            "BN": tiles.keys,
            "STAGES": tiles.stages,
            "REGISTERS": 24,
            "ROWS": cut.short_rows,
            "KEYS": cut.decode_keys,
            "CAUSAL": causal,
            "WINDOWED": windowed,
            "RB": min(power_of_two(cut.group), max(1, numbers)),
            "BP": PARTS_AT_ONCE,
            "BG": GAP_ROWS,
            "num_warps": tiles.heads,
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
        early: bool,
    ) -> bool:
        """One launch, or False and none where the tensors lie so that this kernel cannot."""
        described = self.descriptors.of_layer(query, key_cache, value_cache, out)
        if described is None:
            return False
        programs = self.cut.runs * (self.cut.heads // self.tiles.heads)
        decode.attend_decodes_hopper[(programs,)](
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
