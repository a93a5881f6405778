"""The Triton kernels on a GPU: real sizes, captured graphs, what 32 bits do not hold."""

from collections.abc import Callable

import pytest
import torch

from vllm_kv_columns.attention_backend import (
    StepBounds,
    sdpa_varlen,
    sdpa_varlen_reference,
    write_slots_reference,
)
from vllm_kv_columns.attention_backend.triton import TritonKernel, TritonStep, fill_tables
from vllm_kv_columns.kv_manager import StepTables

from .dense import dense_attention
from .triton_helpers import packed, tables_of_segments

pytestmark = pytest.mark.gpu

HEADS, GROUP, SIZE, DTYPE = 8, 4, 128, torch.bfloat16
SCALE = SIZE**-0.5
Segments = list[tuple[int, int, int, int]]


def caches(cols: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the middle one of three layers, ordered as the columns' store orders them."""
    region = torch.randn(cols, rows, 3, 2, HEADS, SIZE, device="cuda", dtype=DTYPE)
    layer = region[:, :, 1].transpose(0, 1)
    return layer[:, :, 0], layer[:, :, 1]


def queries(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HEADS * GROUP, SIZE, device="cuda", dtype=DTYPE)


@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([(1, 4096 - 61 * i) for i in range(24)], id="decode"),
        pytest.param([(1, 120), (1, 8000), (1, 1)], id="skewed decode"),
        pytest.param([(1500, 1500)], id="prefill"),
        pytest.param([(300, 4000), (1, 777), (4, 2000), (5, 5), (777, 777)], id="mixed"),
    ],
)
def test_errors_are_those_of_rounding(lengths: list[tuple[int, int]], window: int | None) -> None:
    """Weights and results are rounded to bfloat16 once each; all else is at least float32."""
    torch.manual_seed(0)
    segments = packed(lengths)
    rows = max(kv_end for _, kv_end in lengths) if window is None else window + 1535
    key_cache, value_cache = caches(len(lengths) + 1, rows)
    query = queries(sum(q_len for q_len, _ in lengths))
    out = torch.full_like(query, float("nan"))
    kernel = TritonKernel()
    longest = max(q_len for q_len, _ in lengths)
    step = kernel.prepare(
        tables_of_segments(segments), rows=rows, window=window, causal=True, max_q_len=longest
    )
    kernel.attend(query, key_cache, value_cache, step, scale=SCALE, out=out)
    half_ulp = torch.finfo(DTYPE).eps / 2
    for start, q_len, col, kv_end in segments:
        first = 0 if window is None else max(0, kv_end - q_len - window + 1)
        slots = torch.arange(first, kv_end, device="cuda") % rows
        key, value = key_cache[slots, col], value_cache[slots, col]
        exact, size = (
            dense_attention(query[start : start + q_len], key, v, scale=SCALE, window=window)
            for v in (value, value.abs())
        )
        error = (out[start : start + q_len] - exact).abs()
        assert (error <= 1.02 * half_ulp * (exact.abs() + size) + 1e-4 * size).all()


MIXES: dict[str, list[tuple[int, int]]] = {
    "decodes": [(1, 1 + 31 * i) for i in range(64)],
    "nothing": [],
    "one": [(1, 2048)],
    "a whole prompt": [(256, 256)],
    "a late chunk and decodes": [(199, 2047), *[(1, 300 + i) for i in range(57)]],
    "drafts": [(4, 2000 - 90 * i) for i in range(20)],
    "columns without keys": [(1, 0), (30, 0), (9, 40), (1, 5)],
    "chunks": [(40, 1000), (0, 7), (17, 17), (100, 130), (5, 900), (4, 4)],
}
TOKENS, SEGMENTS, ROWS = 256, 64, 2048


@pytest.mark.parametrize(
    "where, longest", [("outside", None), ("inside", None), ("outside", 4), ("inside", 4)]
)
def test_one_graph_serves_any_lengths(where: str, longest: int | None) -> None:
    """Tables and schedule are made outside the graph, as vLLM does, or in it.

    longest: what the graph was told of the queries of a segment, as vLLM does for decodes. The
    steps that it serves are told of theirs.
    """
    torch.manual_seed(0)
    key_cache, value_cache = caches(SEGMENTS + 1, ROWS)
    query, out = queries(TOKENS), queries(TOKENS)
    key, value = torch.randn(2, TOKENS, HEADS, SIZE, device="cuda", dtype=DTYPE)
    tables = StepTables(
        torch.zeros(SEGMENTS, 4, dtype=torch.int32, device="cuda"),
        *torch.zeros(2, TOKENS, dtype=torch.int32, device="cuda"),
    )
    kernel = TritonKernel()
    bounds = StepBounds(2 * TOKENS, SEGMENTS, HEADS * GROUP, HEADS, SIZE)
    kernel.reserve(bounds, torch.device("cuda"))

    def prepare(max_q_len: int | None = longest) -> TritonStep:
        return kernel.prepare(tables, rows=ROWS, window=None, causal=True, max_q_len=max_q_len)

    def layer(step: TritonStep) -> None:
        kernel.write(key, value, key_cache, value_cache, step)
        kernel.attend(query, key_cache, value_cache, step, scale=SCALE, out=out)

    layer(prepare())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    step = prepare()
    with torch.cuda.graph(graph):
        layer(prepare() if where == "inside" else step)

    for lengths in [*MIXES.values(), MIXES["decodes"]]:
        if longest is not None and max((q_len for q_len, _ in lengths), default=0) > longest:
            continue
        segments = packed(lengths)
        fill(tables, segments)
        for tensor in (query, key, value):
            tensor.normal_()
        out.fill_(float("nan"))
        written = key_cache.clone(), value_cache.clone()
        write_slots_reference(key, value, *written, tables.seq_cols, tables.positions)
        if where == "outside":
            prepare(max((q_len for q_len, _ in lengths), default=0))
        graph.replay()
        real = sum(q_len for q_len, _ in lengths)
        mine = [cache[:, 1:] for cache in (key_cache, value_cache)]
        for cache, expected in zip(mine, written, strict=True):
            assert torch.equal(cache, expected[:, 1:])
        expected = sdpa_varlen_reference(
            query, key_cache, value_cache, tables.seq_info, scale=SCALE
        )
        torch.testing.assert_close(out, expected, rtol=0, atol=0.08)
        assert not out[real:].any()


@pytest.mark.parametrize("name", ["decodes", "drafts", "a late chunk and decodes"])
def test_each_layer_reads_what_was_written_right_before(name: str) -> None:
    """Kernels of a graph overlap; new keys, values and queries in each replay tell if too much."""
    torch.manual_seed(0)
    segments = packed(MIXES[name])
    tokens, longest = sum(q_len for _, q_len, _, _ in segments), max(q for _, q, _, _ in segments)
    layers = [caches(len(segments) + 1, ROWS) for _ in range(4)]
    query, key, value = (
        queries(tokens),
        *torch.randn(2, len(layers), tokens, HEADS, SIZE, device="cuda", dtype=DTYPE),
    )
    outs = [torch.empty_like(query) for _ in layers]
    tables = StepTables(
        torch.zeros(len(segments), 4, dtype=torch.int32, device="cuda"),
        *torch.zeros(2, tokens, dtype=torch.int32, device="cuda"),
    )
    fill(tables, segments)
    kernel = TritonKernel()

    def forward() -> None:
        step = kernel.prepare(tables, rows=ROWS, window=None, causal=True, max_q_len=longest)
        for i, layer in enumerate(layers):
            kernel.write(key[i], value[i], *layer, step)
            kernel.attend(query, *layer, step, scale=SCALE, out=outs[i])

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    for _ in range(8):
        for tensor in (query, key, value):
            tensor.normal_()
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for layer, out in zip(layers, outs, strict=True):
            expected = sdpa_varlen_reference(query, *layer, tables.seq_info, scale=SCALE)
            torch.testing.assert_close(out, expected, rtol=0, atol=0.08)


def fill(tables: StepTables, segments: Segments) -> None:
    """The tables through the kernel that fills them from a paged batch."""
    block = 1 << 20
    starts = [start for start, _, _, _ in segments]
    starts.append(sum(q_len for _, q_len, _, _ in segments))
    slots = [
        col * block + max(0, kv_end - q_len + i) if kv_end else -1
        for _, q_len, col, kv_end in segments
        for i in range(q_len)
    ]
    columns = [[col if kv_end else 0] for _, _, col, kv_end in segments]

    def on_gpu(numbers: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device="cuda")

    fill_tables(
        on_gpu(starts, torch.int32),
        on_gpu(columns, torch.int32).reshape(-1, 1),
        on_gpu([kv_end for _, _, _, kv_end in segments], torch.int32),
        on_gpu(slots, torch.int64),
        block_size=block,
        num_reqs=len(segments),
        num_tokens=len(slots),
        tables=tables,
    )


def test_nothing_is_allocated_after_reserve() -> None:
    key_cache, value_cache = caches(5, 512)
    query, out = queries(TOKENS), queries(TOKENS)
    key, value = torch.randn(2, TOKENS, HEADS, SIZE, device="cuda", dtype=DTYPE)
    segments = packed([(1, 300), (200, 450), (2, 7), (20, 20)])
    numbers = torch.zeros(TOKENS, dtype=torch.int32, device="cuda")
    tables = StepTables(tables_of_segments(segments).seq_info, numbers, numbers.clone())
    kernel = TritonKernel()
    kernel.reserve(StepBounds(300, 64, HEADS * GROUP, HEADS, SIZE), torch.device("cuda"))
    starts, column = numbers[:5], numbers.reshape(-1, 1)
    slots = numbers.long()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for tokens in (TOKENS, 1, 40):
        fill_tables(
            starts,
            column,
            numbers,
            slots,
            block_size=512,
            num_reqs=4,
            num_tokens=tokens,
            tables=tables,
        )
        step = kernel.prepare(tables, rows=512, window=None, causal=True)
        kernel.write(key, value, key_cache, value_cache, step)
        kernel.attend(query[:tokens], key_cache, value_cache, step, scale=SCALE, out=out[:tokens])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.fixture
def huge() -> torch.Tensor:
    """Numbers whose last ones have offsets beyond 31 bits; 5.4 GB."""
    free, _ = torch.cuda.mem_get_info()
    if free < 7 << 30:
        pytest.skip("needs 7 GB of GPU memory")
    return torch.empty((1 << 31) + (1 << 29), dtype=DTYPE, device="cuda")


LENGTHS = [(1, 700), (40, 600), (3, 64)]


def both_ways(
    attend: Callable[[list[tuple[int, int, int, int]]], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same steps in column 1 and in column 2."""
    near, far = (
        torch.cat([attend([(0, q_len, col, kv_end)])[:q_len] for q_len, kv_end in LENGTHS])
        for col in (1, 2)
    )
    return near, far


def test_a_column_beyond_31_bits_reads_and_writes_like_another(huge: torch.Tensor) -> None:
    rows, numbers = 704, 2 * HEADS * SIZE
    strides = (numbers, 1 << 30, HEADS * SIZE, SIZE, 1)
    cache = huge.as_strided((rows, 3, 2, HEADS, SIZE), strides)
    key_cache, value_cache = cache.unbind(2)
    kernel = TritonKernel()
    key, value = torch.randn(2, rows, HEADS, SIZE, device="cuda", dtype=DTYPE)
    info = torch.zeros(0, 4, dtype=torch.int32, device="cuda")
    positions = torch.arange(rows, dtype=torch.int32, device="cuda")
    for col in (1, 2):
        tables = StepTables(info, torch.full_like(positions, col), positions)
        step = kernel.prepare(tables, rows=rows, window=None, causal=True)
        kernel.write(key, value, key_cache, value_cache, step)
        assert torch.equal(key_cache[:, col], key) and torch.equal(value_cache[:, col], value)
    query = queries(40)

    def attend(segments: Segments) -> torch.Tensor:
        out = torch.full_like(query, float("nan"))
        step = kernel.prepare(tables_of_segments(segments), rows=rows, window=None, causal=True)
        kernel.attend(query, key_cache, value_cache, step, scale=SCALE, out=out)
        return out

    near, far = both_ways(attend)
    assert torch.equal(near, far) and far.abs().sum() > 0


def test_query_and_output_offsets_beyond_31_bits(huge: torch.Tensor) -> None:
    width = HEADS * GROUP * SIZE
    token = -(-(1 << 31) // (44 * SIZE)) * SIZE  # tokens 44 and later lie beyond
    wide = huge.as_strided((51, 2, HEADS * GROUP, SIZE), (token, width, SIZE, 1))
    key_cache, value_cache = caches(4, 704)
    query = queries(51)
    wide[:, 0] = query
    wide[:, 1] = float("nan")
    info = tables_of_segments([(0, 1, 1, 700), (1, 45, 2, 600), (48, 3, 3, 64)]).seq_info
    kernel, none = TritonKernel(), torch.empty(0, dtype=torch.int32, device="cuda")
    tables = StepTables(info, none, none)
    step = kernel.prepare(tables, rows=704, window=None, causal=True)
    kernel.attend(wide[:, 0], key_cache, value_cache, step, scale=SCALE, out=wide[:, 1])
    expected = torch.empty_like(query)
    kernel.attend(query, key_cache, value_cache, step, scale=SCALE, out=expected)
    assert torch.equal(wide[:, 1], expected)
    assert expected[48:].abs().sum() > 0 and not expected[46:48].any()


def test_ops_on_two_streams_do_not_disturb_each_other() -> None:
    cases = []
    for lengths in ([(1, 2000 - i) for i in range(40)], [(90, 1500), (1, 700)]):
        key_cache, value_cache = caches(len(lengths) + 1, 2048)
        query = queries(sum(q_len for q_len, _ in lengths))
        seq_info = tables_of_segments(packed(lengths)).seq_info
        arguments = (query, key_cache, value_cache, seq_info, SCALE)
        cases.append((torch.cuda.Stream(), arguments, sdpa_varlen(*arguments)))
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        for stream, arguments, expected in cases:
            with torch.cuda.stream(stream):
                outs.append((sdpa_varlen(*arguments), expected))
    torch.cuda.synchronize()
    for out, expected in outs:
        assert torch.equal(out, expected)
