"""Attention of long segments: one program for each (query tile, KV head)."""

import triton
import triton.language as tl

from .order import after_earlier_kernels, let_later_kernels_start
from .segments import absorb, slots_of


@triton.jit
def _walk(
    q,
    acc,
    top,
    total,
    k_base,
    v_base,
    k_row,
    v_row,
    dims_k,
    dims_v,
    dim_ok,
    position,
    begin,
    end,
    kv_end,
    rows,
    window,
    scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SMALL: tl.constexpr,
    PADDED: tl.constexpr,
    NEGATE: tl.constexpr,
    BN: tl.constexpr,
):
    """Absorb keys begin .. end in tiles; MASKED where some query does not see all of a tile."""
    for start in range(begin, end, BN):
        slot = slots_of(start, rows, BN, SMALL)
        k_at = k_base + slot[:, None] * k_row + dims_k[None, :]
        v_at = v_base + slot[:, None] * v_row + dims_v[None, :]
        n = start + tl.arange(0, BN)
        if MASKED:
            mask = (n < end)[:, None] & dim_ok[None, :]
            k = tl.load(k_at, mask=mask, other=0.0)
            v = tl.load(v_at, mask=mask, other=0.0)
        elif PADDED:
            k = tl.load(k_at, mask=dim_ok[None, :], other=0.0)
            v = tl.load(v_at, mask=dim_ok[None, :], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if NEGATE:
            scores = -scores
        if MASKED:
            seen = (n < kv_end)[None, :]
            if CAUSAL:
                seen = seen & (n[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (n[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        acc, top, total = absorb(scores, v, acc, top, total, scale, MASKED)
    return acc, top, total


@triton.jit(do_not_specialize=["T", "rows", "window"])
def attend_long(
    query,
    key_cache,
    value_cache,
    out,
    seq_info,
    tiles,
    T,
    rows,
    window,
    scale,
    info_s,
    info_c,
    q_t,
    q_h,
    q_d,
    k_row,
    k_col,
    k_h,
    k_d,
    v_row,
    v_col,
    v_h,
    v_d,
    o_t,
    o_h,
    o_d,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SMALL: tl.constexpr,
    NEGATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows of a tile are (query, head of the group), so that a tile reads one KV head once.

    SPLIT programs, of BM rows each, share a tile of the schedule.
    """
    let_later_kernels_start(OVERLAP)
    pid = tl.program_id(0)
    head = pid % H
    part = pid // H % SPLIT
    entry = tiles + pid // (H * SPLIT) * 2
    seg = tl.load(entry)
    begin_row = (tl.load(entry + 1) * SPLIT + part) * BM
    info = seq_info + tl.maximum(seg, 0) * info_s
    q_len = tl.load(info + info_c)
    if (seg >= 0) & (begin_row < q_len * G):
        q_start = tl.load(info)
        col = tl.load(info + 2 * info_c).to(tl.int64)
        kv_end = tl.load(info + 3 * info_c)

        row = begin_row + tl.arange(0, BM)
        token = q_start + row // G
        q_head = (head * G + row % G).to(tl.int64)
        dim = tl.arange(0, BD)
        dim_ok = dim < D
        inside = ((row < q_len * G) & (token < T))[:, None] & dim_ok[None, :]
        dims = dim.to(tl.int64)
        token = token.to(tl.int64)
        q_at = query + (token * q_t + q_head * q_h)[:, None] + (dims * q_d)[None, :]
        q = tl.load(q_at, mask=inside, other=0.0)

        # Keys that some query of the tile sees are low .. high; all see those in full_low ..
        # full_high. Only tiles that are not in the latter need masks.
        position = kv_end - q_len + row // G
        earliest = kv_end - q_len + begin_row // G
        latest = tl.minimum(kv_end - q_len + (begin_row + BM - 1) // G, kv_end - 1)
        low = tl.full([], 0, tl.int32)
        high = kv_end
        full_low = tl.full([], 0, tl.int32)
        full_high = kv_end
        if WINDOWED:
            low = tl.maximum(earliest - window + 1, 0)
            full_low = tl.maximum(latest - window + 1, 0)
        if CAUSAL:
            high = latest + 1
            full_high = earliest + 1
        full_begin = low + (full_low - low + BN - 1) // BN * BN
        full_end = low + tl.maximum(full_high - low, 0) // BN * BN
        full_end = tl.maximum(full_end, full_begin)

        acc = tl.zeros([BM, BD], tl.float32)
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        k_base = key_cache + col * k_col + head.to(tl.int64) * k_h
        v_base = value_cache + col * v_col + head.to(tl.int64) * v_h
        PADDED: tl.constexpr = D != BD
        if WINDOWED:
            acc, top, total = _walk(
                q, acc, top, total, k_base, v_base, k_row, v_row, dims * k_d, dims * v_d, dim_ok,
                position, low, tl.minimum(full_begin, high), kv_end, rows, window, scale,
                True, CAUSAL, WINDOWED, SMALL, PADDED, NEGATE, BN,
            )  # fmt: skip
        acc, top, total = _walk(
            q, acc, top, total, k_base, v_base, k_row, v_row, dims * k_d, dims * v_d, dim_ok,
            position, full_begin, full_end, kv_end, rows, window, scale,
            False, CAUSAL, WINDOWED, SMALL, PADDED, NEGATE, BN,
        )  # fmt: skip
        acc, top, total = _walk(
            q, acc, top, total, k_base, v_base, k_row, v_row, dims * k_d, dims * v_d, dim_ok,
            position, full_end, high, kv_end, rows, window, scale,
            True, CAUSAL, WINDOWED, SMALL, PADDED, NEGATE, BN,
        )  # fmt: skip
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        o_at = out + (token * o_t + q_head * o_h)[:, None] + (dims * o_d)[None, :]
        tl.store(o_at, result.to(out.dtype.element_ty), mask=inside)
    if pid == tl.num_programs(0) - 1:
        after_earlier_kernels(OVERLAP)  # by one program: the others make room for those to come
