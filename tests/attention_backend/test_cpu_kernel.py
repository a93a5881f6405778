"""The CPU kernel against the reference, whatever its schedule, and what it must not read."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kv_columns.attention_backend import (
    CpuKernel,
    sdpa_varlen,
    sdpa_varlen_reference,
    write_slots,
    write_slots_reference,
)
from vllm_kv_columns.attention_backend.cpu import attention, tiles
from vllm_kv_columns.attention_backend.cpu.schedule import CostModel
from vllm_kv_columns.kv_manager import StepTables

from .cases import Case, Tensors, build, cases, empty_cache, tolerance

COSTS = {
    "measured": CostModel(),
    "batched": CostModel(segment_call=1e9),
    "one by one": CostModel(batch_call=1e9),
}
NONE = torch.empty(0, dtype=torch.int32)


def reference(case: Case, made: Tensors) -> torch.Tensor:
    return sdpa_varlen_reference(
        made.query,
        made.key_cache,
        made.value_cache,
        made.seq_info,
        scale=made.scale,
        causal=case.causal,
        window=case.window,
    )


def attend(case: Case, made: Tensors, cost: CostModel) -> torch.Tensor:
    kernel = CpuKernel(cost)
    step = kernel.prepare(
        StepTables(made.seq_info, NONE, NONE),
        rows=case.rows,
        window=case.window,
        causal=case.causal,
    )
    out = torch.full(made.query.shape, float("nan"), dtype=case.dtype)
    kernel.attend(made.query, made.key_cache, made.value_cache, step, scale=made.scale, out=out)
    return out


def check(case: Case, cost: CostModel) -> None:
    made = build(case)
    out, expected = attend(case, made, cost), reference(case, made)
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance(made))


@settings(deadline=None, max_examples=150)
@given(cases())
def test_op_equals_reference(case: Case) -> None:
    made = build(case)
    out = sdpa_varlen(
        made.query,
        made.key_cache,
        made.value_cache,
        made.seq_info,
        made.scale,
        case.causal,
        case.window,
    )
    torch.testing.assert_close(out, reference(case, made), rtol=0, atol=tolerance(made))


@settings(deadline=None, max_examples=150)
@given(cases(max_q_len=5), st.sampled_from(sorted(COSTS)), st.sampled_from((1, 4, 512)))
def test_every_schedule_and_tile_length_equals_reference(
    case: Case, cost: str, tile_rows: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ROWS", tile_rows)
        check(case, COSTS[cost])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 63, 1000])
@pytest.mark.parametrize("q_len", [63, 300, 1300])
def test_long_chunks_span_several_tiles_and_key_blocks(
    dtype: torch.dtype, window: int | None, q_len: int
) -> None:
    rows = 1400 if window is None else window + q_len - 1
    case = Case(
        segments=((1, q_len, 2, 1400), (q_len + 2, 1, 1, 1111)),
        tokens=q_len + 3,
        rows=rows,
        cols=3,
        heads=1,
        group=2,
        dtype=dtype,
        window=window,
        filler=float("nan"),
    )
    check(case, CostModel())


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("causal", [True, False])
def test_more_queries_than_positions(cost: str, causal: bool) -> None:
    segments = ((0, 5, 1, 2), (5, 3, 3, 1), (9, 1, 2, 1))
    for window in (None, 1, 2, 4):
        check(Case(segments, 10, 8, 4, causal=causal, window=window), COSTS[cost])


@pytest.mark.parametrize("cost", COSTS)
def test_more_positions_than_rows_reads_slots_modulo_rows(cost: str) -> None:
    for window in (None, 9, 20):
        check(Case(((0, 1, 1, 21), (1, 3, 2, 13)), 4, 5, 3, window=window), COSTS[cost])


@pytest.mark.parametrize("cost", COSTS)
def test_a_column_may_have_several_segments(cost: str) -> None:
    check(Case(((0, 1, 1, 4), (1, 1, 2, 3), (2, 1, 1, 5), (3, 2, 2, 5)), 5, 8, 3), COSTS[cost])


BATCH = Case(
    segments=((0, 1, 6, 600), (2, 1, 2, 20), (3, 1, 4, 41), (4, 1, 3, 1)),
    tokens=5,
    rows=640,
    cols=8,
    filler=0.0,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "row, col", [(20, 2), (599, 2), (1, 3), (100, 5), (5, 7), (605, 4), (5, 0)]
)
def test_one_bad_number_in_an_unread_row_of_a_batch_changes_nothing(
    dtype: torch.dtype, which: str, bad: float, row: int, col: int
) -> None:
    case = replace(BATCH, dtype=dtype)
    made = build(case)
    expected = reference(case, made)
    cache = made.key_cache if which == "key" else made.value_cache
    cache[row, col, 0, 7] = bad
    out = attend(case, made, COSTS["batched"])
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance(made))


def test_a_bad_number_in_a_read_row_reaches_its_sequence_alone() -> None:
    made = build(BATCH)
    expected = reference(BATCH, made)
    made.value_cache[7, 4] = float("nan")
    out = attend(BATCH, made, COSTS["batched"])
    assert out[3].isnan().all()
    kept = [0, 1, 2, 4]
    torch.testing.assert_close(out[kept], expected[kept], rtol=0, atol=tolerance(made))


@pytest.mark.parametrize("window", [1, 8, 9, 12])
def test_rings_in_a_batch_at_every_length(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SegmentRun", None)  # all of it in batches, in one pass
    for kv_end in range(1, 40):
        segments = ((0, 1, 3, kv_end), (1, 1, 1, 25), (2, 1, 2, 7))
        check(Case(segments, 3, 12, 4, window=window, causal=bool(kv_end % 2)), COSTS["batched"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_batch_may_hide_a_thousand_rows_on_either_side(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SegmentRun", None)
    case = Case(((0, 1, 1, 30), (1, 1, 2, 1200)), 2, 1200, 3, window=20, dtype=dtype)
    check(case, COSTS["batched"])


def test_idle_columns_cost_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(BATCH)
    made.key_cache[:, 5] = made.value_cache[:, 5] = float("nan")
    monkeypatch.setattr(attention, "SegmentRun", None)  # a second pass would call it
    attend(BATCH, made, COSTS["batched"])


def test_layers_of_different_shapes_and_dtypes_share_a_prepared_step() -> None:
    kernel = CpuKernel()
    plain = Case(((0, 1, 2, 9), (1, 1, 1, 12), (2, 6, 3, 30)), 8, 32, 4)
    info = build(plain).seq_info
    step = kernel.prepare(StepTables(info, NONE, NONE), rows=32, window=None, causal=True)
    for heads, group, size, dtype in (
        (2, 3, 32, torch.float32),
        (4, 1, 80, torch.float32),
        (2, 3, 32, torch.bfloat16),
        (2, 3, 32, torch.float32),
    ):
        case = replace(plain, heads=heads, group=group, head_size=size, dtype=dtype)
        made = build(case)
        out = torch.full(made.query.shape, float("nan"), dtype=dtype)
        kernel.attend(made.query, made.key_cache, made.value_cache, step, scale=made.scale, out=out)
        torch.testing.assert_close(out, reference(case, made), rtol=0, atol=tolerance(made))


@pytest.mark.parametrize("cost", COSTS)
def test_out_may_be_a_strided_view(cost: str) -> None:
    made = build(BATCH)
    kernel = CpuKernel(COSTS[cost])
    tables = StepTables(made.seq_info, NONE, NONE)
    step = kernel.prepare(tables, rows=BATCH.rows, window=None, causal=True)
    wide = torch.full((5, 8, 32), 7.0)
    kernel.attend(
        made.query, made.key_cache, made.value_cache, step, scale=made.scale, out=wide[:, 1:7]
    )
    torch.testing.assert_close(wide[:, 1:7], reference(BATCH, made), rtol=0, atol=tolerance(made))
    assert (wide[:, [0, 7]] == 7).all()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_write_equals_reference(data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    slots = data.draw(
        st.lists(
            st.tuples(st.integers(0, cols - 1), st.integers(0, 4 * rows)),
            max_size=12,
            unique_by=lambda slot: (slot[0], slot[1] % rows),
        )
    )
    case = Case(
        segments=(),
        tokens=len(slots),
        rows=rows,
        cols=cols,
        group=1,
        dtype=data.draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16))),
        order=data.draw(st.sampled_from(("column", "seed"))),
    )
    packed = torch.randn(len(slots), 2, 2, 32).to(case.dtype)
    seq_cols = torch.tensor([col for col, _ in slots], dtype=torch.int32)
    positions = torch.tensor([position for _, position in slots], dtype=torch.int32)
    written, expected = empty_cache(case, 5.0), empty_cache(case, 5.0)
    write_slots(packed[:, 0], packed[:, 1], *written, seq_cols, positions)
    write_slots_reference(packed[:, 0], packed[:, 1], *expected, seq_cols, positions)
    assert torch.equal(written[0], expected[0])
    assert torch.equal(written[1], expected[1])


def test_padded_tokens_may_share_the_scratch_slot() -> None:
    key_cache, value_cache = empty_cache(Case((), 3, 4, 3))
    tokens = torch.randn(3, 2, 32)
    zeros = torch.zeros(3, dtype=torch.int32)
    write_slots(tokens, tokens, key_cache, value_cache, zeros, zeros)
    assert any(torch.equal(key_cache[0, 0], token) for token in tokens)
    assert not key_cache[:, 1:].any() and not key_cache[1:].any()
