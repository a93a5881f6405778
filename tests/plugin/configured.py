"""vLLM's configuration and scheduler for columns, without an engine."""

from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kv_columns.plugin import patches, spec

__all__ = ["LAYER", "configure", "made_scheduler"]

LAYER = "model.layers.0.self_attn.attn"
COLUMNS = {"attention_backend": "SDPA_VARLEN"}


def configure(model: Path, **arguments: Any) -> VllmConfig:
    """Of a model on columns, where no other backend is named."""
    patches.install()
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, **{**COLUMNS, **arguments}
    ).create_engine_config()


def made_scheduler(kind: Any, config: VllmConfig, pages: int, **arguments: Any) -> Any:
    """A scheduler of that class, for one layer of two KV heads and a budget of so many pages."""
    stock = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        spec.register()
        (column_spec,) = spec.column_specs({LAYER: stock}, config).values()
        cache = KVCacheConfig(pages, [], [KVCacheGroupSpec([LAYER], column_spec)])
        config.cache_config.num_gpu_blocks = pages
        init_none_hash(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo))
        return kind(
            config,
            cache,
            StructuredOutputManager(config),
            column_spec.block_size,
            **arguments,
        )
