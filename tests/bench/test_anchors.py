"""The anchors: what they hand to vLLM's functions, and what happens where these are missing."""

import sys
from types import ModuleType

import pytest
import torch

from tests.bench import paged_fakes
from tests.bench.tiny import CPU, TINY, problem, shape
from vllm_kv_columns.bench.backend import Backend
from vllm_kv_columns.bench.flash3 import FlashAttention3
from vllm_kv_columns.bench.oracle import check
from vllm_kv_columns.bench.paged import PagedStep
from vllm_kv_columns.bench.shapes import BLOCK, Shape
from vllm_kv_columns.bench.unified import UnifiedAttention, split_threshold

ANCHORS = (FlashAttention3, UnifiedAttention)


def module(monkeypatch: pytest.MonkeyPatch, name: str, *functions: str, **more: object) -> None:
    fake = ModuleType(name)
    for function in functions:
        setattr(fake, function, getattr(paged_fakes, function))
    for attribute, value in more.items():
        setattr(fake, attribute, value)
    monkeypatch.setitem(sys.modules, name, fake)
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        monkeypatch.setattr(sys.modules[parent], child, fake, raising=False)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        module(monkeypatch, package, __path__=[])
    module(monkeypatch, "vllm._custom_ops", "reshape_and_cache_flash")
    module(
        monkeypatch,
        "vllm.vllm_flash_attn",
        "flash_attn_varlen_func",
        "get_scheduler_metadata",
        is_fa_version_supported=lambda version: False,
        fa_version_unsupported_reason=lambda version: f"no FA{version} on this card",
    )
    module(monkeypatch, "vllm.v1.attention.ops.triton_unified_attention", "unified_attention")


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize(
    "one", [*TINY, shape("long", "prefill", (513, 520))], ids=lambda one: one.name
)
def test_a_step_is_right_with_functions_that_mean_what_vllm_documents(
    anchor: type[Backend], one: Shape, fakes: None
) -> None:
    assert 0 < check(anchor().step(problem(one))) < 1e-2


@pytest.mark.parametrize("anchor", ANCHORS)
def test_without_cuda_an_anchor_says_so(anchor: type[Backend]) -> None:
    assert anchor().obstacle(CPU) == "it needs a CUDA device, not cpu"


@pytest.mark.parametrize("anchor", ANCHORS)
def test_without_vllm_an_anchor_says_so(
    anchor: type[Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "vllm.vllm_flash_attn", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, None)
    reason = anchor().obstacle(torch.device("cuda"))
    assert reason is not None
    assert "cannot be imported" in reason


def test_where_fa3_does_not_run_the_reason_is_vllms(fakes: None) -> None:
    assert FlashAttention3().obstacle(torch.device("cuda")) == "no FA3 on this card"


@pytest.mark.parametrize("one", TINY, ids=lambda one: one.name)
def test_blocks_are_shared_by_nobody_and_before_the_window_there_are_none(one: Shape) -> None:
    class Laid(PagedStep):
        def begin(self) -> None: ...
        def layer(self, index: int) -> None: ...

    step = Laid(problem(one))
    table = step.block_table
    held = table[table > 0].tolist()
    assert sorted(held) == list(range(1, one.paged_blocks))
    assert held != sorted(held) or len(held) < 5  # shuffled
    for i, (q_len, kv_end) in enumerate(one.lengths):
        first = 0 if one.window is None else max(0, kv_end - q_len - one.window + 1)
        live = range(first // BLOCK, -(-kv_end // BLOCK))
        assert [at for at, block in enumerate(table[i].tolist()) if block] == list(live)
    assert len(set(step.slot_mapping.tolist())) == one.tokens


@pytest.mark.parametrize(("heads", "threshold"), [(8, 16), (4, 32), (1, 128), (128, 1)])
def test_keys_are_split_up_to_the_captured_size_next_to_128_over_heads(
    heads: int, threshold: int
) -> None:
    assert split_threshold(heads) == threshold
