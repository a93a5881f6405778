"""The launches of one kind of layer: shape, dtype and mask. Nothing here reads a length."""

import math
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from .buffers import GAP_ROWS, Buffers
from .config import (
    Tiles,
    choose_hopper_long,
    choose_hopper_short,
    choose_tiles,
    power_of_two,
)
from .device import OPTIONS, capability, overlap, processors
from .kernels import decode, prefill, schedule, write

if TYPE_CHECKING:
    from .hopper_long import HopperLongLaunch
    from .hopper_short import HopperShortLaunch

__all__ = ["LayerLaunch", "launch_schedule", "launch_write"]

NO_WINDOW = 1 << 30  # beyond every position
SCHEDULE_SEGMENTS, FEW_SEGMENTS = 128, 32  # looked at once; the code for few is half as long
MERGED_NUMBERS, ZERO_ROWS = 2048, 16


class _Numbers(TypedDict):
    rows: int
    window: int
    scale: float


def launch_schedule(
    buffers: Buffers, seq_info: torch.Tensor, segments: int, window: int | None
) -> None:
    """Fill ``buffers`` to their capacity from the segments on the device."""
    cut = buffers.cut
    programs = sum(
        -(-entries // GAP_ROWS)
        for entries in (cut.runs, cut.second_runs, buffers.max_tiles, buffers.tokens)
    )
    schedule.make_schedule[(programs,)](
        seq_info,
        *seq_info.stride(),
        buffers.pieces,
        buffers.draft_pieces,
        buffers.tiles,
        buffers.progress,
        buffers.live,
        buffers.gaps,
        segments,
        buffers.tokens,
        buffers.max_tiles,
        NO_WINDOW if window is None else min(window, NO_WINDOW),
        G=cut.group,
        R=cut.runs,
        DRAFT_R=cut.second_runs,
        MIN_TILES=cut.min_tiles,
        BN=cut.short_keys,
        BM_SHORT=cut.short_rows,
        BM_LONG=cut.long_rows,
        BE=GAP_ROWS,
        BS=FEW_SEGMENTS if segments <= FEW_SEGMENTS else SCHEDULE_SEGMENTS,
        num_warps=8,
        **OPTIONS,
        **overlap(seq_info.device),
    )


def launch_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_cols: torch.Tensor,
    positions: torch.Tensor,
    rows: int,
) -> None:
    """One program for each token and up to 4096 numbers of it."""
    tokens, heads, size = key.shape
    dims = power_of_two(size)
    block = min(power_of_two(heads), max(1, 4096 // dims))
    write.write_slots[(tokens, -(-heads // block))](
        key,
        value,
        key_cache,
        value_cache,
        seq_cols,
        positions,
        rows,
        *key.stride(),
        *value.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        H=heads,
        D=size,
        BH=block,
        BD=dims,
        num_warps=4,
        **OPTIONS,
        **overlap(key.device),
    )


class LayerLaunch:
    """Attention of layers of one shape, dtype, sign of scale and kind of mask."""

    hopper_long: "HopperLongLaunch | None" = None
    hopper_short: "HopperShortLaunch | None" = None

    def __init__(
        self,
        heads: int,
        group: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        windowed: bool,
        causal: bool,
        rows: int,
        negate: bool,
    ) -> None:
        able = capability(device)
        self.tiles: Tiles = choose_tiles(
            heads, group, head_size, dtype.itemsize, processors(device), windowed, able
        )
        tiles, cut = self.tiles, self.tiles.cut
        shape = {"H": heads, "G": group, "D": head_size, "BD": tiles.dims, **OPTIONS}
        shape |= overlap(device)
        mask = {"CAUSAL": causal, "WINDOWED": windowed, "NEGATE": negate}
        self._long: dict[str, Any] = {
            **shape,
            **mask,
            "BM": tiles.long_rows,
            "BN": tiles.long_keys,
            "SPLIT": cut.long_rows // tiles.long_rows,
            "SMALL": rows < tiles.long_keys,
            "num_warps": tiles.long_warps,
            "num_stages": tiles.long_stages,
        }
        long_tiles = choose_hopper_long(able, cut, head_size, dtype.itemsize, windowed, negate)
        if long_tiles is not None:
            from .hopper_long import HopperLongLaunch  # loads what other devices have no use for

            self.hopper_long = HopperLongLaunch(
                long_tiles, cut, head_size, dtype, device, windowed=windowed, causal=causal
            )
        short_tiles = choose_hopper_short(able, cut, head_size, dtype.itemsize, negate)
        if short_tiles is not None:
            from .hopper_short import HopperShortLaunch

            self.hopper_short = HopperShortLaunch(
                short_tiles, cut, head_size, dtype, device, windowed=windowed, causal=causal
            )
        self._short: dict[str, Any] = {
            **shape,
            **mask,
            "ROWS": cut.short_rows,
            "SMALL": rows < cut.short_keys,
            "RB": power_of_two(group),
            "BP": max(2, MERGED_NUMBERS // (power_of_two(group) * tiles.dims)),
            "BG": GAP_ROWS,
            "BT": ZERO_ROWS,
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
        window: int | None,
        scale: float,
        max_q_len: int | None,
        early: bool,
    ) -> None:
        """One or two launches; which and how large depends on sizes that the host knows.

        That of the long segments comes last, to run beside the other, see ``kernels/order.py``.
        early: the schedule is not that of the kernel right in front, see there.
        """
        cut, tokens, segments = self.tiles.cut, query.shape[0], buffers.segments
        window = NO_WINDOW if window is None else min(window, NO_WINDOW)
        # Scores are kept as powers of two. All weights are equal for a scale of 0.
        scale = max(abs(scale) * math.log2(math.e), 1e-30)
        info, result = seq_info.stride(), out.stride()
        strides = (*info, *query.stride(), *key_cache.stride(), *value_cache.stride(), *result)
        max_tiles = min(cut.max_long_tiles(tokens, segments, max_q_len), buffers.max_tiles)
        drafts = cut.has_drafts(tokens, max_q_len)
        tensors = (query, key_cache, value_cache, out, seq_info)
        numbers: _Numbers = {"rows": rows, "window": window, "scale": scale}
        short = self.hopper_short
        if short is None or not short.run(*tensors, buffers, **numbers, early=early):
            tiles = self.tiles.draft if drafts else self.tiles.decode
            decode.attend_short[((cut.draft_runs if drafts else cut.runs) * cut.heads,)](
                *tensors,
                buffers.draft_pieces if drafts else buffers.pieces,
                buffers.live,
                buffers.gaps,
                buffers.arrivals,
                buffers.part_acc,
                buffers.part_sums,
                segments,
                tokens,
                rows,
                window,
                scale,
                *strides,
                BM=tiles.rows,
                BN=cut.short_keys,
                LARGE=drafts and cut.short_rows > tiles.rows,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
                maxnreg=tiles.registers,
                **self._short,
            )
        if not max_tiles:
            return
        long = self.hopper_long
        if long is None or not long.run(*tensors, buffers, max_tiles, **numbers):
            programs = max_tiles * cut.heads * (cut.long_rows // self.tiles.long_rows)
            prefill.attend_long[(programs,)](
                *tensors,
                buffers.tiles,
                tokens,
                rows,
                window,
                scale,
                *strides,
                **self._long,
            )
