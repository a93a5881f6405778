"""Attention of short segments: an equal share of all their key tiles for each program."""

import triton
import triton.language as tl

from .segments import absorb, first_key, short_tiles, slots_of


@triton.jit
def _tiles_at(
    seq_info, info_s, info_c, seg, window, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    q_len = tl.load(seq_info + seg * info_s + info_c)
    kv_end = tl.load(seq_info + seg * info_s + 3 * info_c)
    return short_tiles(q_len, kv_end, window, G, BM, BN)


@triton.jit(do_not_specialize=["S", "T", "rows", "window"])
def attend_short(
    query,
    key_cache,
    value_cache,
    out,
    seq_info,
    pieces,
    part_acc,
    part_sums,
    S,
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
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SMALL: tl.constexpr,
    NEGATE: tl.constexpr,
):
    """Walk over heads of segments; a head that is not all this program's leaves a part.

    A program has at most two parts: 2p of a head that an earlier program began, 2p + 1 of one
    that it begins. part_acc [2P, BM, BD] holds sums of V, part_sums [2P, 2, BM] top and total.
    """
    p = tl.program_id(0)
    seg = tl.load(pieces + p * 8)
    head = tl.load(pieces + p * 8 + 1)
    tile = tl.load(pieces + p * 8 + 2)
    count = tl.load(pieces + p * 8 + 3)

    row = tl.arange(0, BM)
    dim = tl.arange(0, BD)
    dims = dim.to(tl.int64)
    dim_ok = dim < D
    while count > 0:
        n_tiles = _tiles_at(seq_info, info_s, info_c, seg, window, G, BM, BN)
        while (n_tiles == 0) & (seg + 1 < S):
            seg += 1
            n_tiles = _tiles_at(seq_info, info_s, info_c, seg, window, G, BM, BN)
        take = tl.minimum(n_tiles - tile, count)
        info = seq_info + seg * info_s
        q_start = tl.load(info)
        q_len = tl.load(info + info_c)
        col = tl.load(info + 2 * info_c).to(tl.int64)
        kv_end = tl.load(info + 3 * info_c)

        token = q_start + row // G
        position = kv_end - q_len + row // G
        q_head = (head * G + row % G).to(tl.int64)
        row_ok = (row < tl.where(n_tiles > 0, q_len * G, 0)) & (token < T)
        inside = row_ok[:, None] & dim_ok[None, :]
        token = token.to(tl.int64)
        q_at = query + (token * q_t + q_head * q_h)[:, None] + (dims * q_d)[None, :]
        q = tl.load(q_at, mask=inside, other=0.0)
        k_base = key_cache + col * k_col + head.to(tl.int64) * k_h
        v_base = value_cache + col * v_col + head.to(tl.int64) * v_h
        first = first_key(q_len, kv_end, window)

        acc = tl.zeros([BM, BD], tl.float32)
        top = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        for i in range(tile, tile + take):
            start = first + i * BN
            n = start + tl.arange(0, BN)
            slot = slots_of(start, rows, BN, SMALL)
            mask = (n < kv_end)[:, None] & dim_ok[None, :]
            k_at = k_base + slot[:, None] * k_row + (dims * k_d)[None, :]
            v_at = v_base + slot[:, None] * v_row + (dims * v_d)[None, :]
            k = tl.load(k_at, mask=mask, other=0.0)
            v = tl.load(v_at, mask=mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if NEGATE:
                scores = -scores
            seen = (n < kv_end)[None, :]
            if CAUSAL:
                seen = seen & (n[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (n[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            acc, top, total = absorb(scores, v, acc, top, total, scale, True)

        if take == n_tiles:
            result = acc / tl.where(total > 0, total, 1.0)[:, None]
            o_at = out + (token * o_t + q_head * o_h)[:, None] + (dims * o_d)[None, :]
            tl.store(o_at, result.to(out.dtype.element_ty), mask=inside)
        else:
            part = 2 * p + (tile == 0).to(tl.int32)
            tl.store(part_acc + part * BM * BD + row[:, None] * BD + dim[None, :], acc, mask=inside)
            tl.store(part_sums + part * 2 * BM + row, top, mask=row_ok)
            tl.store(part_sums + part * 2 * BM + BM + row, total, mask=row_ok)

        count = tl.where(n_tiles > 0, count - take, 0)
        tile = tile * 0
        head += 1
        seg = tl.where(head == H, seg + 1, seg)
        head = tl.where(head == H, 0, head)
