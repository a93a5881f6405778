"""The ops under torch's own checks, in compiled code, and their refusals."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_kv_columns.attention_backend import (
    AttentionKernel,
    CpuKernel,
    op,
    register_kernel,
    sdpa_varlen,
    sdpa_varlen_reference,
    write_slots,
)
from vllm_kv_columns.attention_backend.triton import TritonKernel
from vllm_kv_columns.kv_manager import StepTables
from vllm_kv_columns.kv_manager.hooks import kernel_class

from .cases import Case, build

ROWS, COLS, HEADS, GROUP, SIZE, WINDOW = 24, 4, 2, 3, 32, 9
CASE = Case(
    segments=((0, 1, 2, 9), (1, 4, 1, 20), (6, 1, 3, 11)),
    tokens=8,
    rows=ROWS,
    cols=COLS,
    window=WINDOW,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_sdpa_varlen(dtype: torch.dtype, causal: bool, device: str) -> None:
    made = build(replace(CASE, dtype=dtype))
    tensors = (made.query, made.key_cache, made.value_cache, made.seq_info)
    torch.library.opcheck(
        torch.ops.kv_columns.sdpa_varlen.default,
        (*(tensor.to(device) for tensor in tensors), made.scale, causal, WINDOW),
    )


def test_opcheck_write_slots() -> None:
    made = build(CASE)
    numbers = torch.tensor([3, 1, 2], dtype=torch.int32)
    tokens = torch.randn(2, 3, HEADS, SIZE)
    torch.library.opcheck(
        torch.ops.kv_columns.write_slots.default,
        (*tokens, made.key_cache.clone(), made.value_cache.clone(), numbers, numbers),
    )


def layer(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_info: torch.Tensor,
    seq_cols: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Project, write, attend: the core of a layer."""
    packed = (hidden @ weight).view(hidden.shape[0], -1, SIZE)
    query, key, value = torch.split(packed, [HEADS * GROUP, HEADS, HEADS], dim=1)
    write_slots(key, value, key_cache, value_cache, seq_cols, positions)
    return sdpa_varlen(query, key_cache, value_cache, seq_info, 0.2, True, WINDOW)


def layer_inputs(tokens: int, device: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(tokens)
    cache = torch.randn(COLS, ROWS, 3, 2, HEADS, SIZE).to(device)[:, :, 1].transpose(0, 1)
    info = torch.tensor([(0, 1, 2, 7), (1, tokens - 1, 1, 20)], dtype=torch.int32)
    return (
        torch.randn(tokens, 16).to(device),
        torch.randn(16, (HEADS * GROUP + 2 * HEADS) * SIZE).to(device),
        cache[:, :, 0],
        cache[:, :, 1],
        info.to(device),
        torch.tensor([2] + [1] * (tokens - 1), dtype=torch.int32, device=device),
        torch.tensor([6, *range(21 - tokens, 20)], dtype=torch.int32, device=device),
    )


# torch's inductor itself uses what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_whole_with_a_dynamic_number_of_tokens(backend: str, device: str) -> None:
    torch._dynamo.reset()
    compiles = 0

    def counting(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nonlocal compiles
        compiles += 1
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend(backend)(module, inputs)
        return compiled

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counting)
    for tokens in (5, 8, 13):
        eager, ours = layer_inputs(tokens, device), layer_inputs(tokens, device)
        torch.testing.assert_close(compiled(*ours), layer(*eager))
        torch.testing.assert_close(ours[2:4], eager[2:4])
    assert compiles == 1


@pytest.mark.parametrize("device", DEVICES)
def test_exports_with_a_dynamic_step_width(device: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return layer(*inputs)

    width, segments = torch.export.Dim("width", min=2, max=64), torch.export.Dim("segments")
    shapes = ({0: width}, None, None, None, {0: segments}, {0: width}, {0: width})
    program = torch.export.export(Layer(), layer_inputs(6, device), dynamic_shapes=(shapes,))
    for tokens in (6, 11):
        torch.testing.assert_close(
            program.module()(*layer_inputs(tokens, device)), layer(*layer_inputs(tokens, device))
        )


def test_result_is_new_and_contiguous() -> None:
    made = build(CASE)
    out = sdpa_varlen(
        made.query, made.key_cache, made.value_cache, made.seq_info, made.scale, True, WINDOW
    )
    assert out.is_contiguous() and out.shape == made.query.shape
    assert not out[[5, 7]].any()


def call(**changes: Any) -> torch.Tensor:
    made = build(CASE)
    arguments: dict[str, Any] = {
        "query": made.query,
        "key_cache": made.key_cache,
        "value_cache": made.value_cache,
        "seq_info": made.seq_info,
        "scale": made.scale,
    }
    return sdpa_varlen(**{**arguments, **changes})


CACHE = torch.zeros(ROWS, COLS, HEADS, SIZE)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"query": torch.zeros(8, 192)},
            r"query is float32 \[8, 192\]; it must be \[T, heads, D\]",
        ),
        ({"query": torch.zeros(8, 6, 32).int()}, r"query is int32 \[8, 6, 32\]"),
        ({"query": torch.zeros(8, 5, 32)}, "query has 5 heads and the cache 2"),
        ({"query": torch.zeros(8, 6, 33)}, "key_cache has head size 32 and query 33"),
        ({"query": torch.zeros(8, 6, 32).half()}, "float32 and query torch.float16; convert"),
        ({"key_cache": CACHE[0]}, r"key_cache is float32 \[4, 2, 32\]"),
        ({"key_cache": CACHE[:0]}, r"key_cache is float32 \[0, 4, 2, 32\]"),
        ({"value_cache": CACHE[:5]}, "and value_cache float32 .5, 4, 2, 32.; their shapes"),
        ({"value_cache": CACHE.half()}, "value_cache is torch.float16 and query torch.float32"),
        ({"value_cache": CACHE.to("meta")}, "value_cache is on meta and other arguments on cpu"),
        ({"seq_info": torch.zeros(2, 4)}, r"seq_info is float32 \[2, 4\]; it must be int32"),
        ({"seq_info": torch.zeros(8).int()}, r"seq_info is int32 \[8\]"),
        ({"window": 0}, "window is 0; it must be at least 1"),
        ({"seq_info": torch.tensor([[0, 9, 1, 9]]).int()}, "needs 9 query rows, 2 columns and 9"),
        ({"seq_info": torch.tensor([[0, 1, 4, 9]]).int()}, "1 query rows, 5 columns and 9"),
        ({"seq_info": torch.tensor([[0, 1, 1, -1]]).int()}, r"row \(0, 1, 1, -1\)"),
    ],
)
def test_sdpa_varlen_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_one_row_too_few_is_refused_by_the_kernel() -> None:
    made = build(CASE)
    kernel = CpuKernel()
    none = torch.empty(0, dtype=torch.int32)
    step = kernel.prepare(StepTables(made.seq_info, none, none), rows=24, window=None, causal=True)
    with pytest.raises(ValueError, match="4 columns and 20 cache rows; there are 8, 4 and 19"):
        kernel.attend(
            made.query,
            made.key_cache[:19],
            made.value_cache[:19],
            step,
            scale=1.0,
            out=torch.empty(8, 6, 32),
        )


TOKENS = torch.zeros(3, HEADS, SIZE)
NUMBERS = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"key": torch.zeros(3, 6, 32)}, "key has 6 heads and the cache 2"),
        ({"value": torch.zeros(2, 2, 32)}, r"value is float32 \[2, 2, 32\] and key float32"),
        ({"value": TOKENS.half()}, r"value is float16 \[3, 2, 32\]"),
        ({"seq_cols": NUMBERS.long()}, r"seq_cols is int64 \[3\]; it must be int32 \[3\]"),
        ({"positions": NUMBERS[:2]}, r"positions is int32 \[2\]; it must be int32 \[3\]"),
        ({"positions": NUMBERS.to("meta")}, "positions is on meta"),
    ],
)
def test_write_slots_refuses(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "key": TOKENS,
        "value": TOKENS,
        "key_cache": CACHE.clone(),
        "value_cache": CACHE.clone(),
        "seq_cols": NUMBERS,
        "positions": NUMBERS,
    }
    with pytest.raises(ValueError, match=message):
        write_slots(**{**arguments, **changes})


def test_a_kernel_refuses_tokens_that_the_tables_do_not_describe() -> None:
    kernel = CpuKernel()
    tables = StepTables(torch.zeros(0, 4, dtype=torch.int32), NUMBERS, NUMBERS)
    step = kernel.prepare(tables, rows=ROWS, window=None, causal=True)
    with pytest.raises(ValueError, match="key has 2 tokens and the step's tables 3"):
        kernel.write(TOKENS[:2], TOKENS[:2], CACHE.clone(), CACHE.clone(), step)


@pytest.mark.parametrize(
    "rows, window, message", [(0, None, "rows is 0"), (8, 0, "window is 0; it must be at least 1")]
)
def test_a_kernel_refuses_impossible_layers(rows: int, window: int | None, message: str) -> None:
    tables = StepTables(torch.zeros(0, 4, dtype=torch.int32), NUMBERS, NUMBERS)
    with pytest.raises(ValueError, match=message):
        CpuKernel().prepare(tables, rows=rows, window=window, causal=True)


def test_a_device_without_a_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_kernels", {})
    with pytest.raises(NotImplementedError, match="no attention kernel for device cpu"):
        call()


def test_a_registered_kernel_takes_over_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ones(CpuKernel):
        def attend(self, *args: Any, out: torch.Tensor, **kwargs: Any) -> None:
            out.fill_(1.0)

    monkeypatch.setattr(op, "_kernels", dict(op._kernels))
    register_kernel(Ones())
    assert (call() == 1).all()


def test_kernels_are_found_by_name_through_the_hook() -> None:
    assert kernel_class("triton") is TritonKernel
    assert isinstance(op._kernels["cuda"], TritonKernel)
    found = kernel_class("torch-sdpa")
    assert found is CpuKernel
    assert issubclass(found, AttentionKernel)


def test_reference_and_op_have_one_result_for_an_empty_step() -> None:
    made = build(CASE)
    nothing = torch.zeros(0, 4, dtype=torch.int32)
    assert not call(seq_info=nothing).any()
    out = sdpa_varlen_reference(made.query, made.key_cache, made.value_cache, nothing, scale=1.0)
    assert not out.any()
