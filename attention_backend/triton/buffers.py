"""Device memory of a schedule and of the parts that its programs leave to be merged."""

from typing import Any

import torch

from .config import Cut
from .kernels.segments import PIECE

__all__ = ["GAP_ROWS", "Buffers"]

GAP_ROWS = 32


class Buffers:
    """For steps of one shape up to ``tokens`` query rows and ``segments`` rows of seq_info.

    pieces: int32 [runs, 12], draft_pieces: the same for draft_runs, or pieces itself where the runs
    are the same; tiles: int32 [max_tiles, 2]; live: int32 [tokens]; gaps: int32
    [tokens / GAP_ROWS]; arrivals: int32 [runs * heads], zero whenever no kernel runs; progress:
    int32 [2], of the long segments' items those handed out, zero as well, and the query tiles in
    tiles; part_acc: float32 [2 * runs * heads, short_rows, dims]; part_sums: float32 [2 * runs *
    heads, 2, short_rows], where runs are the most of any step. ``owner`` is the step whose
    schedule they hold, None for none; ``is_new`` says that no layer has used it yet.
    """

    def __init__(
        self, cut: Cut, dims: int, tokens: int, segments: int, device: torch.device
    ) -> None:
        self.cut, self.dims, self.tokens, self.segments = cut, dims, tokens, segments
        self.max_tiles = cut.max_long_tiles(tokens, segments)
        gaps = -(-tokens // GAP_ROWS)
        programs = cut.most_runs * cut.heads
        # What the kernels are told to be aligned comes first.
        pieces, draft_pieces = cut.runs * PIECE.value, cut.second_runs * PIECE.value
        sizes = (4, pieces, draft_pieces, 2 * self.max_tiles, tokens, gaps, programs)
        numbers = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
        self.progress = numbers[0][:2]
        self.pieces, drafts, self.tiles, self.live, self.gaps, self.arrivals = numbers[1:]
        self.draft_pieces = drafts if draft_pieces else self.pieces
        parts = 2 * programs * cut.short_rows
        sums = torch.empty(parts * (dims + 2), dtype=torch.float32, device=device)
        self.part_acc, self.part_sums = sums.split((parts * dims, parts * 2))
        self.owner: Any = None
        self.is_new = True

    def hold(self, tokens: int, segments: int) -> bool:
        """Whether a step of that size fits."""
        return tokens <= self.tokens and segments <= self.segments
