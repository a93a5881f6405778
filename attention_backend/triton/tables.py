"""The step's tables of a paged batch in which a request's first block is its column."""

import torch

from ...kv_manager.tables import StepTables
from .device import OPTIONS, current
from .kernels import tables as kernels

__all__ = ["fill_tables", "fill_tables_reference"]

ENTRIES = 256  # of each table, filled by one program


def fill_tables(
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    block_size: int,
    num_reqs: int,
    num_tokens: int,
    tables: StepTables,
) -> None:
    """Overwrite all of ``tables`` in one launch, without a copy to the host or an allocation.

    query_start_loc: int32 [>= num_reqs + 1], where each request's queries begin. block_table:
    int32 [>= num_reqs, >= 1], rows any distance apart; its first entry is the column, 0 for the
    scratch column. seq_lens: int32 [>= num_reqs], positions of a sequence after the step.
    slot_mapping: int64 [>= num_tokens], column * block_size + position, -1 for padding.
    tables: seq_info gets (start, length, column, seq_len) of each request, seq_len 0 for column 0,
    and zeros in what rows are left; seq_cols and positions get 0 for padding, for the scratch
    column and beyond num_tokens. On a CUDA device. Raises ValueError for tensors too short.
    """
    _check(query_start_loc, block_table, seq_lens, slot_mapping, num_reqs, num_tokens, tables)
    seq_info = tables.seq_info
    segments, tokens = seq_info.shape[0], tables.num_tokens
    programs = -(-max(segments, tokens) // ENTRIES)
    if not programs:
        return
    with current(seq_info.device):
        kernels.fill_tables[(programs,)](
            query_start_loc,
            block_table,
            block_table.stride(0),
            seq_lens,
            slot_mapping,
            block_size,
            num_reqs,
            num_tokens,
            seq_info,
            seq_info.stride(0),
            tables.seq_cols,
            tables.positions,
            segments,
            tokens,
            B=ENTRIES,
            **OPTIONS,
        )


def fill_tables_reference(
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    block_size: int,
    num_reqs: int,
    num_tokens: int,
    tables: StepTables,
) -> None:
    """The same in plain torch, on any device."""
    _check(query_start_loc, block_table, seq_lens, slot_mapping, num_reqs, num_tokens, tables)
    for table in (tables.seq_info, tables.seq_cols, tables.positions):
        table.zero_()
    starts, columns = query_start_loc[: num_reqs + 1], block_table[:num_reqs, 0]
    ends = torch.where(columns == 0, 0, seq_lens[:num_reqs])
    info = (starts[:-1], starts[1:] - starts[:-1], columns, ends)
    tables.seq_info[:num_reqs] = torch.stack(info, dim=1)
    slots = slot_mapping[:num_tokens].clamp(min=0)
    columns = torch.div(slots, block_size, rounding_mode="floor")
    tables.seq_cols[:num_tokens] = columns
    tables.positions[:num_tokens] = torch.where(columns == 0, 0, slots - columns * block_size)


def _check(
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_reqs: int,
    num_tokens: int,
    tables: StepTables,
) -> None:
    for name, tensor, least, dtype in (
        ("query_start_loc", query_start_loc, num_reqs + 1, torch.int32),
        ("block_table", block_table, num_reqs, torch.int32),
        ("seq_lens", seq_lens, num_reqs, torch.int32),
        ("slot_mapping", slot_mapping, num_tokens, torch.int64),
    ):
        if tensor.shape[0] < least:
            raise ValueError(
                f"{name} has {tensor.shape[0]} entries; {num_reqs} requests of {num_tokens} "
                f"tokens need {least}"
            )
        if tensor.dtype != dtype or (tensor.dim() == 1 and tensor.stride(0) != 1):
            raise ValueError(f"{name} is {tensor.dtype}; it must be {dtype} and contiguous")
    seq_info = tables.seq_info
    if num_reqs > seq_info.shape[0] or num_tokens > tables.num_tokens:
        raise ValueError(
            f"{num_reqs} requests and {num_tokens} tokens do not fit tables of "
            f"{seq_info.shape[0]} segments and {tables.num_tokens} tokens; make them larger"
        )
    if seq_info.stride(1) != 1:
        raise ValueError("the rows of seq_info must be contiguous; make the table with torch.zeros")
