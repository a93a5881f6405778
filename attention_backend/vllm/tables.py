"""From vLLM's batch to the tables of a step, where a request's one block is its column.

Column 0 is the scratch column: a request in it reads nothing (`kv_end` 0), and whatever its tokens
write goes to position 0. That is what padding, dummy batches and refused requests come out as.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kv_columns.attention_backend.triton.tables import fill_tables, fill_tables_reference
from vllm_kv_columns.kv_manager.tables import StepTables

__all__ = ["DeviceTables", "HostTables", "TableMaker"]


class TableMaker(ABC):
    """Makes the tables of one step after the other."""

    @abstractmethod
    def make(self, batch: CommonAttentionMetadata) -> StepTables:
        """Tables of a batch.

        Args:
            batch: `slot_mapping` int64 `[T]` = column * block_size + position, -1 for padding;
                the first column of `block_table_tensor` is the requests' columns.
        """


class HostTables(TableMaker):
    """New tensors at every step, on the CPU.

    Args:
        block_size: positions per column in vLLM's slot mapping.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def make(self, batch: CommonAttentionMetadata) -> StepTables:
        tables = StepTables(
            seq_info=torch.empty((batch.num_reqs, 4), dtype=torch.int32),
            seq_cols=torch.empty(batch.num_actual_tokens, dtype=torch.int32),
            positions=torch.empty(batch.num_actual_tokens, dtype=torch.int32),
        )
        fill(fill_tables_reference, batch, self._block_size, tables)
        return tables


class DeviceTables(TableMaker):
    """The same tensors at every step, filled on the GPU: captured graphs hold their addresses.

    Args:
        block_size: positions per column in vLLM's slot mapping.
        max_segments: most requests of a batch, padding included.
        max_tokens: most tokens of a batch, padding included.
        device: where the tables are.
    """

    def __init__(
        self, block_size: int, max_segments: int, max_tokens: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._seq_info = torch.zeros((max_segments, 4), dtype=torch.int32, device=device)
        self._seq_cols, self._positions = torch.zeros(
            (2, max_tokens), dtype=torch.int32, device=device
        )

    def make(self, batch: CommonAttentionMetadata) -> StepTables:
        num_reqs, num_tokens = batch.num_reqs, batch.num_actual_tokens
        tables = StepTables(
            seq_info=self._seq_info[:num_reqs],
            seq_cols=self._seq_cols[:num_tokens],
            positions=self._positions[:num_tokens],
        )
        fill(fill_tables, batch, self._block_size, tables)
        return tables


def fill(
    filler: Callable[..., None], batch: CommonAttentionMetadata, block_size: int, tables: StepTables
) -> None:
    filler(
        batch.query_start_loc,
        batch.block_table_tensor,
        batch.seq_lens,
        batch.slot_mapping,
        block_size=block_size,
        num_reqs=batch.num_reqs,
        num_tokens=batch.num_actual_tokens,
        tables=tables,
    )
