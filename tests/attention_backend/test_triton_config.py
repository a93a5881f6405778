"""The choice of tiles, and the kernels compiled for a GPU that is not there."""

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kv_columns.attention_backend.triton import layer
from vllm_kv_columns.attention_backend.triton.config import HOPPER, Cut, choose_tiles, power_of_two
from vllm_kv_columns.attention_backend.triton.kernels import decode, prefill, schedule

from .cases import HEAD_SIZES
from .interpreter import INTERPRETED

DEVICE = {"processors": 132, "shared": 227 << 10}


@pytest.mark.parametrize("n, power", [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_power_of_two(n: int, power: int) -> None:
    assert power_of_two(n) == power


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16, 17, 71])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("capability", [(8, 0), HOPPER])
def test_tiles_fit_and_one_schedule_serves_all_dtypes(
    head_size: int, group: int, windowed: bool, capability: tuple[int, int]
) -> None:
    half, single = (
        choose_tiles(2, group, head_size, size, 132, windowed, capability) for size in (2, 4)
    )
    assert (
        half.cut
        == single.cut
        == choose_tiles(2, group, head_size, 2, 132, capability=capability).cut
    )
    for tiles in (half, single):
        assert tiles.dims >= head_size and tiles.dims & (tiles.dims - 1) == 0
        assert tiles.cut.short_rows >= max(16, group)
        assert tiles.cut.long_rows % tiles.long_rows == 0
    keys = half.long_keys * half.long_stages * 2
    assert (half.long_rows + keys) * half.dims * 2 <= DEVICE["shared"]
    keys = half.cut.short_keys * (half.decode.stages - 1) * 2
    assert half.cut.runs * half.cut.heads // 132 * keys * half.dims * 2 <= DEVICE["shared"]
    assert half.decode.rows == half.cut.small_rows <= half.draft.rows == half.cut.short_rows
    assert single.cut.short_rows % single.draft.rows == 0


def test_the_bound_of_long_tiles_holds_for_any_lengths() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        group = rng.choice((1, 3, 4, 7, 8, 17))
        cut = choose_tiles(1, group, 64, 2, 4).cut
        q_lens = [rng.choice((0, 1, 2, rng.randint(1, 300))) for _ in range(rng.randint(1, 12))]
        rows = [n * group for n in q_lens if n * group > cut.short_rows]
        tiles = sum(-(-n // cut.long_rows) for n in rows)
        tokens = sum(q_lens) + rng.randint(0, 2)
        assert tiles <= cut.max_long_tiles(tokens, len(q_lens))


def test_no_long_segment_fits_a_small_step() -> None:
    cut = choose_tiles(8, 4, 128, 2, 132).cut
    assert [cut.max_long_tiles(tokens, 64) for tokens in (1, 16, 17, 34, 64)] == [0, 0, 1, 3, 5]
    assert cut.max_long_tiles(8192, 0) == 0
    assert [cut.max_long_tiles(64, 64, longest) for longest in (1, 16, 17)] == [0, 0, 5]


POINTERS = {
    **dict.fromkeys(("query", "key_cache", "value_cache", "out"), ""),
    **dict.fromkeys(
        ("seq_info", "pieces", "draft_pieces", "tiles", "live", "gaps", "arrivals", "progress"),
        "*i32",
    ),
    **dict.fromkeys(("part_acc", "part_sums"), "*fp32"),
}
ONES = {"info_c", "q_d", "k_d", "v_d", "o_d"}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
PLAIN = {"S", "T", "rows", "window", "max_tiles", "info_s", "scale"}


def compile_for_hopper(kernel: Any, arguments: dict[str, Any], dtype: str) -> Any:
    """The kernel as a launch with aligned tensors and strides would compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in arguments or name in ONES:
            signature[name] = "constexpr"
            constants[(i,)] = arguments.get(name, 1)
            continue
        wide = "i64" if name in ("k_col", "v_col") else "i32"
        signature[name] = POINTERS.get(name, wide) or f"*{dtype}"
        if name == "scale":
            signature[name] = "fp32"
        if name not in PLAIN:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def parameters(head_size: int, dtype: torch.dtype, window: bool, monkeypatch: Any) -> Any:
    monkeypatch.setattr(layer, "processors", lambda device: DEVICE["processors"])
    return layer.LayerLaunch(
        8,
        4,
        head_size,
        dtype,
        torch.device("cpu"),
        windowed=window,
        causal=True,
        rows=1024,
        negate=False,
    )


@pytest.mark.skipif(INTERPRETED, reason="interpreted functions are not compiled")
@pytest.mark.parametrize(
    "head_size, dtype, window",
    [
        (128, torch.bfloat16, False),
        (128, torch.bfloat16, True),
        (64, torch.float16, False),
        (256, torch.bfloat16, False),
        (80, torch.float32, False),
    ],
    ids=str,
)
def test_attention_compiles_for_hopper(
    head_size: int, dtype: torch.dtype, window: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = parameters(head_size, dtype, window, monkeypatch)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    single = dtype == torch.float32
    cut = made.tiles.cut
    for tiles, runs in ((made.tiles.decode, cut.runs), (made.tiles.draft, cut.draft_runs)):
        step = {
            "BM": tiles.rows,
            "BN": cut.short_keys,
            "LARGE": single,
            "OVERLAP": True,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
            "maxnreg": tiles.registers,
        }
        short = compile_for_hopper(decode.attend_short, made._short | step, name)
        at_once = 1 if single else -(-runs * cut.heads // DEVICE["processors"])
        assert at_once * (short.metadata.shared + 1024) <= 228 << 10
        assert "cp.async" in short.asm["ptx"]
    long = compile_for_hopper(prefill.attend_long, made._long | {"OVERLAP": True}, name)
    assert long.metadata.shared < 227 << 10
    assert single or re.search(r"wgmma\.mma_async", long.asm["ptx"])


@pytest.mark.skipif(INTERPRETED, reason="interpreted functions are not compiled")
@pytest.mark.parametrize("at_once", [layer.FEW_SEGMENTS, layer.SCHEDULE_SEGMENTS])
def test_schedule_compiles_for_hopper(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parameters(128, torch.bfloat16, False, monkeypatch)
    cut: Cut = made.tiles.cut
    numbers = {"G": 4, "R": cut.runs, "MIN_TILES": cut.min_tiles, "BN": 64}
    numbers |= {"DRAFT_R": cut.second_runs}
    blocks = {"BM_SHORT": 64, "BM_LONG": 128, "BE": 32, "BS": at_once, "OVERLAP": True}
    options = {"num_warps": 8, "enable_fp_fusion": True}
    compile_for_hopper(schedule.make_schedule, numbers | blocks | options, "bf16")


def test_runs_begin_where_64_bits_would_have_them_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 32 bits, and the run of a tile by an estimate; at the edges of runs and between them."""
    numbers = SimpleNamespace(
        int32=torch.int32,
        float32=torch.float32,
        maximum=lambda a, b: a.clamp(min=b),
        minimum=lambda a, b: a.clamp(max=b),
        where=torch.where,
    )
    first_tile, run_of = schedule._first_tile.fn, schedule._run_of.fn
    monkeypatch.setattr(schedule, "tl", numbers)
    monkeypatch.setattr(schedule, "_first_tile", first_tile)
    rng = random.Random(0)
    for _ in range(500):
        count = rng.choice((1, 2, 33, 132, 264, rng.randint(1, 32767)))
        total = rng.choice((count, rng.randint(count, 5 * count), rng.randint(count, 2**31 - 1)))
        runs = torch.tensor(count, dtype=torch.int32)
        in_32_bits = torch.tensor(total, dtype=torch.int32)
        of_run = [rng.randrange(count) for _ in range(50)]
        begin = [run * total // count for run in of_run]
        made = first_tile(torch.tensor(of_run, dtype=torch.int32), in_32_bits, runs)
        assert made.tolist() == begin
        tiles = [max(0, tile - 1) for tile in begin] + begin
        tiles += [rng.randrange(total) for _ in range(50)]
        found = run_of(torch.tensor(tiles, dtype=torch.int32), in_32_bits, runs)
        assert found.tolist() == [((tile + 1) * count - 1) // total for tile in tiles]
