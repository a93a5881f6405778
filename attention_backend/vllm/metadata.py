"""What the layers of one kind need of a step: made once per step, before the forward pass."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from vllm_kv_columns.attention_backend.kernel import AttentionKernel, StepBounds
from vllm_kv_columns.attention_backend.vllm.tables import DeviceTables, HostTables, TableMaker
from vllm_kv_columns.kv_manager import hooks
from vllm_kv_columns.plugin.options import ColumnOptions
from vllm_kv_columns.plugin.spec import ColumnSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = ["ColumnMetadata", "ColumnMetadataBuilder"]


@dataclass
class ColumnMetadata(AttentionMetadata):
    """What the layers of one kind need of a step.

    Attributes:
        kernel: the attention kernel.
        step: what `kernel.prepare` made of the step's tables.
        num_tokens: tokens of the packed batch, padding excluded.
    """

    kernel: AttentionKernel
    step: Any
    num_tokens: int


def step_bounds(spec: ColumnSpec, layer_name: str, vllm_config: "VllmConfig") -> StepBounds:
    """What no batch of these layers exceeds, graph padding included."""
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    captured = compilation.max_cudagraph_capture_size or 0
    return StepBounds(
        max_tokens=max(scheduler.max_num_batched_tokens, captured),
        max_segments=max(scheduler.max_num_seqs, captured),
        query_heads=compilation.static_forward_context[layer_name].num_heads,
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
    )


class ColumnMetadataBuilder(AttentionMetadataBuilder[ColumnMetadata]):
    """One per kind of layer (rows, window).

    Lengths are read on the device, so a captured graph serves any mix of them.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: "KVCacheSpec",
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        assert isinstance(kv_cache_spec, ColumnSpec)
        options = ColumnOptions.of(vllm_config)
        self.kernel = hooks.kernel_class(options.kernel)()
        self.rows = kv_cache_spec.rows
        self.window = kv_cache_spec.window
        block_size = kv_cache_spec.block_size
        self._tables: TableMaker = HostTables(block_size)
        if device.type != "cpu":
            bounds = step_bounds(kv_cache_spec, layer_names[0], vllm_config)
            self.kernel.reserve(bounds, device)
            self._tables = DeviceTables(block_size, bounds.max_segments, bounds.max_tokens, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ColumnMetadata:
        causal = common_attn_metadata.causal
        assert isinstance(causal, bool)
        tables = self._tables.make(common_attn_metadata)
        step = self.kernel.prepare(
            tables,
            rows=self.rows,
            window=self.window,
            causal=causal,
            max_q_len=common_attn_metadata.max_query_len,
        )
        return ColumnMetadata(self.kernel, step, common_attn_metadata.num_actual_tokens)
