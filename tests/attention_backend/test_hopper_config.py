"""The choice of the Hopper kernel, and that kernel compiled for a GPU that is not there."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_kv_columns.attention_backend.triton.config import (
    HopperTiles,
    choose_hopper,
    choose_tiles,
)

from .cases import HEAD_SIZES
from .interpreter import INTERPRETED

HOPPER, SHARED = (9, 0), 227 << 10
SIZES = (64, 128, 256)


def chosen(
    head_size: int,
    *,
    capability: tuple[int, int] = HOPPER,
    element_size: int = 2,
    windowed: bool = False,
    negate: bool = False,
) -> HopperTiles | None:
    cut = choose_tiles(8, 4, head_size, element_size, 132, windowed).cut
    return choose_hopper(capability, cut, head_size, element_size, windowed, negate)


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
    assert 64 * tiles.consumers == choose_tiles(8, 4, head_size, 2, 132, windowed).cut.long_rows
    assert (128 + 2 * tiles.stages * tiles.keys) * head_size * 2 < SHARED - 1024
    assert (tiles.consumers * tiles.registers + 24) * 128 <= 1 << 16


def test_other_devices_dtypes_and_negative_scales_keep_the_plain_kernel() -> None:
    assert chosen(128) is not None
    for capability in ((0, 0), (8, 0), (8, 9), (10, 0), (12, 0)):
        assert chosen(128, capability=capability) is None
    assert chosen(128, element_size=4) is None
    assert chosen(128, negate=True) is None


def test_tiles_must_divide_a_ring_and_need_not_divide_a_flat_layer() -> None:
    tiles = HopperTiles(keys=64, stages=2, consumers=2, registers=240, turns=True)
    assert tiles.serves(100, None)
    assert tiles.serves(640, 512) and not tiles.serves(600, 512)


def compiled(head_size: int, windowed: bool, causal: bool) -> Any:
    """The kernel as a launch with aligned tensors and strides would compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from vllm_kv_columns.attention_backend.triton.hopper import HopperLaunch
    from vllm_kv_columns.attention_backend.triton.kernels import prefill_hopper

    tiles = chosen(head_size, windowed=windowed)
    assert tiles is not None
    cut = choose_tiles(8, 4, head_size, 2, 132, windowed).cut
    launch = HopperLaunch(tiles, cut, head_size, torch.bfloat16, windowed=windowed, causal=causal)
    cache = torch.empty(256, 2, 8, head_size, dtype=torch.bfloat16)
    made = launch.descriptors.of(cache)
    assert made is not None
    constants = {"info_c": 1, **launch.constants}
    kinds = {
        **dict.fromkeys(("query", "out"), "*bf16"),
        **dict.fromkeys(("seq_info", "tiles"), "*i32"),
        **dict.fromkeys(
            ("k_desc", "v_desc"),
            f"tensordesc<bf16{made.block_shape},{made.layout!r}>",
        ),
        "scale": "fp32",
    }
    aligned = ("query", "out", "seq_info", "tiles", "q_t", "q_h", "o_t", "o_h")
    kernel = prefill_hopper.attend_long_hopper
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
            continue
        signature[name] = kinds.get(name, "i32")
        if name in aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {name: constants[name] for name in ("num_warps", "enable_fp_fusion")}
    source = GluonASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.skipif(INTERPRETED, reason="interpreted functions are not compiled")
@pytest.mark.parametrize(
    "head_size, windowed, causal",
    [
        (128, False, True),
        (128, True, True),
        (128, False, False),
        (64, False, True),
        (256, False, True),
        (256, True, False),
    ],
    ids=str,
)
def test_the_kernel_compiles_for_hopper(
    head_size: int, windowed: bool, causal: bool, tmp_path: Path
) -> None:
    from triton import knobs

    made = compiled(head_size, windowed, causal)
    assert made.metadata.shared < SHARED and made.metadata.num_warps == 12
    text = made.asm["ptx"]
    for instruction in (r"wgmma\.mma_async", r"cp\.async\.bulk\.tensor\.4d", r"setmaxnreg\.inc"):
        assert re.search(instruction, text), instruction
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    usage = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    # A few numbers that outlive a loop may lie there; scores, weights and results do not fit.
    assert stack is not None and int(stack.group(1)) <= (256 if head_size == 256 else 16)
