"""The three functions of vLLM that the anchors call, in torch, for the CPU.

With the names of their arguments as in vLLM 0.33: one too many or too few is a TypeError.
"""

from typing import Any

import torch


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    assert kv_cache_dtype == "auto"
    assert k_scale.item() == v_scale.item() == 1
    assert slot_mapping.dtype == torch.int64
    block, token = slot_mapping // key_cache.shape[1], slot_mapping % key_cache.shape[1]
    key_cache[block, token] = key
    value_cache[block, token] = value


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    window_size: Any,
) -> None:
    """Causal, aligned to the last key, as FlashAttention has it. Block 0 must not be seen."""
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    group = q.shape[1] // k.shape[2]
    for i, end in enumerate(seqused_k.tolist()):
        start, stop = cu_seqlens_q[i : i + 2].tolist()
        for row in range(start, stop):
            last = end - (stop - row)
            first = 0 if window_size[0] < 0 else max(0, last - window_size[0])
            at = torch.arange(first, last + 1)
            blocks = block_table[i, at // k.shape[1]].long()
            assert (blocks > 0).all()
            keys, values = (
                cache[blocks, at % k.shape[1]].float().repeat_interleave(group, 1)
                for cache in (k, v)
            )
            weights = torch.einsum("hd,khd->hk", q[row].float(), keys) * softmax_scale
            out[row] = torch.einsum("hk,khd->hd", weights.softmax(-1), values).to(out.dtype)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype,
    cu_seqlens_q: torch.Tensor,
    page_size: int,
    causal: bool,
    window_size: tuple[int, int],
    num_splits: int,
) -> torch.Tensor:
    assert len(cache_seqlens) == batch_size == len(cu_seqlens_q) - 1
    assert cache_seqlens.max() == max_seqlen_k
    assert cu_seqlens_q.diff().max() == max_seqlen_q
    assert causal
    return torch.full((1 + 4 * -(-batch_size // 4) * 4,), 7, dtype=torch.int32)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: list[int],
    block_table: torch.Tensor,
    softcap: float,
    scheduler_metadata: torch.Tensor,
    fa_version: int,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    num_splits: int,
) -> None:
    assert causal
    assert (fa_version, softcap) == (3, 0)
    assert (scheduler_metadata == 7).all()
    assert len(scheduler_metadata) == 1 + 4 * -(-len(seqused_k) // 4) * 4
    assert num_splits == (32 if len(q) <= 512 else 0)
    assert all(one.shape == (len(seqused_k), k.shape[2]) for one in (q_descale, k_descale))
    assert all(stride % 8 == 0 for cache in (k, v) for stride in cache.stride()[:3])  # 16 bytes
    paged_attention(q, k, v, out, cu_seqlens_q, seqused_k, block_table, softmax_scale, window_size)


def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    seq_threshold_3D: int,
    num_par_softmax_segments: int,
    softmax_segm_output: torch.Tensor,
    softmax_segm_max: torch.Tensor,
    softmax_segm_expsum: torch.Tensor,
) -> None:
    assert causal
    assert (softcap, q_descale, num_par_softmax_segments) == (0, None, 16)
    rows = softmax_segm_max.shape[0]
    assert rows >= seq_threshold_3D
    assert softmax_segm_max.shape == softmax_segm_expsum.shape == (rows, q.shape[1], 16)
    assert softmax_segm_output.shape == (rows, q.shape[1], 16, q.shape[2])
    paged_attention(q, k, v, out, cu_seqlens_q, seqused_k, block_table, softmax_scale, window_size)
