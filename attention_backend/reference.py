"""The op in plain torch: slow, on any device, and right. Tests and benchmarks compare with it."""

import torch

__all__ = ["sdpa_varlen_reference", "write_slots_reference"]


def sdpa_varlen_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_info: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of packed queries over the columns of their sequences, in float32.

    query: [T, Hq, D]. key_cache, value_cache: [rows, cols, H, D], any strides, Hq = H * G; query
    head h*G + g belongs to KV head h. seq_info: int32 [S, 4], rows (q_start, q_len, col, kv_end):
    queries q_start .. q_start + q_len are positions kv_end - q_len .. kv_end - 1 of the sequence
    in column col, whose position j is in row j % rows.

    A query at position p attends max(0, p - window + 1) .. p, or up to kv_end - 1 when not causal;
    window None has no lower bound. Queries that attend nothing, and rows that no segment covers,
    come out zero. Rows that are not attended are not read.

    Returns [T, Hq, D] in the dtype and on the device of query. Mutates nothing. Reads seq_info on
    the host.
    """
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    rows, _, num_kv_heads, head_size = key_cache.shape
    for q_start, q_len, col, kv_end in seq_info.tolist():
        for i in range(q_len):
            position = kv_end - q_len + i
            first = 0 if window is None else max(0, position - window + 1)
            last = position if causal else kv_end - 1
            if last < first:
                continue
            slots = torch.arange(first, last + 1, device=query.device) % rows
            keys = key_cache[slots, col].float()  # [n, H, D]
            values = value_cache[slots, col].float()
            heads = query[q_start + i].float().reshape(num_kv_heads, -1, head_size)  # [H, G, D]
            weights = torch.softmax(torch.einsum("hgd,nhd->hgn", heads, keys) * scale, dim=-1)
            result = torch.einsum("hgn,nhd->hgd", weights, values)
            out[q_start + i] = result.reshape(out.shape[1:]).to(out.dtype)
    return out


def write_slots_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_cols: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Store token i in row positions[i] % rows of column seq_cols[i].

    key, value: [T, H, D]. key_cache, value_cache: [rows, cols, H, D], mutated. seq_cols,
    positions: int32 [T], read on the host.
    """
    rows = key_cache.shape[0]
    for i, (col, position) in enumerate(zip(seq_cols.tolist(), positions.tolist(), strict=True)):
        key_cache[position % rows, col] = key[i]
        value_cache[position % rows, col] = value[i]
