"""Attention of short segments: an equal run of all their key tiles for each program."""

import triton
import triton.language as tl

from .merge import leave_part, merge_parts, zero_rows
from .order import after_earlier_kernels, let_later_kernels_start
from .segments import PIECE, absorb, first_key, short_tiles, slots_of


@triton.jit
def _tiles_at(
    seq_info, info_s, info_c, seg, window, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    q_len = tl.load(seq_info + seg * info_s + info_c)
    kv_end = tl.load(seq_info + seg * info_s + 3 * info_c)
    return short_tiles(q_len, kv_end, window, G, BM, BN)


@triton.jit
def _attend_rows(
    begin_row, q_start, q_len, col, kv_end, head, tile, take, n_tiles, part, T, rows, window, scale,
    query, key_cache, value_cache, out, part_acc, part_sums,
    q_t, q_h, q_d, k_row, k_col, k_h, k_d, v_row, v_col, v_h, v_d, o_t, o_h, o_d,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SMALL: tl.constexpr,
    NEGATE: tl.constexpr,
):  # fmt: skip
    """Rows begin_row .. begin_row + BM of a head over tiles tile .. tile + take.

    The result goes to ``out`` if these are all tiles of the head, else it is a part.
    """
    row = begin_row + tl.arange(0, BM)
    dim = tl.arange(0, BD)
    dims = dim.to(tl.int64)
    dim_ok = dim < D
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
        leave_part(part, row, row_ok, acc, top, total, part_acc, part_sums, dim, dim_ok, ROWS, BD)


@triton.jit(do_not_specialize=["S", "T", "rows", "window"])
def attend_short(
    query,
    key_cache,
    value_cache,
    out,
    seq_info,
    pieces,
    live,
    gaps,
    arrivals,
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
    ROWS: tl.constexpr,
    LARGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SMALL: tl.constexpr,
    NEGATE: tl.constexpr,
    RB: tl.constexpr,
    BP: tl.constexpr,
    BG: tl.constexpr,
    BT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (run, head): walk over the run's segments; one that is not all its leaves a part.

    LARGE: some segments may have more than BM rows, at most ROWS, and run in several tiles of rows.
    Whoever leaves the last part of a head merges them. Then the rows of ``out`` that nothing
    covers become zero. A program has at most two parts: 2p of a segment that an earlier run began,
    2p + 1 of one that it begins. The H programs of a run read rows of all heads at about the same
    time.
    """
    p = tl.program_id(0)
    after_earlier_kernels(OVERLAP)
    let_later_kernels_start(OVERLAP)
    run = p // H
    head = p % H
    seg = tl.load(pieces + run * PIECE)
    tile = tl.load(pieces + run * PIECE + 1)
    count = tl.load(pieces + run * PIECE + 2)
    owner = tl.load(pieces + run * PIECE + 4)
    gap = tl.load(gaps + p, mask=p * BG < T, other=0)
    while count > 0:
        n_tiles = _tiles_at(seq_info, info_s, info_c, seg, window, G, ROWS, BN)
        while (n_tiles == 0) & (seg + 1 < S):
            seg += 1
            n_tiles = _tiles_at(seq_info, info_s, info_c, seg, window, G, ROWS, BN)
        take = tl.minimum(n_tiles - tile, count)
        info = seq_info + seg * info_s
        q_start = tl.load(info)
        q_len = tl.load(info + info_c)
        col = tl.load(info + 2 * info_c).to(tl.int64)
        kv_end = tl.load(info + 3 * info_c)
        part = 2 * p + (tile == 0).to(tl.int32)
        # Without LARGE one tile of rows holds all, and there is no loop around the walk over keys.
        for begin_row in range(0, q_len * G if LARGE else 1, BM):
            _attend_rows(
                begin_row, q_start, q_len, col, kv_end, head, tile, take, n_tiles, part,
                T, rows, window, scale,
                query, key_cache, value_cache, out, part_acc, part_sums,
                q_t, q_h, q_d, k_row, k_col, k_h, k_d, v_row, v_col, v_h, v_d, o_t, o_h, o_d,
                G, D, BD, BM, BN, ROWS, CAUSAL, WINDOWED, SMALL, NEGATE,
            )  # fmt: skip
        if take < n_tiles:
            owner = tl.where(tile == 0, run, owner)
            merge_parts(
                owner, q_start, q_len, head, T, out, pieces, arrivals, part_acc, part_sums,
                o_t, o_h, o_d, H, G, D, BD, ROWS, RB, BP,
            )  # fmt: skip
        count = tl.where(n_tiles > 0, count - take, 0)
        tile = tile * 0
        seg += 1
    zero_rows(p, gap, out, live, gaps, T, o_t, o_h, o_d, H * G, D, BD, BG, BT)
