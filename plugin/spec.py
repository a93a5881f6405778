"""The cache's geometry as vLLM sees it: one `ColumnSpec` per layer, all in one KV cache group."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kv_columns.kv_manager import hooks
from vllm_kv_columns.kv_manager.config import CacheConfig, FlatPolicy, LayerGroup, RingPolicy
from vllm_kv_columns.kv_manager.geometry import CacheGeometry
from vllm_kv_columns.plugin.options import ColumnOptions
from vllm_kv_columns.plugin.support import Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["ColumnSpec", "column_specs", "register"]

COLUMN_ALIGNMENT = 128
"""vLLM wants block sizes in multiples of this many tokens."""

BLOCK_TOKENS = 16
"""vLLM's own block size where the user sets none."""

RING_TILE = 128
"""Rows of rings are a multiple of this on a GPU: the largest tile of keys of a kernel."""

UNBOUNDED = 1 << 62
"""Bytes: vLLM's block pool keeps the budget, and it has no size yet when the specs are made."""


@dataclass(frozen=True, kw_only=True)
class ColumnSpec(AttentionSpec):
    """One layer of the column cache.

    To vLLM's scheduler a block is one physical page of the byte budget; to its workers the one
    block of a request is its column, `block_size` positions long (at least the model length).
    vLLM hands the scheduler a single layer's spec, so each carries the whole model's `cache`.

    Attributes:
        cache: configuration of the whole cache; its byte budget is not set here.
        rows: rows of a column in this layer.
        window: sliding window in tokens, None for full attention.
        block_tokens: tokens of a block of which a hash is known, the unit of prefix reuse.
        cut_pages: see `ColumnStore`.
        compact: whether the lowest free column goes first, so that running sequences lie close
            together, or the one that was freed first, whose last work is done by then.
    """

    cache: CacheConfig
    rows: int
    window: int | None
    block_tokens: int
    cut_pages: int
    compact: bool

    @property
    def geometry(self) -> CacheGeometry:
        return CacheGeometry.of(self.cache)

    @property
    def page_size_bytes(self) -> int:
        """This layer's share of a page, rounded up: the shares of all layers make one page."""
        layers = sum(len(group.layers) for group in self.cache.groups)
        return -(-self.cache.page_size // layers)

    def max_memory_usage_bytes(self, vllm_config: "VllmConfig") -> int:
        return self.page_size_bytes * self.geometry.pages_for(
            vllm_config.model_config.max_model_len
        )

    def max_num_blocks_per_req(self, vllm_config: "VllmConfig", max_len: int) -> int:
        return 1

    @property
    def prefix_cacheable(self) -> bool:
        return True


def _window(layer: str, spec: KVCacheSpec) -> int | None:
    """The layer's sliding window, or a refusal for a layer that is not plain attention."""
    if type(spec) is FullAttentionSpec:
        # With the hybrid manager off, vLLM describes a sliding window layer as a full one.
        window = spec.sliding_window
    elif type(spec) is SlidingWindowSpec:
        window = spec.sliding_window
    else:
        raise Unsupported(
            f"layer {layer} with a {type(spec).__name__}",
            "columns hold full and sliding window attention",
            "drop --attention-backend SDPA_VARLEN",
        )
    if spec.head_size_v != spec.head_size or spec.kv_quant_mode != KVQuantMode.NONE:
        raise Unsupported(
            f"layer {layer} with K and V of different shape or a quantized cache",
            "a row holds K and V of one shape in the model's dtype",
            "drop --attention-backend SDPA_VARLEN",
        )
    return window


def column_specs(
    specs: Mapping[str, KVCacheSpec], vllm_config: "VllmConfig"
) -> dict[str, KVCacheSpec]:
    """Turn the stock specs of all layers of a worker into column specs.

    Args:
        specs: layer name -> stock spec, in layer order.
        vllm_config: source of the model length, the step size and the number of sequences.

    Returns:
        Layer name -> `ColumnSpec`, all with the same `cache` and block size.

    Raises:
        Unsupported: a layer that is neither full nor sliding window attention.
    """
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    options = ColumnOptions.of(vllm_config)
    compact = vllm_config.device_config.device_type == "cpu"
    capacity = vllm_config.model_config.max_model_len
    retained = (
        options.retained_columns(scheduler.max_num_seqs) if cache.enable_prefix_caching else 0
    )
    user_block = cache.block_size if cache.user_specified_block_size else None
    groups: dict[tuple[int | None, int, int, str], list[str]] = {}
    for layer, spec in specs.items():
        window = _window(layer, spec)
        dtype = str(spec.dtype).removeprefix("torch.")
        if window is not None and window >= capacity:
            window = None
        key = (window, spec.num_kv_heads, spec.head_size, dtype)
        groups.setdefault(key, []).append(layer)
    config = CacheConfig(
        max_seqs=scheduler.max_num_seqs + retained,
        capacity=capacity,
        max_write=min(scheduler.max_num_batched_tokens, capacity),
        groups=tuple(
            LayerGroup(
                name=f"{'flat' if window is None else f'ring{window}'}.{heads}x{head_size}",
                layers=tuple(layers),
                policy=FlatPolicy() if window is None else RingPolicy(window),
                num_kv_heads=heads,
                head_size=head_size,
                dtype=dtype,
                layers_per_region=options.layers_per_region or None,
            )
            for (window, heads, head_size, dtype), layers in groups.items()
        ),
        page_size=options.page_size,
        budget_bytes=UNBOUNDED,
        ahead_rows=options.ahead_rows,
        growth_rows=user_block or 1,
        ring_tile=1 if compact else RING_TILE,
    )
    geometry = CacheGeometry.of(config)
    block_size = -(-capacity // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    return {
        layer: ColumnSpec(
            block_size=block_size,
            num_kv_heads=region.num_kv_heads,
            head_size=region.head_size,
            dtype=specs[layer].dtype,
            cache=config,
            rows=region.rows,
            window=region.policy.window,
            block_tokens=user_block or BLOCK_TOKENS,
            cut_pages=hooks.store_class(options.store).cut_pages,
            compact=compact,
        )
        for region in geometry.regions
        for layer in region.layers
    }


def register() -> None:
    """Tell vLLM which manager serves `ColumnSpec`. Idempotent.

    The stock specs go first: the registry skips them once it holds anything.
    """
    from vllm_kv_columns.plugin.column_manager import ColumnManager

    register_all_kvcache_specs(None)
    KVCacheSpecRegistry.register(ColumnSpec, ColumnManager, ColumnSpec)
