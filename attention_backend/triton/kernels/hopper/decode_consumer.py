"""The warps of the decodes' kernel that multiply."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..order import after_earlier_kernels, let_later_kernels_start
from .decode_boxes import box_at, find_segment, sections_of
from .decode_merge import TILE_ROWS, all_here, axes, combine, finish, merge, zero_rows

# Triton renamed it after 3.6.
_shared = gl.shared_memory_descriptor
_as_if = getattr(_shared, "reinterpret", None) or _shared._reinterpret

_STEP = gl.constexpr(4096)  # numbers of K that a warp holds at most


@gluon.jit
def _halves(x, P: gl.constexpr, R: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """x [P, R, 2 * N] as two of N; no number changes its thread."""
    left, right = x.reshape([P, R, 2, N]).permute([0, 1, 3, 2]).split()
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def attend(
    ring,
    table,
    ends,
    counts,
    scale,
    count,
    tile,
    take,
    n_tiles,
    owner,
    run,
    head,
    q_start,
    q_len,
    kv_end,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    HB: gl.constexpr,
    MT: gl.constexpr,
    RT: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    RB: gl.constexpr,
    BP: gl.constexpr,
):
    """Tiles tile .. tile + take of a segment with at most RT tiles of rows.

    Returns the count of boxes. Where fewer tiles of rows than MT are needed, warps share the keys
    of a box: MT / RT shares of each head, which are added up at the end.
    """
    SHARES: gl.constexpr = MT // RT
    P: gl.constexpr = HB * SHARES
    R: gl.constexpr = TILE_ROWS * RT
    N: gl.constexpr = BN // SHARES  # keys of a box that are a warp's
    boxes, full, empty = ring
    _, pieces, _, _, _, T, rows, window = table
    query, _, _, _, q_t, q_h, _, _ = ends
    _, _, arrivals = counts
    dtype: gl.constexpr = boxes.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [P, RT, 1], [1, 16, 8])
    left_side: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    right_side: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    rows_of: gl.constexpr = gl.SliceLayout(2, L)

    warp, q_row, q_dim = axes(left_side, P, R, D)
    q_h_at = (head + warp // SHARES) * G + q_row % G
    warp, s_row, s_key = axes(L, P, R, N)
    if SHARES > 1:
        s_key += warp % SHARES * N
    warp, v_key, _dim = axes(right_side, P, N if N * D <= _STEP else N // 2, D)
    if SHARES > 1:
        v_key += warp % SHARES * N

    begin, turn, end, zero, n_old, n = sections_of(
        tile, take, q_len, kv_end, rows, window, KEYS, BN, WINDOWED
    )
    q_len = gl.where(n_tiles > 0, q_len, 0)
    token = q_start + q_row // G
    q_at = query + token.to(gl.int64) * q_t + q_h_at.to(gl.int64) * q_h + q_dim
    q = gl.load(q_at, mask=(q_row < q_len * G) & (token < T), other=0.0)
    position = kv_end - q_len + s_row // G

    acc = gl.full([P, R, D], 0.0, gl.float32, L)
    top = gl.full([P, R], float("-inf"), gl.float32, rows_of)
    total = gl.full([P, R], 0.0, gl.float32, rows_of)
    for i in range(n):
        start, low, _row = box_at(i, begin, turn, end, zero, n_old, rows, BN, WINDOWED)
        stage = count % STAGES
        phase = (count // STAGES) & 1
        mbarrier.wait(full.index(stage), phase)
        keys = boxes.index(stage).reshape([P, N, D]).permute([0, 2, 1]).load(right_side)
        if N * D > _STEP:  # not all at once in registers
            scores = mma_v2(q, keys, gl.full([P, R, N], 0.0, gl.float32, L))
        all_here()  # all have read it
        mbarrier.arrive(empty.index(stage))
        if N * D <= _STEP:
            scores = mma_v2(q, keys, gl.full([P, R, N], 0.0, gl.float32, L))

        edge = start < low
        if CAUSAL:
            edge = edge | (start + BN > kv_end - q_len + 1)
        if WINDOWED:
            edge = edge | (start < kv_end - window)
        if edge:
            seen = s_key >= low - start
            if CAUSAL:
                seen = seen & (s_key <= position - start)
            if WINDOWED:
                seen = seen & (s_key > position - window - start)
            scores = gl.where(seen, scores, float("-inf"))
        new = gl.maximum(top, gl.max(scores, 2))
        shift = gl.where(new == float("-inf"), 0.0, new * scale)  # -inf - -inf would be NaN
        fade = gl.exp2(top * scale - shift)
        weights = gl.exp2(scores * scale - shift[:, :, None])
        total = total * fade + gl.sum(weights, 2)
        top = new

        stage = (count + 1) % STAGES
        phase = ((count + 1) // STAGES) & 1
        mbarrier.wait(full.index(stage), phase)
        if N * D <= _STEP:
            values = boxes.index(stage).reshape([P, N, D]).load(right_side)
            all_here()
            mbarrier.arrive(empty.index(stage))
            if start < low:
                values = gl.where(v_key >= low - start, values, 0.0)
            weights = gl.convert_layout(weights.to(dtype), left_side)
            acc = mma_v2(weights, values, acc * fade[:, :, None])
        else:
            gl.static_assert(N * D == 2 * _STEP)
            places: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)  # those of the box
            box = _as_if(boxes.index(stage), dtype, [P, N, D], places)
            upper, lower = _halves(weights.to(dtype), P, R, N // 2, L)
            values = box.slice(0, N // 2, dim=1).load(right_side)
            if start < low:
                values = gl.where(v_key >= low - start, values, 0.0)
            acc = mma_v2(gl.convert_layout(upper, left_side), values, acc * fade[:, :, None])
            values = box.slice(N // 2, N // 2, dim=1).load(right_side)
            all_here()
            mbarrier.arrive(empty.index(stage))
            if start < low:
                values = gl.where(v_key >= low - start - N // 2, values, 0.0)
            acc = mma_v2(gl.convert_layout(lower, left_side), values, acc)
        count += 2

    whole = take == n_tiles
    is_first = (tile == 0).to(gl.int32)
    if SHARES == 1:
        finish(
            acc, top, total, scale, whole, q_start, q_len, head, run, is_first, T, ends,
            H, G, D, P, R, SHARES, ROWS,
        )  # fmt: skip
    else:
        finish(
            acc, top, total, scale, False, q_start, q_len, head, run, is_first, T, ends,
            H, G, D, P, R, SHARES, ROWS,
        )  # fmt: skip
        all_here()  # all shares are stored
        combine(
            run - 1 + is_first, 1 - is_first, 1, 1, whole, q_start, q_len, head, T, ends,
            H, G, D, HB, MT, R, SHARES, ROWS, RB, BP,
        )  # fmt: skip
    if not whole:
        owner = gl.where(tile == 0, run, owner)
        merge(
            owner, run, q_start, q_len, head, T, pieces, arrivals, ends,
            H, G, D, HB, MT, ROWS, RB, BP,
        )  # fmt: skip
    return count


@gluon.jit
def consume(
    ring,
    table,
    ends,
    counts,
    scale,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    HB: gl.constexpr,
    MT: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    RB: gl.constexpr,
    BP: gl.constexpr,
    BG: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    after_earlier_kernels(OVERLAP)
    let_later_kernels_start(OVERLAP)
    seq_info, pieces, info_s, info_c, S, T, _, window = table
    _, out, _, _, _, _, o_t, o_h = ends
    live, gaps, _ = counts
    run = gl.program_id(0) // (H // HB)
    head = gl.program_id(0) % (H // HB) * HB
    seg = gl.load(pieces + run * 8)
    tile = gl.load(pieces + run * 8 + 1)
    left = gl.load(pieces + run * 8 + 2)
    owner = gl.load(pieces + run * 8 + 4)
    count = 0
    while left > 0:
        seg, q_start, q_len, _col, kv_end, n_tiles = find_segment(
            seg, S, seq_info, info_s, info_c, window, G, ROWS, KEYS
        )
        take = gl.minimum(n_tiles - tile, left)
        if MT == 1:
            count = attend(
                ring, table, ends, counts, scale, count, tile, take, n_tiles, owner,
                run, head, q_start, q_len, kv_end,
                H, G, D, HB, MT, 1, BN, STAGES, ROWS, KEYS, CAUSAL, WINDOWED, RB, BP,
            )  # fmt: skip
        elif q_len * G > 2 * TILE_ROWS:
            count = attend(
                ring, table, ends, counts, scale, count, tile, take, n_tiles, owner,
                run, head, q_start, q_len, kv_end,
                H, G, D, HB, MT, MT, BN, STAGES, ROWS, KEYS, CAUSAL, WINDOWED, RB, BP,
            )  # fmt: skip
        elif q_len * G > TILE_ROWS:
            count = attend(
                ring, table, ends, counts, scale, count, tile, take, n_tiles, owner,
                run, head, q_start, q_len, kv_end,
                H, G, D, HB, MT, 2, BN, STAGES, ROWS, KEYS, CAUSAL, WINDOWED, RB, BP,
            )  # fmt: skip
        else:
            count = attend(
                ring, table, ends, counts, scale, count, tile, take, n_tiles, owner,
                run, head, q_start, q_len, kv_end,
                H, G, D, HB, MT, 1, BN, STAGES, ROWS, KEYS, CAUSAL, WINDOWED, RB, BP,
            )  # fmt: skip
        left = gl.where(n_tiles > 0, left - take, 0)
        tile = tile * 0
        seg += 1
    zero_rows(out, live, gaps, T, o_t, o_h, H * G, D, HB * MT, BG)
