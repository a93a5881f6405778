"""From vLLM's batch to the tables of a step: once per step and kind of layer, on the host."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from vllm_kv_columns.attention_backend.kernel import AttentionKernel
from vllm_kv_columns.kv_manager import hooks
from vllm_kv_columns.kv_manager.tables import StepTables
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


def step_tables(batch: CommonAttentionMetadata, block_size: int) -> StepTables:
    """Read the tables off vLLM's batch, where a request's one block is its column.

    Args:
        batch: `slot_mapping` int64 `[T]` = column * block_size + position, -1 for padding.
        block_size: positions per column in that mapping.
    """
    num_reqs, num_tokens = batch.num_reqs, batch.num_actual_tokens
    starts = batch.query_start_loc[: num_reqs + 1]
    seq_info = torch.stack(
        (
            starts[:-1],
            starts[1:] - starts[:-1],
            batch.block_table_tensor[:num_reqs, 0],
            batch.seq_lens[:num_reqs],
        ),
        dim=1,
    ).to(torch.int32)
    # Padding goes to position 0 of the scratch column.
    slots = batch.slot_mapping[:num_tokens].clamp(min=0)
    columns = torch.div(slots, block_size, rounding_mode="floor")
    return StepTables(
        seq_info=seq_info,
        seq_cols=columns.to(torch.int32),
        positions=(slots - columns * block_size).to(torch.int32),
    )


class ColumnMetadataBuilder(AttentionMetadataBuilder[ColumnMetadata]):
    """One per kind of layer (rows, window)."""

    def __init__(
        self,
        kv_cache_spec: "KVCacheSpec",
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        assert isinstance(kv_cache_spec, ColumnSpec)
        options = ColumnOptions.of(vllm_config.additional_config)
        self.kernel = hooks.kernel_class(options.kernel)()
        self.rows = kv_cache_spec.rows
        self.window = kv_cache_spec.window
        self.block_size = kv_cache_spec.block_size

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> ColumnMetadata:
        causal = common_attn_metadata.causal
        assert isinstance(causal, bool)
        tables = step_tables(common_attn_metadata, self.block_size)
        step = self.kernel.prepare(tables, rows=self.rows, window=self.window, causal=causal)
        return ColumnMetadata(self.kernel, step, common_attn_metadata.num_actual_tokens)
