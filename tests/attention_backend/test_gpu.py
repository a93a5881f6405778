"""The oracle on a GPU: what the CUDA kernels are held against is the same there."""

from dataclasses import replace

import pytest
import torch

from vllm_kv_columns.attention_backend import (
    op,
    sdpa_varlen,
    sdpa_varlen_reference,
    write_slots_reference,
)

from .cases import Case, build, empty_cache, tolerance

pytestmark = pytest.mark.gpu

STEP = Case(
    segments=((0, 1, 3, 41), (1, 7, 1, 30), (9, 2, 2, 2), (11, 3, 4, 0)),
    tokens=15,
    rows=24,
    cols=6,
    window=16,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_agrees_across_devices(
    dtype: torch.dtype, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    made = build(replace(STEP, dtype=dtype, filler=float("nan")))
    on_cpu, on_gpu = (
        sdpa_varlen_reference(
            made.query.to(device),
            made.key_cache.to(device),
            made.value_cache.to(device),
            made.seq_info.to(device),
            scale=made.scale,
            causal=causal,
            window=STEP.window,
        )
        for device in ("cpu", "cuda")
    )
    assert on_gpu.is_cuda
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=0, atol=tolerance(made))


def test_the_reference_writes_across_devices() -> None:
    key_cache, value_cache = (cache.cuda() for cache in empty_cache(STEP))
    key = torch.randn(3, STEP.heads, STEP.head_size, device="cuda")
    cols, positions = torch.tensor([[1, 2, 2], [25, 0, 23]], dtype=torch.int32, device="cuda")
    write_slots_reference(key, -key, key_cache, value_cache, cols, positions)
    for cache, tokens in ((key_cache, key), (value_cache, -key)):
        assert torch.equal(cache[[1, 0, 23], [1, 2, 2]], tokens)
        assert cache.abs().sum() == tokens.abs().sum()


def test_the_op_names_a_device_that_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {name: kernel for name, kernel in op._kernels.items() if name != "cuda"}
    monkeypatch.setattr(op, "_kernels", kernels)
    made = build(STEP)
    query, key_cache, value_cache, seq_info = (
        tensor.cuda() for tensor in (made.query, made.key_cache, made.value_cache, made.seq_info)
    )
    with pytest.raises(NotImplementedError, match="no attention kernel for device cuda:0"):
        sdpa_varlen(query, key_cache, value_cache, seq_info, made.scale)
