"""The choice of the decodes' kernel for Hopper, and that kernel compiled for a GPU not there."""

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kv_columns.attention_backend.triton.config import (
    Cut,
    HopperDecode,
    choose_hopper_decode,
    choose_tiles,
)

from .hopper_compile import compile_gluon, registers_and_stack
from .interpreter import INTERPRETED

HOPPER, SHARED, REGISTERS = (9, 0), 227 << 10, 1 << 16


def cut_of(heads: int, group: int, head_size: int, capability: tuple[int, int] = HOPPER) -> Cut:
    return choose_tiles(heads, group, head_size, 2, 132, capability=capability).cut


def chosen(
    heads: int,
    group: int,
    head_size: int,
    *,
    capability: tuple[int, int] = HOPPER,
    element_size: int = 2,
    negate: bool = False,
) -> HopperDecode | None:
    cut = cut_of(heads, group, head_size, capability)
    return choose_hopper_decode(capability, cut, head_size, element_size, negate)


@pytest.mark.parametrize("heads", [4, 8, 12, 16, 40])
@pytest.mark.parametrize("head_size", [64, 128])
def test_a_run_has_a_program_for_each_block_of_heads_and_all_fit_at_once(
    heads: int, head_size: int
) -> None:
    cut, tiles = cut_of(heads, 4, head_size), chosen(heads, 4, head_size)
    assert tiles is not None
    programs = cut.runs * heads // tiles.heads
    assert 264 - heads // tiles.heads < programs <= 264
    assert 2 * tiles.stages * tiles.heads * tiles.keys * head_size * 2 < SHARED - (17 << 10)
    assert tiles.keys % 16 == 0
    assert cut.short_keys % cut.decode_keys == 0
    assert cut.least_tiles(False) * cut.decode_keys == cut.least_tiles(True) * cut.draft_keys
    assert cut.most_runs == max(cut.runs, cut.draft_runs)


def test_the_schedule_of_a_device_serves_all_dtypes() -> None:
    for size in (64, 128, 256):
        assert choose_tiles(8, 4, size, 4, 132, capability=HOPPER).cut == cut_of(8, 4, size)


def test_other_shapes_and_devices_keep_the_plain_kernel() -> None:
    assert chosen(8, 4, 128) is not None
    for capability in ((0, 0), (8, 0), (8, 9), (10, 0), (12, 0)):
        assert chosen(8, 4, 128, capability=capability) is None
    assert chosen(8, 4, 128, element_size=4) is None
    assert chosen(8, 4, 128, negate=True) is None
    assert chosen(8, 17, 128) is None
    assert chosen(8, 4, 256) is None
    assert chosen(8, 4, 80) is None
    assert [heads for heads in range(1, 10) if chosen(heads, 4, 128)] == [4, 8]


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
    from vllm_kv_columns.attention_backend.triton.hopper_decode import HopperDecodeLaunch
    from vllm_kv_columns.attention_backend.triton.kernels.hopper import decode

    tiles = chosen(heads, group, head_size)
    assert tiles is not None
    launch = HopperDecodeLaunch(
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
    return compile_gluon(decode.attend_decodes_hopper, constants, kinds, aligned)


@pytest.mark.skipif(INTERPRETED, reason="interpreted functions are not compiled")
@pytest.mark.parametrize(
    "heads, group, head_size, windowed, causal",
    [
        (8, 4, 128, False, True),
        (8, 4, 128, True, False),
        (4, 8, 128, True, True),
        (8, 8, 64, False, True),
    ],
    ids=str,
)
def test_the_kernel_compiles_for_hopper_and_keeps_all_in_registers(
    heads: int, group: int, head_size: int, windowed: bool, causal: bool, tmp_path: Path
) -> None:
    made = compiled(heads, group, head_size, windowed, causal)
    assert 2 * (made.metadata.shared + 1024) < SHARED and made.metadata.num_warps == 8
    text = made.asm["ptx"]
    for instruction in (
        r"mma\.sync\.aligned\.m16n8k16",
        r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans",
        r"cp\.async\.bulk\.tensor\.4d",
        r"griddepcontrol\.wait",
    ):
        assert re.search(instruction, text), instruction
    registers, stack = registers_and_stack(made, tmp_path)
    assert stack == 0 and 2 * registers * 32 * made.metadata.num_warps <= REGISTERS
