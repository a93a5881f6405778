"""A step as data: segments, positions, padding, refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kv_columns.kv_manager import (
    CacheFullError,
    CacheGeometry,
    Segment,
    StepError,
    UnknownColumnError,
    Write,
)
from vllm_kv_columns.kv_manager.planner import pad_step, plan_step, run_lengths

from .builders import config

GEOMETRY = CacheGeometry.of(config())  # 4 sequences, capacity 41, 4 tokens a step and sequence


def test_equal_neighbours_are_one_segment() -> None:
    plan = plan_step([2, 2, 2, 1, 3, 3], {1: 17, 2: 0, 3: 5}, GEOMETRY)
    assert plan.seq_info == (Segment(0, 3, 2, 3), Segment(3, 1, 1, 18), Segment(4, 2, 3, 7))
    assert plan.positions == (0, 1, 2, 17, 5, 6)
    assert plan.writes == (Write(2, 0, 3), Write(1, 17, 18), Write(3, 5, 7))
    assert plan.wants == {2: (0, 3), 1: (17, 18), 3: (5, 7)}
    assert plan.num_tokens == plan.width == 6
    assert plan.causal


def test_an_owner_that_appears_twice_goes_on_where_it_stopped() -> None:
    plan = plan_step([3, 3, 1, 3], {1: 9, 3: 5}, GEOMETRY)
    assert plan.seq_info == (Segment(0, 2, 3, 7), Segment(2, 1, 1, 10), Segment(3, 1, 3, 8))
    assert plan.positions == (5, 6, 9, 7)
    assert plan.writes == (Write(3, 5, 8), Write(1, 9, 10))


def test_an_empty_step_is_a_plan_without_segments() -> None:
    plan = pad_step(plan_step([], {1: 3}, GEOMETRY), 5)
    assert (plan.seq_info, plan.writes) == ((), ())
    assert plan.seq_cols == plan.positions == (0,) * 5


def test_padding_goes_to_position_zero_of_the_scratch_column_and_no_segment() -> None:
    bare = plan_step([2, 2, 1], {1: 4, 2: 6}, GEOMETRY)
    plan = pad_step(bare, 7)
    assert plan.seq_cols == (2, 2, 1, 0, 0, 0, 0)
    assert plan.positions == (6, 7, 4, 0, 0, 0, 0)
    assert plan.seq_info == bare.seq_info
    assert (plan.num_tokens, plan.width) == (3, 7)
    assert pad_step(bare, None) == pad_step(bare, 3) == bare


def test_a_width_below_the_tokens_is_refused() -> None:
    with pytest.raises(StepError, match="width is 2 but the step has 3 tokens"):
        pad_step(plan_step([2, 2, 1], {1: 4, 2: 6}, GEOMETRY), 2)


@pytest.mark.parametrize(
    ("col", "message"),
    [
        (5, r"no sequence owns column 5 \(live columns: 1, 2\); take one by seq_new"),
        (0, "column 0 is the scratch column"),
        (-1, "no sequence owns column -1"),
    ],
)
def test_a_column_without_a_sequence_is_refused(col: int, message: str) -> None:
    with pytest.raises(UnknownColumnError, match=message):
        plan_step([1, col], {1: 0, 2: 0}, GEOMETRY)


def test_more_tokens_than_max_write_are_refused_also_over_two_segments() -> None:
    plan_step([1] * 4, {1: 0}, GEOMETRY)
    for seq_cols in ([1] * 5, [1, 1, 1, 2, 1, 1]):
        with pytest.raises(StepError, match=r"column 1 would write 5 tokens .* at most 4 are"):
            plan_step(seq_cols, {1: 0, 2: 0}, GEOMETRY)


def test_the_capacity_can_be_filled_and_not_exceeded() -> None:
    assert plan_step([1, 1], {1: 39}, GEOMETRY).writes == (Write(1, 39, 41),)
    with pytest.raises(CacheFullError, match="at length 40 needs 2 rows, 1 free") as caught:
        plan_step([1, 1], {1: 40}, GEOMETRY)
    assert (caught.value.needed, caught.value.free, caught.value.unit) == (2, 1, "rows")


def test_twice_as_many_segments_as_sequences_are_allowed_and_no_more() -> None:
    lengths = dict.fromkeys(range(1, 5), 0)
    assert len(plan_step([1, 2, 3, 4] * 2, lengths, GEOMETRY).seq_info) == 8
    with pytest.raises(StepError, match="has 9 segments, at most 8 are allowed"):
        plan_step([1, 2, 3, 4] * 2 + [1], lengths, GEOMETRY)


def test_a_draft_block_is_one_run_for_each_owner() -> None:
    assert not plan_step([1, 1, 2], {1: 7, 2: 7}, GEOMETRY, causal=False).causal
    with pytest.raises(StepError, match="column 1 has more than one run in a draft block"):
        plan_step([1, 2, 1], {1: 7, 2: 7}, GEOMETRY, causal=False)


@given(seq_cols=st.lists(st.integers(1, 4), max_size=9), start=st.integers(0, 36))
def test_positions_of_the_segments_are_those_of_the_tokens(seq_cols: list[int], start: int) -> None:
    lengths = {col: start + col for col in range(1, 5)}
    if len(run_lengths(seq_cols)) > 8 or any(seq_cols.count(col) > 4 for col in lengths):
        return
    if any(lengths[col] + seq_cols.count(col) > 41 for col in lengths):
        return
    plan = plan_step(seq_cols, lengths, GEOMETRY)
    from_segments = [
        (info.col, position)
        for info in plan.seq_info
        for position in range(info.kv_end - info.q_len, info.kv_end)
    ]
    assert from_segments == list(zip(plan.seq_cols, plan.positions, strict=True))
    for col, length in lengths.items():
        mine = [position for owner, position in from_segments if owner == col]
        assert mine == list(range(length, length + seq_cols.count(col)))
