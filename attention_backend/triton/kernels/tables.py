"""The step's tables from a paged batch whose first block is the column."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["block_size", "num_reqs", "num_tokens", "S", "T"])
def fill_tables(
    query_start_loc,
    block_table,
    block_table_s,
    seq_lens,
    slot_mapping,
    block_size,
    num_reqs,
    num_tokens,
    seq_info,
    info_s,
    seq_cols,
    positions,
    S,
    T,
    B: tl.constexpr,
):
    """Program i: entries i*B .. of each table; what lies beyond the batch becomes zero."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    real = (i < num_reqs) & (i < S)
    start = tl.load(query_start_loc + i, mask=real, other=0)
    stop = tl.load(query_start_loc + i + 1, mask=real, other=0)
    col = tl.load(block_table + i.to(tl.int64) * block_table_s, mask=real, other=0)
    end = tl.load(seq_lens + i, mask=real, other=0)
    row = seq_info + i * info_s
    tl.store(row, start, mask=i < S)
    tl.store(row + 1, stop - start, mask=i < S)
    tl.store(row + 2, col, mask=i < S)
    tl.store(row + 3, tl.where(col == 0, 0, end), mask=i < S)

    slot = tl.load(slot_mapping + i, mask=(i < num_tokens) & (i < T), other=-1)
    slot = tl.maximum(slot, 0)
    token_col = slot // block_size
    position = tl.where(token_col == 0, 0, slot % block_size)
    tl.store(seq_cols + i, token_col.to(tl.int32), mask=i < T)
    tl.store(positions + i, position.to(tl.int32), mask=i < T)
