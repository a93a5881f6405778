"""A step as data: which rows are written, which segments attend. Pure functions, no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from .errors import CacheFullError, StepError, UnknownColumnError
from .geometry import SCRATCH_COLUMN, CacheGeometry

__all__ = ["Segment", "StepPlan", "Write", "pad_step", "plan_step", "run_lengths"]


class Segment(NamedTuple):
    """Packed query rows q_start .. q_start+q_len of one sequence.

    The sequence holds kv_end tokens once the segment is written; the queries sit at positions
    kv_end-q_len .. kv_end-1.
    """

    q_start: int
    q_len: int
    col: int
    kv_end: int


class Write(NamedTuple):
    """Positions [start, end) of one column, written by a step."""

    col: int
    start: int
    end: int


@dataclass(frozen=True)
class StepPlan:
    """One step of the packed batch.

    seq_cols, positions: one entry per token, padded tokens at column 0, position 0.
    seq_info: segments in query order; padded tokens belong to none.
    writes: one entry per owner. num_tokens: tokens before padding.
    causal: False for a draft block, whose queries see all of their own segment.
    """

    seq_cols: tuple[int, ...]
    positions: tuple[int, ...]
    seq_info: tuple[Segment, ...]
    writes: tuple[Write, ...]
    num_tokens: int
    causal: bool

    @property
    def width(self) -> int:
        """Tokens with padding."""
        return len(self.seq_cols)

    @property
    def wants(self) -> dict[int, tuple[int, int]]:
        """{col: (start, end)}, as ColumnStore.pages_needed takes it."""
        return {write.col: (write.start, write.end) for write in self.writes}


def run_lengths(seq_cols: Sequence[int]) -> list[tuple[int, int]]:
    """(col, count) of each run of equal ids."""
    return [(col, sum(1 for _ in run)) for col, run in groupby(seq_cols)]


def plan_step(
    seq_cols: Sequence[int],
    lengths: Mapping[int, int],
    geometry: CacheGeometry,
    *,
    causal: bool = True,
) -> StepPlan:
    """Plan a step that appends one token to the owner of each entry of ``seq_cols``.

    An owner with several runs continues across them. Raises UnknownColumnError, StepError
    (segments, tokens per sequence, a split draft block) or CacheFullError (a sequence would
    outgrow its capacity). Changes nothing.
    """
    runs = run_lengths(seq_cols)
    ends: dict[int, int] = {}
    positions: list[int] = []
    segments: list[Segment] = []
    for col, count in runs:
        if col not in lengths:
            raise UnknownColumnError(col, tuple(sorted(lengths)))
        if not causal and col in ends:
            raise StepError(
                f"column {col} has more than one run in a draft block (causal=False); "
                f"put all its tokens side by side"
            )
        start = ends.get(col, lengths[col])
        ends[col] = start + count
        segments.append(Segment(len(positions), count, col, start + count))
        positions.extend(range(start, start + count))
    if len(segments) > geometry.max_segments:
        raise StepError(
            f"the step has {len(segments)} segments, at most {geometry.max_segments} are allowed "
            f"(2 x max_seqs); put the tokens of a sequence side by side"
        )
    writes = tuple(Write(col, lengths[col], end) for col, end in ends.items())
    for write in writes:
        _check_write(write, geometry)
    return StepPlan(
        seq_cols=tuple(seq_cols),
        positions=tuple(positions),
        seq_info=tuple(segments),
        writes=writes,
        num_tokens=len(positions),
        causal=causal,
    )


def pad_step(plan: StepPlan, width: int | None) -> StepPlan:
    """Fill a plan up to ``width`` tokens with the scratch column; None leaves it as it is."""
    if width is None or width == plan.width:
        return plan
    missing = width - plan.num_tokens
    if missing < 0:
        raise StepError(
            f"width is {width} but the step has {plan.num_tokens} tokens; "
            f"give at least that width, or None for no padding"
        )
    return replace(
        plan,
        seq_cols=plan.seq_cols[: plan.num_tokens] + (SCRATCH_COLUMN,) * missing,
        positions=plan.positions[: plan.num_tokens] + (0,) * missing,
    )


def _check_write(write: Write, geometry: CacheGeometry) -> None:
    count = write.end - write.start
    if count > geometry.max_write:
        raise StepError(
            f"column {write.col} would write {count} tokens in one step, at most "
            f"{geometry.max_write} are allowed (max_write); split them over several steps"
        )
    if write.end > geometry.capacity:
        raise CacheFullError(
            f"column {write.col} at length {write.start}",
            count,
            geometry.capacity - write.start,
            "rows",
            f"end or shorten the sequence, or raise capacity ({geometry.capacity})",
        )
