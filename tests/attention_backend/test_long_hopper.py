"""The choice of the Hopper kernel, and that kernel compiled for a GPU that is not there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_kv_columns.attention_backend.triton.config import (
    HOPPER,
    Cut,
    HopperLong,
    choose_hopper_long,
    choose_tiles,
)

from .cases import HEAD_SIZES
from .hopper_compile import barriers_and_numbers, compile_gluon, registers_and_stack
from .interpreter import INTERPRETED

SHARED = 227 << 10
SIZES = (64, 128, 256)


def made_cut(head_size: int, group: int, windowed: bool) -> Cut:
    return choose_tiles(8, group, head_size, 2, 132, windowed, capability=HOPPER).cut


def chosen(
    head_size: int,
    *,
    capability: tuple[int, int] = HOPPER,
    element_size: int = 2,
    windowed: bool = False,
    negate: bool = False,
) -> HopperLong | None:
    cut = made_cut(head_size, 4, windowed)
    return choose_hopper_long(capability, cut, head_size, element_size, windowed, negate)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_tiles_fit_shared_memory_and_make_up_a_tile_of_the_schedule(
    head_size: int, windowed: bool
) -> None:
    tiles = chosen(head_size, windowed=windowed)
    if head_size not in SIZES:
        assert tiles is None
        return
    assert tiles is not None
    assert made_cut(head_size, 4, windowed).long_rows == 128
    shared_rows = 128 * tiles.query_places + 2 * tiles.stages * tiles.keys
    assert shared_rows * head_size * 2 < SHARED - 1024


def test_other_devices_dtypes_and_negative_scales_keep_the_plain_kernel() -> None:
    assert chosen(128) is not None
    for capability in ((0, 0), (8, 0), (8, 9), (10, 0), (12, 0)):
        assert chosen(128, capability=capability) is None
    assert chosen(128, element_size=4) is None
    assert chosen(128, negate=True) is None


def compiled(head_size: int, group: int, windowed: bool, causal: bool, dtype: torch.dtype) -> Any:
    """The kernel as a launch with aligned tensors and strides would compile it."""
    from vllm_kv_columns.attention_backend.triton.hopper_long import HopperLongLaunch
    from vllm_kv_columns.attention_backend.triton.kernels.hopper import long

    tiles = chosen(head_size, windowed=windowed)
    assert tiles is not None
    cut = made_cut(head_size, group, windowed)
    launch = HopperLongLaunch(
        tiles, cut, head_size, dtype, torch.device("cpu"), windowed=windowed, causal=causal
    )
    made = launch.descriptors.of(torch.empty(256, 2, 8, head_size, dtype=dtype))
    queries = launch.query_descriptor(torch.empty(64, 8 * group, head_size, dtype=dtype))
    assert made is not None and (queries is None) == (64 % group != 0)
    constants = {"info_c": 1, **launch.query_constants(queries), **launch.constants}
    constants["OVERLAP"] = True
    if queries is None:
        constants["q_desc"] = None
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    kinds = {
        **dict.fromkeys(("query", "out"), f"*{name}"),
        **dict.fromkeys(("seq_info", "tiles", "progress"), "*i32"),
        **dict.fromkeys(
            ("k_desc", "v_desc"),
            f"tensordesc<{name}{made.block_shape},{made.layout!r}>",
        ),
        "scale": "fp32",
    }
    if queries is not None:
        kinds["q_desc"] = f"tensordesc<{name}{queries.block_shape},{queries.layout!r}>"
    aligned = ("query", "out", "seq_info", "tiles", "progress", "q_t", "q_h", "o_t", "o_h")
    return compile_gluon(long.attend_long_hopper, constants, kinds, aligned)


@pytest.mark.skipif(INTERPRETED, reason="interpreted functions are not compiled")
@pytest.mark.parametrize(
    "head_size, group, windowed, causal, dtype",
    [
        (128, 4, False, True, torch.bfloat16),
        (128, 4, True, True, torch.bfloat16),
        (128, 4, False, False, torch.float16),
        (128, 3, False, True, torch.bfloat16),
        (64, 8, False, True, torch.bfloat16),
        (256, 2, False, True, torch.bfloat16),
        (256, 2, True, False, torch.float16),
    ],
    ids=str,
)
def test_the_kernel_compiles_for_hopper(
    head_size: int, group: int, windowed: bool, causal: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    made = compiled(head_size, group, windowed, causal, dtype)
    assert made.metadata.shared < SHARED
    assert made.metadata.num_warps == 12
    text = made.asm["ptx"]
    copies = r"cp\.async\.bulk\.tensor\.4d", r"griddepcontrol\.wait", r"atom\.global"
    for instruction in (r"wgmma\.mma_async", r"setmaxnreg\.inc", *copies):
        assert re.search(instruction, text), instruction
    barriers, numbers = barriers_and_numbers(made)
    assert barriers and numbers and not barriers & numbers
    _, stack = registers_and_stack(made, tmp_path)
    # Numbers that outlive a loop or that a mask needs may lie there; scores, weights and results
    # do not fit.
    assert stack <= 256
