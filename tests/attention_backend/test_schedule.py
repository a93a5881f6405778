"""Which segments run together, without a tensor."""

import pytest

from vllm_kv_columns.attention_backend.cpu.schedule import (
    CostModel,
    Schedule,
    make_schedule,
    parse_segments,
)
from vllm_kv_columns.attention_backend.cpu.tiles import Tile, tiles_of

# With one head of size 1 a key costs 1 and a column 10; a segment 100 more, a batch 150.
COST = CostModel(segment_call=100, batch_call=150, head=10, element=1, copied_element=1)


def schedule(
    segments: list[tuple[int, int, int]], rows: int = 10_000, window: int | None = None
) -> Schedule:
    """Of (q_len, col, kv_end), packed one after the other."""
    info, start = [], 0
    for q_len, col, kv_end in segments:
        info.append((start, q_len, col, kv_end))
        start += q_len
    parsed = parse_segments(info, window=window, causal=True)
    return make_schedule(parsed, rows=rows, heads=1, head_size=1, cost=COST)


def columns(made: Schedule) -> tuple[list[list[int]], list[int]]:
    batches = [[member.col for member in batch.members] for batch in made.batches]
    return batches, [segment.col for segment in made.singles]


@pytest.mark.parametrize(
    "segments, batches, singles",
    [
        pytest.param([], [], [], id="nothing"),
        pytest.param([(1, 4, 50)], [], [4], id="one decode"),
        pytest.param([(1, 1, 50), (1, 2, 50)], [[1, 2]], [], id="two neighbours"),
        pytest.param([(1, 2, 50), (1, 1, 50)], [[2, 1]], [], id="in the order of the queries"),
        pytest.param([(1, 1, 9), (1, 3, 9), (1, 4, 9)], [[1, 3, 4]], [], id="an idle column"),
        pytest.param(
            [(1, 1, 9), (1, 2, 9), (1, 90, 9), (1, 91, 9)], [[1, 2], [90, 91]], [], id="a wide gap"
        ),
        pytest.param([(1, 1, 9), (1, 90, 9)], [], [1, 90], id="far apart"),
        pytest.param(
            [(1, 1, 50), (1, 2, 2000), (1, 3, 60), (1, 4, 55)], [[1, 3, 4]], [2], id="an outlier"
        ),
        pytest.param([(1, 1, 50), (1, 2, 2000)], [], [1, 2], id="too different"),
        pytest.param(
            [(1, 1, 50), (1, 2, 60), (1, 3, 2000), (1, 4, 2010)],
            [[1, 2], [3, 4]],
            [],
            id="two lengths",
        ),
        pytest.param([(5, 1, 50), (1, 2, 60), (1, 3, 60)], [[2, 3]], [1], id="a chunk"),
        pytest.param([(1, 1, 0), (0, 2, 60), (1, 3, 60)], [], [3], id="empty ones"),
        pytest.param([(1, 1, 8), (1, 1, 9), (1, 2, 9)], [[1, 2]], [1], id="a column twice"),
    ],
)
def test_decodes_are_batched_where_that_is_cheaper(
    segments: list[tuple[int, int, int]], batches: list[list[int]], singles: list[int]
) -> None:
    assert columns(schedule(segments)) == (batches, singles)


def test_a_batch_is_the_block_that_holds_its_members() -> None:
    (batch,) = schedule([(1, 6, 30), (1, 4, 20), (1, 7, 28)], window=25).batches
    assert (batch.first_col, batch.num_cols) == (4, 4)
    assert (batch.first_slot, batch.num_slots) == (0, 30)
    assert batch.visible == ((0, 20), (0, 1), (5, 30), (3, 28))


def test_a_window_bounds_the_block_from_below() -> None:
    (batch,) = schedule([(1, 1, 500), (1, 2, 510)], window=25).batches
    assert (batch.first_slot, batch.num_slots) == (475, 35)


def test_a_wrapped_ring_reads_all_rows_when_most_are_seen() -> None:
    (batch,) = schedule([(1, 1, 120), (1, 2, 95)], rows=50, window=45).batches
    assert (batch.first_slot, batch.num_slots) == (0, 50)
    assert batch.visible == ((25, 20), (0, 45))


def test_a_small_window_in_a_large_ring_goes_alone() -> None:
    made = schedule([(1, 1, 1003), (1, 2, 1004)], rows=1000, window=8)
    assert columns(made) == ([], [1, 2])


def test_more_positions_than_rows_go_alone() -> None:
    assert columns(schedule([(1, 1, 60), (1, 2, 60)], rows=50)) == ([], [1, 2])


def test_the_split_costs_less_than_any_of_the_simple_ones() -> None:
    lengths = [30, 700, 45, 60, 620, 650, 41, 33, 1500, 38]
    segments = [(1, col, length) for col, length in enumerate(lengths, start=1)]
    made = schedule(segments)
    cost = sum(COST.batch(batch.num_cols, batch.num_slots, 1, 1) for batch in made.batches)
    cost += sum(COST.segment(segment.num_keys, 1, 1, 1) for segment in made.singles)
    assert cost < COST.batch(10, 1500, 1, 1)
    assert cost < sum(COST.segment(length, 1, 1, 1) for length in lengths)


def test_blind_queries_are_cut_off() -> None:
    (segment,) = parse_segments([(3, 5, 1, 2)], window=None, causal=True)
    assert (segment.q_start, segment.q_len) == (6, 2)
    (segment,) = parse_segments([(3, 5, 1, 2)], window=None, causal=False)
    assert (segment.q_start, segment.q_len) == (3, 5)


def test_segments_come_in_the_order_of_their_queries() -> None:
    parsed = parse_segments([(4, 1, 1, 9), (0, 4, 2, 9)], window=3, causal=True)
    assert [segment.col for segment in parsed] == [2, 1]
    assert [segment.first_key for segment in parsed] == [3, 6]


@pytest.mark.parametrize(
    "info, message",
    [
        ([(0, 1, -1, 3)], r"row \(0, 1, -1, 3\); q_start, q_len, col and kv_end must not be neg"),
        ([(0, 2, 1, 3), (1, 1, 2, 3)], "columns 1 and 2 share query row 1"),
    ],
)
def test_impossible_segments_are_refused(info: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_segments(info, window=None, causal=True)


@pytest.mark.parametrize(
    "first, kv_end, rows, runs",
    [
        (0, 7, 10, ((0, 7),)),
        (0, 10, 10, ((0, 10),)),
        (13, 18, 10, ((3, 8),)),
        (13, 20, 10, ((3, 10),)),
        (18, 23, 10, ((8, 10), (0, 3))),
        (3, 13, 10, ((3, 10), (0, 3))),
        (0, 23, 10, ((0, 10), (0, 10), (0, 3))),
    ],
)
def test_positions_are_runs_of_slots(
    first: int, kv_end: int, rows: int, runs: tuple[tuple[int, int], ...]
) -> None:
    (segment,) = parse_segments([(0, 1, 1, kv_end)], window=kv_end - first, causal=True)
    assert segment.slot_runs(rows) == runs


def test_tiles_end_at_their_last_query_and_begin_at_the_first_window() -> None:
    (segment,) = parse_segments([(0, 600, 1, 1000)], window=100, causal=True)
    assert segment.first_key == 301
    first, second, third = tiles_of(segment, window=100, causal=True, group=2)
    assert first == Tile(0, 256, first_key=0, num_keys=355, first_position=99)
    assert second == Tile(256, 256, first_key=256, num_keys=355, first_position=99)
    assert third == Tile(512, 88, first_key=512, num_keys=187, first_position=99)


def test_tiles_of_a_draft_block_see_its_end() -> None:
    (segment,) = parse_segments([(0, 5, 1, 50)], window=20, causal=False)
    assert tiles_of(segment, window=20, causal=False, group=1) == (
        Tile(0, 5, first_key=0, num_keys=24, first_position=19),
    )
