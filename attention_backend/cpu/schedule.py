"""Which segments of a step run together: a pure function of the segment list, free of torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["CostModel", "DecodeBatch", "Schedule", "Segment", "make_schedule", "parse_segments"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries q_start .. q_start + q_len of the sequence in column col; all of them see a key.

    first_key .. kv_end - 1 are the positions that at least one of them attends.
    """

    q_start: int
    q_len: int
    col: int
    kv_end: int
    first_key: int

    @property
    def num_keys(self) -> int:
        return self.kv_end - self.first_key

    def slot_runs(self, rows: int) -> tuple[tuple[int, int], ...]:
        """The attended positions as runs of slots [start, stop), oldest first."""
        runs = []
        position = self.first_key
        while position < self.kv_end:
            start = position % rows
            stop = min(rows, start + self.kv_end - position)
            runs.append((start, stop))
            position += stop - start
        return tuple(runs)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Microseconds of the two ways to attend; what matters is how they compare.

    Defaults: measured in bfloat16 on two cores of a Xeon with AMX, and rounded. Measure anew with
    ``python -m vllm_kv_columns.attention_backend.cpu.calibrate`` on a machine that is idle.
    """

    segment_call: float = 20.0
    """One segment by itself, whatever its size."""
    batch_call: float = 25.0
    """One batch, whatever its size."""
    head: float = 2.0
    """A KV head of a segment, or of a column of a batch."""
    element: float = 0.0004
    """A number in K, with its partner in V, that is read, whether or not it is attended."""
    copied_element: float = 0.0008
    """More for one that must be copied first, because the slots wrap around the last row."""

    def segment(self, num_keys: int, num_runs: int, heads: int, head_size: int) -> float:
        """Of one decode segment whose keys lie in num_runs runs of slots."""
        element = self.element + (self.copied_element if num_runs > 1 else 0.0)
        return self.segment_call + heads * (self.head + num_keys * head_size * element)

    def batch(self, num_cols: int, num_slots: int, heads: int, head_size: int) -> float:
        """Of one batch over a block of columns and slots."""
        return self.batch_call + num_cols * heads * (
            self.head + num_slots * head_size * self.element
        )


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Segments of one query each, attended together over a block of columns and slots.

    members are in the order of their queries. visible holds for each column of the block the run
    of slots that its query sees, (start, stop); start >= stop when the run wraps around the last
    row. A column without a member is idle: it sees the block's first slot, its result is dropped.
    """

    first_col: int
    num_cols: int
    first_slot: int
    num_slots: int
    members: tuple[Segment, ...]
    visible: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Every segment is in one batch or among the singles."""

    batches: tuple[DecodeBatch, ...]
    singles: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class _Span:
    """A decode segment that can be batched: its visible slots and what it costs by itself."""

    segment: Segment
    visible: tuple[int, int]
    start: int  # of the slots that a batch must read for it
    stop: int
    cost: float


def parse_segments(
    seq_info: Iterable[Sequence[int]], *, window: int | None, causal: bool
) -> tuple[Segment, ...]:
    """Segments that attend something, in the order of their queries.

    Leading queries that see no key (more queries than kv_end, causal) are cut off. Raises
    ValueError for a negative number and for segments that share query rows.
    """
    segments = []
    for q_start, q_len, col, kv_end in seq_info:
        if min(q_start, q_len, col, kv_end) < 0:
            raise ValueError(
                f"seq_info has the row {(q_start, q_len, col, kv_end)}; "
                f"q_start, q_len, col and kv_end must not be negative"
            )
        blind = max(0, q_len - kv_end) if causal else 0
        if kv_end == 0 or q_len == blind:
            continue
        q_start, q_len = q_start + blind, q_len - blind
        first_key = 0 if window is None else max(0, kv_end - q_len - window + 1)
        segments.append(Segment(q_start, q_len, col, kv_end, first_key))
    segments.sort(key=lambda segment: segment.q_start)
    for one, other in pairwise(segments):
        if one.q_start + one.q_len > other.q_start:
            raise ValueError(
                f"the segments of columns {one.col} and {other.col} share query row "
                f"{other.q_start}; a query row belongs to one segment at most"
            )
    return tuple(segments)


def make_schedule(
    segments: Sequence[Segment],
    *,
    rows: int,
    heads: int,
    head_size: int,
    cost: CostModel | None = None,
) -> Schedule:
    """Batch decode segments of neighbouring columns and similar length where that is cheaper.

    heads: KV heads. The search tries a few bounds on the slots that a batch reads; below each, it
    lets a batch grow over the columns while joining costs less than going alone.
    """
    cost = cost or CostModel()
    spans = []
    for segment in sorted(segments, key=lambda segment: segment.col):
        runs = segment.slot_runs(rows)
        if segment.q_len > 1 or segment.num_keys > rows:
            continue
        alone = cost.segment(segment.num_keys, len(runs), heads, head_size)
        visible = (runs[0][0], runs[-1][1])
        start, stop = visible if len(runs) == 1 else (0, rows)
        spans.append(_Span(segment, visible, start, stop, alone))
    batches: list[DecodeBatch] = []
    while spans:
        best_saving, best = 0.0, list[list[_Span]]()
        for bound in _bounds(spans):
            saving, found = _grow_batches(spans, bound, heads, head_size, cost)
            if saving > best_saving:
                best_saving, best = saving, found
        if not best:
            break
        batches += [_make_batch(members) for members in best]
        taken = {id(span) for members in best for span in members}
        spans = [span for span in spans if id(span) not in taken]
    batched = {segment.q_start for batch in batches for segment in batch.members}
    singles = tuple(segment for segment in segments if segment.q_start not in batched)
    return Schedule(tuple(batches), singles)


def _bounds(spans: Sequence[_Span], limit: int = 8) -> list[int]:
    """Up to ``limit`` of the last slots that occur, the largest always."""
    stops = sorted({span.stop for span in spans})
    step = -(-len(stops) // limit)
    return stops[::-1][::step]


def _grow_batches(
    spans: Sequence[_Span], bound: int, heads: int, head_size: int, cost: CostModel
) -> tuple[float, list[list[_Span]]]:
    """Batches of spans that end at or before ``bound``, and what they save over going alone."""
    saving, batches = 0.0, []
    members: list[_Span] = []
    start = stop = 0
    current = 0.0

    def close() -> None:
        nonlocal saving
        gain = sum(span.cost for span in members) - current
        if gain > 0:
            saving += gain
            batches.append(members)

    for span in spans:
        if span.stop > bound:
            continue
        if members:
            num_cols = span.segment.col - members[0].segment.col + 1
            low, high = min(start, span.start), max(stop, span.stop)
            joined = cost.batch(num_cols, high - low, heads, head_size)
            same_column = span.segment.col == members[-1].segment.col
            if not same_column and joined - current <= span.cost:
                members.append(span)
                start, stop, current = low, high, joined
                continue
            close()
        members = [span]
        start, stop = span.start, span.stop
        current = cost.batch(1, stop - start, heads, head_size)
    close()
    return saving, batches


def _make_batch(members: Sequence[_Span]) -> DecodeBatch:
    first_col = members[0].segment.col
    num_cols = members[-1].segment.col - first_col + 1
    start = min(span.start for span in members)
    visible = [(start, start + 1)] * num_cols
    for span in members:
        visible[span.segment.col - first_col] = span.visible
    return DecodeBatch(
        first_col=first_col,
        num_cols=num_cols,
        first_slot=start,
        num_slots=max(span.stop for span in members) - start,
        members=tuple(
            sorted((span.segment for span in members), key=lambda segment: segment.q_start)
        ),
        visible=tuple(visible),
    )
