"""Layers and models that vLLM's own backends serve and columns do not: each is named."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec

from tests.plugin.configured import LAYER, configure
from vllm_kv_columns.plugin import patches
from vllm_kv_columns.plugin.spec import column_specs
from vllm_kv_columns.plugin.support import Unsupported

SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            ChunkedLocalAttentionSpec(attention_chunk_size=64, **SHAPE),
            f"layer {LAYER} with a ChunkedLocalAttentionSpec: columns hold full and sliding",
        ),
        (
            FullAttentionSpec(head_size_v=16, **SHAPE),
            f"layer {LAYER} with K and V of different shape or a quantized cache: a row holds",
        ),
        (
            MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,)),
            f"layer {LAYER} with a MambaSpec: columns hold full and sliding window attention",
        ),
    ],
    ids=["chunked local", "width of V", "state"],
)
def test_specs(spec: Any, sentence: str, mistral_like: Path) -> None:
    with pytest.raises(Unsupported, match=re.escape(sentence)):
        column_specs({LAYER: spec}, configure(mistral_like))


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("use_mm_prefix", "partial multimodal token full attention not supported"),
        ("use_non_causal", "non-causal attention not supported"),
        ("use_batch_invariant", "batch invariance not supported"),
    ],
)
def test_selection(wanted: str, reason: str) -> None:
    patches.install()
    layer = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
    selector = AttentionSelectorConfig(**layer, **{wanted: True})
    with pytest.raises(Unsupported, match=f"this model: {reason}"):
        current_platform.get_attn_backend_cls(patches.backend_member(), selector)
    plain = AttentionSelectorConfig(**layer)
    path = current_platform.get_attn_backend_cls(patches.backend_member(), plain)
    assert path == patches.BACKEND_PATH


def test_a_pooling_model(mistral_like: Path) -> None:
    sentence = "--runner pooling: a pooling model keeps no KV cache between steps"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        configure(mistral_like, runner="pooling")
