"""The choice of the short segments' kernel for Hopper, and that kernel compiled without a GPU."""

import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kv_columns.attention_backend.triton.config import (
    HOPPER,
    Cut,
    HopperShort,
    choose_hopper_short,
    choose_tiles,
)

from .hopper_compile import barriers_and_numbers, compile_gluon, registers_and_stack
from .interpreter import INTERPRETED

PROCESSORS, SHARED, REGISTERS = 132, 227 << 10, 1 << 16


def cut_of(heads: int, group: int, head_size: int, capability: tuple[int, int] = HOPPER) -> Cut:
    return choose_tiles(heads, group, head_size, 2, PROCESSORS, capability=capability).cut


def chosen(
    heads: int,
    group: int,
    head_size: int,
    *,
    capability: tuple[int, int] = HOPPER,
    element_size: int = 2,
    negate: bool = False,
) -> HopperShort | None:
    cut = cut_of(heads, group, head_size, capability)
    return choose_hopper_short(capability, cut, head_size, element_size, negate)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7, 8, 40, 265])
def test_every_worker_of_a_program_has_a_run_and_a_head(heads: int) -> None:
    cut = cut_of(heads, 4, 128)
    workers = cut.runs * heads
    step = 2 * heads if heads % 2 else heads
    assert workers % 2 == 0
    assert workers == step or 2 * PROCESSORS - step < workers <= 2 * PROCESSORS
    assert cut.draft_runs == cut.runs


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_boxes_and_queries_of_two_workers_fit_shared_memory(head_size: int) -> None:
    tiles = chosen(2, 4, head_size)
    assert tiles is not None
    assert 2 * (64 + tiles.stages * tiles.keys) * head_size * 2 < SHARED - 1024
    assert cut_of(2, 4, head_size).short_rows == 64


def test_only_short_segments_are_cut_otherwise_than_on_other_devices() -> None:
    for heads, group, head_size in ((8, 4, 128), (4, 8, 64), (8, 4, 256), (8, 80, 128), (2, 4, 80)):
        plain, ours = (cut_of(heads, group, head_size, at) for at in ((8, 0), HOPPER))
        names = "runs", "draft_runs", "min_tiles", "short_keys"
        assert replace(ours, **{name: getattr(plain, name) for name in names}) == plain
        assert chosen(heads, group, head_size) is not None or ours == plain


def test_the_schedule_of_a_device_serves_all_dtypes() -> None:
    for size in (64, 80, 128, 256):
        made = choose_tiles(8, 4, size, 4, PROCESSORS, capability=HOPPER)
        assert made.cut == cut_of(8, 4, size)
        assert made.long_keys == choose_tiles(8, 4, size, 4, PROCESSORS).long_keys


def test_other_shapes_and_devices_keep_the_plain_kernel() -> None:
    assert chosen(8, 4, 128) is not None
    for capability in ((0, 0), (8, 0), (8, 9), (10, 0), (12, 0)):
        assert chosen(8, 4, 128, capability=capability) is None
    assert chosen(8, 4, 128, element_size=4) is None
    assert chosen(8, 4, 128, negate=True) is None
    assert [size for size in (32, 64, 80, 96, 112, 128, 256) if chosen(1, 1, size)] == [
        64,
        128,
        256,
    ]
    assert [group for group in (1, 16, 17, 64, 65) if chosen(1, group, 128)] == [1, 16, 17, 64]


@pytest.mark.parametrize("windowed", [False, True])
def test_boxes_bring_each_key_once_and_touch_nothing_beyond_the_last(
    windowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_kv_columns.attention_backend.triton.kernels.hopper import boxes

    numbers = SimpleNamespace(minimum=min, maximum=max, where=lambda is_so, a, b: a if is_so else b)
    monkeypatch.setattr(boxes, "gl", numbers)
    monkeypatch.setattr(
        boxes, "first_key", lambda q_len, end, window: max(end - q_len - window + 1, 0)
    )
    sections, box = boxes.sections_of.fn, boxes.box_at.fn
    rng = random.Random(0)
    for _ in range(2000):
        size, tile_keys = rng.choice((16, 32, 64, 128)), rng.choice((16, 32, 64))
        kv_end, q_len = rng.randint(1, 500), rng.randint(1, 4)
        window = rng.randint(1, 300) if windowed else 1 << 30
        rows = window + q_len - 1 + rng.randint(0, 90) if windowed else kv_end + rng.randint(0, 9)
        first = max(kv_end - q_len - window + 1, 0)
        tiles = -(-(kv_end - first) // tile_keys)
        tile = rng.randrange(tiles)
        take = rng.randint(1, tiles - tile)
        at = sections(tile, take, q_len, kv_end, rows, window, tile_keys, size, windowed)
        begin, turn, end, zero, n_old, n = at
        brought = []
        for i in range(n):
            start, low, row = box(i, begin, turn, end, zero, n_old, rows, size, windowed)
            for key in range(low, start + size):
                assert 0 <= row + key - start == key % rows
                brought.append(key)
            if kv_end <= rows:
                assert row + size <= kv_end
        stop = min(first + (tile + take) * tile_keys, kv_end)
        assert brought == list(range(first + tile * tile_keys, stop))


def compiled(heads: int, group: int, head_size: int, windowed: bool, causal: bool) -> Any:
    """The kernel as a launch with aligned tensors and strides would compile it."""
    from vllm_kv_columns.attention_backend.triton.hopper_short import HopperShortLaunch
    from vllm_kv_columns.attention_backend.triton.kernels.hopper import short

    tiles = chosen(heads, group, head_size)
    assert tiles is not None
    launch = HopperShortLaunch(
        tiles,
        cut_of(heads, group, head_size),
        head_size,
        torch.bfloat16,
        torch.device("cpu"),
        windowed=windowed,
        causal=causal,
    )
    cache = torch.empty(256, 2, heads, head_size, dtype=torch.bfloat16)
    made = launch.descriptors.of(cache)
    assert made is not None and made.shape == [2, heads, 256, head_size]
    constants = {"info_c": 1, **launch.constants, "OVERLAP": True}
    numbers = ("seq_info", "pieces", "live", "gaps", "arrivals")
    kinds = {
        **dict.fromkeys(("query", "out"), "*bf16"),
        **dict.fromkeys(("part_acc", "part_sums"), "*fp32"),
        **dict.fromkeys(numbers, "*i32"),
        **dict.fromkeys(
            ("k_desc", "v_desc"),
            f"tensordesc<bf16{made.block_shape},{made.layout!r}>",
        ),
        "scale": "fp32",
    }
    aligned = ("query", "out", "seq_info", "pieces", "part_acc", "q_t", "q_h", "o_t", "o_h")
    return compile_gluon(short.attend_short_hopper, constants, kinds, aligned)


@pytest.mark.skipif(INTERPRETED, reason="interpreted functions are not compiled")
@pytest.mark.parametrize(
    "heads, group, head_size, windowed, causal",
    [
        (8, 4, 128, False, True),
        (1, 8, 128, True, False),
        (4, 2, 256, True, True),
        (3, 5, 64, False, True),
    ],
    ids=str,
)
def test_the_kernel_compiles_for_hopper(
    heads: int, group: int, head_size: int, windowed: bool, causal: bool, tmp_path: Path
) -> None:
    made = compiled(heads, group, head_size, windowed, causal)
    assert made.metadata.shared < SHARED and made.metadata.num_warps == 12
    text = made.asm["ptx"]
    copies = r"cp\.async\.bulk\.tensor\.4d", r"griddepcontrol\.wait", r"atom\.global"
    for instruction in (r"wgmma\.mma_async", r"setmaxnreg\.inc", *copies):
        assert re.search(instruction, text), instruction
    barriers, numbers = barriers_and_numbers(made)
    assert barriers and numbers and not barriers & numbers
    registers, stack = registers_and_stack(made, tmp_path)
    assert registers * 32 * made.metadata.num_warps <= REGISTERS
    assert stack <= 32  # numbers that outlive a segment
