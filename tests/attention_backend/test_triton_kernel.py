"""The Triton kernels against the reference: in the interpreter, or compiled on a GPU.

Without a GPU, test_triton_interpreted.py runs this file in a process of its own. A GPU compiles
for every shape and kind of mask, so that fewer of them are tried there.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from vllm_kv_columns.attention_backend import StepBounds, write_slots_reference
from vllm_kv_columns.attention_backend.triton import (
    TritonKernel,
    TritonStep,
    attention,
    fill_tables,
    fill_tables_reference,
    layer,
)
from vllm_kv_columns.attention_backend.triton.buffers import Buffers
from vllm_kv_columns.attention_backend.triton.config import choose_tiles
from vllm_kv_columns.kv_manager import StepTables

from .cases import DTYPES, HEAD_SIZES, Case, cases, empty_cache, tolerance
from .interpreter import DEVICE, INTERPRETED, complete
from .triton_helpers import attend, built, check, place, reference, tables_of

# Raised in the interpreter of older Tritons.
QUIET = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
pytestmark = QUIET if INTERPRETED else pytest.mark.gpu
if INTERPRETED:
    complete()
NAN = float("nan")
MIXED = Case(
    # a long decode, a chunk of several tiles, a verification, a spare row, an empty column
    segments=((2, 1, 4, 700), (3, 50, 2, 190), (54, 3, 1, 300), (0, 0, 0, 0), (57, 2, 3, 0)),
    tokens=61,
    rows=704,
    cols=6,
    group=3,
    head_size=64,
    dtype=torch.bfloat16,
    filler=NAN,
)
DECODES = replace(
    MIXED,
    # a long decode, a draft, decodes of one key, of none, of a tile; a row that nothing covers
    segments=((0, 1, 1, 700), (1, 4, 2, 190), (5, 1, 3, 1), (6, 2, 4, 0), (9, 1, 5, 64)),
    tokens=11,
    heads=4,
    group=4,
)
DRAFTS = replace(
    DECODES,
    # decodes, drafts of up to 16, 32 and 64 rows, one of few keys, one of none, a whole prompt
    segments=((0, 1, 1, 690), (1, 5, 2, 700), (6, 13, 3, 300), (20, 16, 4, 40), (36, 9, 5, 9)),
    tokens=50,
)
SHAPES = [
    (size, dtype)
    for size in HEAD_SIZES
    for dtype in DTYPES
    if INTERPRETED or dtype == torch.bfloat16 or size == 64
]
GROUPS = [1, 2, 3, 4, 5, 7, 8, 16, 17] if INTERPRETED else [1, 7, 16]


def windowed(window: int, q_len: int, kv_end: int, slack: int = 0, **changes: object) -> Case:
    """A chunk, a decode and a short draft on a ring that just suffices, or by ``slack`` more."""
    segments = ((0, q_len, 2, kv_end), (q_len, 1, 1, kv_end + 1), (q_len + 1, 3, 3, kv_end))
    rows = window + q_len - 1 + slack
    case = replace(MIXED, segments=segments, tokens=q_len + 4, rows=rows, window=window)
    return replace(case, **changes)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=30, database=None)
@given(cases(max_segments=6))
def test_equals_reference(case: Case) -> None:
    if not INTERPRETED:
        case = replace(case, heads=2, group=3, head_size=64, dtype=torch.bfloat16)
    check(case, DEVICE)


@pytest.mark.parametrize("size, dtype", SHAPES, ids=str)
def test_head_sizes_and_dtypes(size: int, dtype: torch.dtype) -> None:
    check(replace(MIXED, head_size=size, dtype=dtype), DEVICE)


@pytest.mark.skipif(not INTERPRETED, reason="each is a compilation")
@pytest.mark.parametrize("size", [33, 100, 200])
def test_odd_head_sizes(size: int) -> None:
    check(replace(MIXED, head_size=size), DEVICE)


@pytest.mark.parametrize("group", GROUPS)
def test_groups(group: int) -> None:
    check(replace(MIXED, group=group), DEVICE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size, dtype", [(64, torch.bfloat16), (128, torch.float16)], ids=str)
def test_decodes_memcheck(size: int, dtype: torch.dtype, causal: bool) -> None:
    check(replace(DECODES, head_size=size, dtype=dtype, causal=causal), DEVICE)
    check(replace(DECODES, head_size=size, dtype=dtype, causal=causal, order="seed"), DEVICE)


@pytest.mark.parametrize(
    "size, heads, group, causal",
    [(64, 3, 4, True), (128, 4, 4, False), (128, 1, 1, True), (256, 2, 2, True)],
    ids=str,
)
def test_drafts_memcheck(size: int, heads: int, group: int, causal: bool) -> None:
    case = replace(DRAFTS, head_size=size, heads=heads, group=group, causal=causal)
    check(case, DEVICE)
    long = (36, 40, 5, 500)
    check(replace(case, tokens=90, segments=(*case.segments[:4], long)), DEVICE)


@pytest.mark.parametrize("window", [1, 63, 100])
def test_drafts_on_rings_memcheck(window: int) -> None:
    for kv_end, slack in ((16, 0), (window + 16, 0), (3 * window + 40, 9)):
        segments = ((0, 16, 2, kv_end), (16, 5, 1, kv_end), (21, 1, 4, kv_end), (22, 9, 3, kv_end))
        rows = window + 15 + slack
        check(replace(DRAFTS, segments=segments, tokens=32, rows=rows, window=window), DEVICE)


@pytest.mark.parametrize("window", [1, 16, 17, 100])
def test_decodes_on_rings_memcheck(window: int) -> None:
    for kv_end, slack in ((4, 0), (window + 3, 9), (window + 4, 0), (3 * window + 20, 9)):
        segments = ((0, 4, 2, kv_end), (4, 1, 1, kv_end + 1), (5, 1, 3, max(1, kv_end - 3)))
        rows = window + 3 + slack
        check(replace(DECODES, segments=segments, tokens=6, rows=rows, window=window), DEVICE)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 16] if INTERPRETED else [1, 3, 16])
def test_groups_of_decodes(group: int) -> None:
    segments = ((0, 1, 1, 700), (1, 16 // group, 2, 190), (18, 1, 3, 33))
    check(replace(DECODES, segments=segments, tokens=19, group=group, heads=8), DEVICE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", ["column", "seed"])
def test_full_attention_memcheck(causal: bool, order: str) -> None:
    check(replace(MIXED, causal=causal, order=order), DEVICE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [100, 127, 128, 129, 190])
def test_windows_at_the_edges_of_tiles(window: int, causal: bool) -> None:
    for kv_end in (window - 1, window, window + 1, 3 * window + 7):
        check(windowed(window, 50, max(kv_end, 50), causal=causal), DEVICE)


@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_that_wrapped_many_times_memcheck(causal: bool) -> None:
    for kv_end in (177, 178, 500, 1781):
        check(windowed(128, 51, kv_end, causal=causal), DEVICE)
        check(windowed(128, 51, kv_end, slack=9, causal=causal), DEVICE)


@pytest.mark.parametrize("window", [1, 2, 17, 40])
def test_a_ring_of_fewer_rows_than_a_tile_memcheck(window: int) -> None:
    for kv_end in (7, window + 6, 5 * window + 30):
        check(windowed(window, 7, kv_end), DEVICE)


@pytest.mark.parametrize("causal", [True, False])
def test_more_queries_than_positions_memcheck(causal: bool) -> None:
    segments = ((0, 5, 1, 2), (5, 30, 2, 11), (36, 1, 3, 1))
    check(replace(MIXED, segments=segments, causal=causal), DEVICE)


@pytest.mark.parametrize(
    "segments",
    [
        pytest.param((), id="no rows"),
        pytest.param(((0, 0, 0, 0),) * 3, id="spare rows"),
        pytest.param(((0, 5, 1, 0), (6, 40, 2, 0)), id="columns without keys"),
        pytest.param(((50, 1, 1, 9), (0, 0, 0, 0), (1, 49, 2, 70), (0, 1, 3, 600)), id="any order"),
        pytest.param(((0, 1, 1, 64), (1, 1, 2, 63), (2, 1, 1, 65), (3, 9, 2, 72)), id="one column"),
        pytest.param(tuple((i, 1, 1 + i % 5, 37 * i % 700) for i in range(0, 61, 3)), id="many"),
    ],
)
def test_step_memcheck(segments: tuple[tuple[int, int, int, int], ...]) -> None:
    check(replace(MIXED, segments=segments), DEVICE)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter has few programs, a GPU many")
@pytest.mark.parametrize("processors", [1, 7, 40])
def test_any_number_of_programs_shares_the_short_segments(
    processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "processors", lambda device: processors)
    segments = ((0, 1, 1, 704), (1, 1, 2, 333), (2, 5, 3, 700), (7, 1, 4, 1), (8, 2, 5, 257))
    check(replace(MIXED, segments=segments, head_size=128, heads=3), DEVICE)


@pytest.mark.parametrize("heads, keys", [(1, 200), (2, 700), (8, 4000), (1, 4000)])
def test_the_cut_is_even_complete_and_not_too_fine(heads: int, keys: int) -> None:
    kernel = TritonKernel()
    info = torch.tensor([(0, 1, 1, keys), (1, 0, 0, 0), (1, 1, 2, 70)], dtype=torch.int32)
    kernel.reserve(StepBounds(8, 4, heads, heads, 64), DEVICE)
    step = kernel.prepare(tables_of(info.to(DEVICE)), rows=4096, window=None, causal=True)
    (buffers,) = kernel._buffers.values()
    assert buffers.owner is step
    counts = buffers.pieces.reshape(-1, 12)[:, 2].tolist()
    tile = buffers.cut.short_keys
    total = -(-keys // tile) + -(-70 // tile)
    least = buffers.cut.min_tiles
    used = counts.index(0) if 0 in counts else len(counts)
    assert sum(counts[:used]) == total and not any(counts[used:])
    assert max(counts[:used]) - min(counts[:used]) <= 1
    if total <= 2 * least * 2:  # two short segments, a run for each
        assert used == min(buffers.cut.runs, 2)
    else:
        most = min(buffers.cut.runs, -(-total // least))
        assert most * 7 // 8 <= used <= most
    assert buffers.live.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "count, runs, used",
    [(64, 33, 32), (3, 10, 9), (8, 8, 8), (9, 8, 8), (32, 33, 32), (33, 33, 33), (300, 33, 30)],
)
def test_segments_of_equal_lengths_are_cut_as_little_as_can_be(
    count: int, runs: int, used: int
) -> None:
    cut = replace(choose_tiles(2, 4, 64, 2, 8).cut, short_keys=16, runs=runs, min_tiles=1)
    info = torch.tensor([(i, 1, i, 640) for i in range(count)], dtype=torch.int32, device=DEVICE)
    buffers = Buffers(cut, 64, count, count, DEVICE)
    layer.launch_schedule(buffers, info, count, None)
    pieces = buffers.pieces.reshape(-1, 12)
    assert pieces[:, 2].count_nonzero() == used
    parts = pieces[:, 3][pieces[:, 3] > 0].tolist()
    if count == 9:  # no number of runs is near that cuts none
        assert len(parts) > 1
    else:
        assert parts == ([] if count >= used else [used // count] * count)


@pytest.mark.skipif(not INTERPRETED, reason="the launch of what the device has is tested there")
@pytest.mark.parametrize("runs", [1, 7, 40])
def test_the_plain_kernels_serve_a_cut_for_others(
    runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(*shape: Any, **device: Any) -> Any:
        tiles = choose_tiles(*shape, **device)
        return replace(tiles, cut=replace(tiles.cut, short_keys=16, draft_runs=runs))

    monkeypatch.setattr(layer, "choose_tiles", choose)
    check(MIXED, DEVICE)
    check(replace(MIXED, dtype=torch.float32, group=8), DEVICE)


@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_scales_that_are_not_positive(scale: float) -> None:
    made = replace(built(MIXED, DEVICE), scale=scale)
    out = attend(MIXED, made)
    expected = reference(MIXED, made)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=tolerance(made))


def test_the_same_bits_twice() -> None:
    made, kernel = built(MIXED, DEVICE), TritonKernel()
    first = attend(MIXED, made, kernel)
    assert torch.equal(attend(MIXED, made, kernel), first)
    assert torch.equal(attend(MIXED, made), first)
    made = built(DECODES, DEVICE)
    first = attend(DECODES, made, kernel, max_q_len=4)
    assert torch.equal(attend(DECODES, made, kernel, max_q_len=4), first)
    made = built(DRAFTS, DEVICE)
    first = attend(DRAFTS, made, kernel)
    assert torch.equal(attend(DRAFTS, made, kernel, max_q_len=16), first)


def test_out_may_be_a_strided_view() -> None:
    made = built(MIXED, DEVICE)
    wide = torch.full((61, 8, 64), 7.0, dtype=MIXED.dtype, device=DEVICE)
    out = attend(MIXED, made, out=wide[:, 1:7])
    torch.testing.assert_close(out.cpu(), reference(MIXED, made), rtol=0, atol=tolerance(made))
    assert (wide[:, [0, 7]] == 7).all()


def test_no_stride_need_be_one_memcheck() -> None:
    made = built(MIXED, DEVICE)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        fill = NAN if tensor.is_floating_point() else 77
        wide = torch.full((*tensor.shape, 2), fill, dtype=tensor.dtype, device=DEVICE)
        wide[..., 0] = tensor
        return wide[..., 0]

    made = replace(
        made,
        query=spread(made.query),
        key_cache=spread(made.key_cache),
        value_cache=made.value_cache.transpose(2, 3).contiguous().transpose(2, 3),
        seq_info=spread(made.seq_info),
    )
    out = attend(MIXED, made, out=spread(torch.zeros_like(made.query)))
    torch.testing.assert_close(out.cpu(), reference(MIXED, made), rtol=0, atol=tolerance(made))


@pytest.fixture(params=["kept", "reserved", "of each step"])
def kernel(request: pytest.FixtureRequest) -> Iterator[TritonKernel]:
    made = TritonKernel(keep_buffers=request.param != "of each step")
    if request.param == "reserved":
        made.reserve(StepBounds(100, 9, 6, 2, 64), DEVICE)
    yield made


def test_interleaved_steps_and_layers_are_right(kernel: TritonKernel) -> None:
    one = MIXED
    other = replace(MIXED, segments=((0, 1, 1, 690), (1, 33, 5, 500)), tokens=40, window=90)
    runs = []
    for case in (one, other):
        made = built(case, DEVICE)
        step = kernel.prepare(
            tables_of(made.seq_info), rows=case.rows, window=case.window, causal=True
        )
        runs.append((case, made, step))
    for case, made, step in runs * 2:
        out = torch.full(made.query.shape, NAN, dtype=case.dtype, device=DEVICE)
        kernel.attend(made.query, made.key_cache, made.value_cache, step, scale=made.scale, out=out)
        torch.testing.assert_close(out.cpu(), reference(case, made), rtol=0, atol=tolerance(made))


@pytest.mark.parametrize("before, after", [(None, 4), (4, None)])
def test_a_captured_layer_is_right_whatever_later_steps_are_told(
    before: int | None, after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's launches were chosen by one bound; the schedule is made by steps with another."""
    if INTERPRETED:
        for module in (layer, attention):
            monkeypatch.setattr(module, "processors", lambda device: 4)
    kernel, made = TritonKernel(), built(DECODES, DEVICE)
    tables = tables_of(made.seq_info)
    kernel.reserve(StepBounds(11, 5, 16, 4, 64), DEVICE)

    def prepare(max_q_len: int | None) -> TritonStep:
        return kernel.prepare(
            tables, rows=DECODES.rows, window=None, causal=True, max_q_len=max_q_len
        )

    captured = prepare(before)
    prepare(after)
    (buffers,) = kernel._buffers.values()
    buffers.owner = captured  # a replay makes no schedule of its own
    out = torch.full(made.query.shape, NAN, dtype=DECODES.dtype, device=DEVICE)
    kernel.attend(made.query, made.key_cache, made.value_cache, captured, scale=made.scale, out=out)
    torch.testing.assert_close(out.cpu(), reference(DECODES, made), rtol=0, atol=tolerance(made))


def test_reserved_buffers_keep_their_place_and_outgrown_ones_stay() -> None:
    kernel = TritonKernel()
    kernel.reserve(StepBounds(70, 8, 6, 2, 64), DEVICE)
    (reserved,) = kernel._buffers.values()
    place_of = reserved.pieces.data_ptr()
    check(MIXED, DEVICE, kernel)
    (used,) = kernel._buffers.values()
    assert used is reserved and used.pieces.data_ptr() == place_of
    check(replace(MIXED, tokens=71), DEVICE, kernel)
    (larger,) = kernel._buffers.values()
    assert (larger.tokens, larger.segments) == (71, 8)
    assert kernel._outgrown == [reserved]
    check(MIXED, DEVICE, kernel)
    assert list(kernel._buffers.values()) == [larger]


def slots_case(heads: int, order: str, dtype: torch.dtype) -> Case:
    return Case((), 9, 5, 4, heads=heads, head_size=80, order=order, dtype=dtype)


@pytest.mark.parametrize("order", ["column", "seed"])
@pytest.mark.parametrize("heads, dtype", [(2, torch.float32), (3, torch.bfloat16)], ids=str)
def test_write_equals_reference_memcheck(heads: int, dtype: torch.dtype, order: str) -> None:
    case = slots_case(heads, order, dtype)
    packed = torch.randn(9, 2, heads, 80).to(dtype)
    cols = torch.tensor([1, 2, 3, 1, 2, 3, 1, 2, 3], dtype=torch.int32)
    positions = torch.tensor([0, 5, 4, 6, 1, 13, 104, 3, 2], dtype=torch.int32)
    expected = empty_cache(case, 5.0)
    write_slots_reference(packed[:, 0], packed[:, 1], *expected, cols, positions)
    written = [place(cache, DEVICE) for cache in empty_cache(case, 5.0)]
    on_device = packed.to(DEVICE)
    info = torch.zeros(0, 4, dtype=torch.int32, device=DEVICE)
    kernel = TritonKernel()
    tables = StepTables(info, cols.to(DEVICE), positions.to(DEVICE))
    step = kernel.prepare(tables, rows=5, window=None, causal=True)
    kernel.write(on_device[:, 0], on_device[:, 1], written[0], written[1], step)
    assert torch.equal(written[0].cpu(), expected[0])
    assert torch.equal(written[1].cpu(), expected[1])


def test_tokens_of_the_scratch_column_touch_its_first_row_alone() -> None:
    case = slots_case(2, "column", torch.float32)
    key_cache, value_cache = (place(cache, DEVICE) for cache in empty_cache(case))
    tokens = torch.ones(3, 2, 80, device=DEVICE)
    cols, positions = torch.tensor([[0, 0, 0], [3, 1 << 20, 4]], dtype=torch.int32, device=DEVICE)
    info = torch.zeros(0, 4, dtype=torch.int32, device=DEVICE)
    kernel = TritonKernel()
    step = kernel.prepare(StepTables(info, cols, positions), rows=5, window=None, causal=True)
    kernel.write(tokens, tokens, key_cache, value_cache, step)
    for cache in (key_cache, value_cache):
        assert (cache[0, 0] == 1).all() and not cache[:, 1:].any() and not cache[1:].any()


@pytest.mark.parametrize("num_reqs, num_tokens", [(0, 0), (1, 1), (4, 9), (5, 300)])
def test_fill_tables_memcheck(num_reqs: int, num_tokens: int) -> None:
    block = 512
    columns = torch.tensor([3, 0, 2, 1, 7], dtype=torch.int32)
    block_table = torch.full((5, 3), 99, dtype=torch.int32)
    block_table[:, 0] = columns
    starts = torch.tensor([0, 1, 4, 4, 9, 300], dtype=torch.int32)
    lengths = torch.tensor([40, 50, 60, 70, 511], dtype=torch.int32)
    slots = torch.arange(300) * 13 % (4 * block)
    slots[[2, 5]] = -1
    slots[7] = (1 << 22) * block + 17  # beyond 32 bits
    filled = []
    for fill, device in ((fill_tables_reference, torch.device("cpu")), (fill_tables, DEVICE)):
        seq_info, seq_cols, positions = (
            torch.full(shape, 77, dtype=torch.int32, device=device)
            for shape in ((8, 4), (303,), (303,))
        )
        tables = StepTables(seq_info, seq_cols, positions)
        fill(
            starts.to(device),
            place(block_table, device),
            lengths.to(device),
            slots.to(device),
            block_size=block,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            tables=tables,
        )
        filled.append([table.tolist() for table in (seq_info, seq_cols, positions)])
    assert filled[0] == filled[1]
    assert filled[0][0][:2] == ([[0, 1, 3, 40], [1, 3, 0, 0]] if num_reqs > 1 else filled[1][0][:2])


def test_more_than_the_tables_hold_is_refused() -> None:
    numbers = torch.zeros(9, dtype=torch.int32, device=DEVICE)
    info = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    tables = StepTables(info, numbers, numbers)

    def fill(num_reqs: int, num_tokens: int, starts: torch.Tensor = numbers) -> None:
        fill_tables(
            starts,
            numbers.reshape(9, 1),
            numbers,
            numbers.long(),
            block_size=16,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            tables=tables,
        )

    with pytest.raises(ValueError, match="3 requests and 4 tokens do not fit tables of 2 seg"):
        fill(3, 4)
    with pytest.raises(ValueError, match="slot_mapping has 9 entries; 1 requests of 10 tokens"):
        fill(1, 10)
    with pytest.raises(ValueError, match=r"query_start_loc is torch.int64; it must be torch.int32"):
        fill(1, 4, numbers.long())


def test_what_the_host_can_see_is_refused() -> None:
    made, kernel = built(MIXED, DEVICE), TritonKernel()
    tables = tables_of(made.seq_info)
    with pytest.raises(ValueError, match="rows is 0"):
        kernel.prepare(tables, rows=0, window=None, causal=True)
    with pytest.raises(ValueError, match="window is 0; it must be at least 1"):
        kernel.prepare(tables, rows=8, window=0, causal=True)
    with pytest.raises(ValueError, match="prepared for 705 cache rows; there are 704"):
        attend(replace(MIXED, rows=705), made)
    with pytest.raises(ValueError, match=r"query is torch\.float16, the cache torch\.bfloat16"):
        attend(MIXED, replace(made, query=made.query.half()))
    with pytest.raises(ValueError, match=r"Hq a multiple of the cache's heads"):
        attend(MIXED, replace(made, query=made.query[:, :5]))
    with pytest.raises(ValueError, match=r"out is torch.bfloat16 \[60, 6, 64\]"):
        attend(MIXED, made, out=torch.empty_like(made.query[:60]))
    with pytest.raises(ValueError, match="one D for all"):
        attend(MIXED, replace(made, query=made.query[..., :32]))
    with pytest.raises(ValueError, match="must be on one device"):
        attend(MIXED, replace(made, value_cache=made.value_cache.to("meta")))
    step = kernel.prepare(tables, rows=8, window=None, causal=True)
    tokens = torch.zeros(2, 2, 64, dtype=MIXED.dtype, device=DEVICE)
    with pytest.raises(ValueError, match="key has 2 tokens and the step's tables 0"):
        kernel.write(tokens, tokens, made.key_cache, made.value_cache, step)
    with pytest.raises(ValueError, match="7 query heads and 2 KV heads"):
        kernel.reserve(StepBounds(8, 8, 7, 2, 64), DEVICE)
