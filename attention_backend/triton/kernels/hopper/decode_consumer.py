"""The warps of the decodes' kernel that multiply."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..order import after_earlier_kernels, let_later_kernels_start
from .boxes import box_at, find_segment, sections_of
from .parts import all_here, axes, finish, merge, zero_rows

TILE_ROWS = gl.constexpr(16)  # of queries, what a product takes


@gluon.jit
def consume(
    ring,
    table,
    ends,
    counts,
    where,
    scale,
    early,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    HB: gl.constexpr,
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
    if early == 0:
        after_earlier_kernels(OVERLAP)
    boxes, full, empty = ring
    seq_info, pieces, info_s, info_c, S, T, rows, window = table
    query, out, _, _, q_t, q_h, o_t, o_h = ends
    live, gaps, arrivals = counts
    dtype: gl.constexpr = boxes.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [HB, 1, 1], [1, 16, 8])
    left_side: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    right_side: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    rows_of: gl.constexpr = gl.SliceLayout(2, L)
    run, head = where
    seg = gl.load(pieces + run * 8)
    tile = gl.load(pieces + run * 8 + 1)
    left = gl.load(pieces + run * 8 + 2)
    owner = gl.load(pieces + run * 8 + 4)
    after_earlier_kernels(OVERLAP)
    let_later_kernels_start(OVERLAP)

    warp, q_row, q_dim = axes(left_side, HB, TILE_ROWS, D)
    q_h_at = (head + warp) * G + q_row % G
    _warp, s_row, s_key = axes(L, HB, TILE_ROWS, BN)
    _warp, v_key, _dim = axes(right_side, HB, BN, D)

    count = 0
    while left > 0:
        seg, q_start, q_len, _col, kv_end, n_tiles = find_segment(
            seg, S, seq_info, info_s, info_c, window, G, ROWS, KEYS
        )
        take = gl.minimum(n_tiles - tile, left)
        begin, turn, end, zero, n_old, n = sections_of(
            tile, take, q_len, kv_end, rows, window, KEYS, BN, WINDOWED
        )
        q_len = gl.where(n_tiles > 0, q_len, 0)
        token = q_start + q_row // G
        q_at = query + token.to(gl.int64) * q_t + q_h_at.to(gl.int64) * q_h + q_dim
        q = gl.load(q_at, mask=(q_row < q_len * G) & (token < T), other=0.0)
        position = kv_end - q_len + s_row // G

        acc = gl.full([HB, TILE_ROWS, D], 0.0, gl.float32, L)
        top = gl.full([HB, TILE_ROWS], float("-inf"), gl.float32, rows_of)
        total = gl.full([HB, TILE_ROWS], 0.0, gl.float32, rows_of)
        for i in range(n):
            start, low, _row = box_at(i, begin, turn, end, zero, n_old, rows, BN, WINDOWED)
            stage = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(full.index(stage), phase)
            keys = boxes.index(stage).reshape([HB, BN, D]).permute([0, 2, 1]).load(right_side)
            all_here()  # all have read it
            mbarrier.arrive(empty.index(stage))
            scores = mma_v2(q, keys, gl.full([HB, TILE_ROWS, BN], 0.0, gl.float32, L))

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
            values = boxes.index(stage).reshape([HB, BN, D]).load(right_side)
            all_here()
            mbarrier.arrive(empty.index(stage))
            if start < low:
                values = gl.where(v_key >= low - start, values, 0.0)
            weights = gl.convert_layout(weights.to(dtype), left_side)
            acc = mma_v2(weights, values, acc * fade[:, :, None])
            count += 2

        whole = take == n_tiles
        is_first = (tile == 0).to(gl.int32)
        finish(
            acc, top, total, scale, whole, q_start, q_len, head, run, is_first, T, ends,
            H, G, D, HB, TILE_ROWS, ROWS,
        )  # fmt: skip
        if not whole:
            owner = gl.where(tile == 0, run, owner)
            merge(
                owner, run, q_start, q_len, head, T, pieces, arrivals, ends,
                H, G, D, HB, HB, ROWS, RB, BP,
            )  # fmt: skip
        left = gl.where(n_tiles > 0, left - take, 0)
        tile = tile * 0
        seg += 1
    zero_rows(gl.program_id(0), gl.num_programs(0), out, live, gaps, T, o_t, o_h, H * G, D, HB, BG)
