"""Steps of the tests on the device, through the Triton kernel and through the reference."""

import torch

from vllm_kv_columns.attention_backend import sdpa_varlen_reference
from vllm_kv_columns.attention_backend.triton import TritonKernel
from vllm_kv_columns.kv_manager import StepTables

from .cases import Case, Tensors, build, tolerance
from .interpreter import INTERPRETED


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor with its strides on the device; ``Tensor.to`` would make it dense."""
    if tensor.device == device:
        return tensor
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    flat = torch.as_strided(tensor, (extent,), (1,)).to(device)
    return torch.as_strided(flat, tensor.shape, tensor.stride())


def built(case: Case, device: torch.device) -> Tensors:
    made = build(case)
    return Tensors(
        query=place(made.query, device),
        key_cache=place(made.key_cache, device),
        value_cache=place(made.value_cache, device),
        seq_info=made.seq_info.to(device),
        scale=made.scale,
    )


def packed(lengths: list[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """Segments of (q_len, kv_end), one after the other, in columns 1, 2 .."""
    segments, start = [], 0
    for col, (q_len, kv_end) in enumerate(lengths, start=1):
        segments.append((start, q_len, col, kv_end))
        start += q_len
    return segments


def tables_of_segments(segments: list[tuple[int, int, int, int]]) -> StepTables:
    """On the GPU."""
    return tables_of(torch.tensor(segments, dtype=torch.int32, device="cuda").reshape(-1, 4))


def tables_of(seq_info: torch.Tensor) -> StepTables:
    none = torch.empty(0, dtype=torch.int32, device=seq_info.device)
    return StepTables(seq_info, none, none)


def attend(
    case: Case,
    made: Tensors,
    kernel: TritonKernel | None = None,
    out: torch.Tensor | None = None,
    max_q_len: int | None = None,
) -> torch.Tensor:
    kernel = kernel or TritonKernel()
    step = kernel.prepare(
        tables_of(made.seq_info),
        rows=case.rows,
        window=case.window,
        causal=case.causal,
        max_q_len=max_q_len,
    )
    if out is None:
        out = torch.full(made.query.shape, float("nan"), dtype=case.dtype, device=made.query.device)
    kernel.attend(made.query, made.key_cache, made.value_cache, step, scale=made.scale, out=out)
    return out


def reference(case: Case, made: Tensors) -> torch.Tensor:
    return sdpa_varlen_reference(
        made.query.cpu(),
        place(made.key_cache, torch.device("cpu")),
        place(made.value_cache, torch.device("cpu")),
        made.seq_info.cpu(),
        scale=made.scale,
        causal=case.causal,
        window=case.window,
    )


def check(case: Case, device: torch.device, kernel: TritonKernel | None = None) -> None:
    """Against the reference; where no segment is longer than a decode, with that known.

    The interpreter, which compiles nothing, runs these steps as if it were not known, too.
    """
    made = built(case, device)
    expected = reference(case, made)
    longest = max((q_len for _, q_len, _, _ in case.segments), default=0)
    bounds: list[int | None] = [longest] if 0 < longest * case.group <= 16 else [None]
    for max_q_len in {*bounds, None} if INTERPRETED else bounds:
        out = attend(case, made, kernel, max_q_len=max_q_len)
        torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=tolerance(made))
