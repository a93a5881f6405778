"""The warpgroups of the short segments' kernel that multiply."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..order import after_earlier_kernels, let_later_kernels_start
from ..segments import short_tiles
from .boxes import box_at, find_segment, load_piece, sections_of
from .layouts import product_layout, row_layout
from .parts import finish, merge, zero_rows
from .softmax import clear, weigh

TILE_ROWS = gl.constexpr(64)  # of queries, what a warpgroup's product takes
Q_ROWS = gl.constexpr(16)  # brought at once: a decode needs no more, and its code is often cold


@gluon.jit
def consume(
    q_tile,
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
    BN: gl.constexpr,
    STAGES: gl.constexpr,
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
    run, head = where
    dtype: gl.constexpr = boxes.dtype
    s_layout: gl.constexpr = product_layout(BN)
    o_layout: gl.constexpr = product_layout(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    io: gl.constexpr = row_layout(D)
    seg, tile, left, owner, q_start, q_len, _col, kv_end = load_piece(pieces, run)
    n_tiles = short_tiles(q_len, kv_end, window, G, TILE_ROWS, KEYS)
    after_earlier_kernels(OVERLAP)
    let_later_kernels_start(OVERLAP)

    q_row = gl.arange(0, Q_ROWS, gl.SliceLayout(1, io))
    q_dim = gl.arange(0, D, gl.SliceLayout(0, io))
    s_query = gl.arange(0, TILE_ROWS, s_rows) // G
    none = gl.full([TILE_ROWS, BN], 0.0, gl.float32, s_layout)

    count = 0
    while left > 0:
        take = gl.minimum(n_tiles - tile, left)
        begin, turn, end, zero, n_old, n = sections_of(
            tile, take, q_len, kv_end, rows, window, KEYS, BN, WINDOWED
        )
        q_len = gl.where(n_tiles > 0, q_len, 0)
        # No row's result depends on another row, so what is not brought may hold anything.
        for part in gl.static_range(TILE_ROWS // Q_ROWS):
            if q_len * G > part * Q_ROWS:
                row = q_row + part * Q_ROWS
                token = q_start + row // G
                at = token.to(gl.int64) * q_t + (head * G + row % G).to(gl.int64) * q_h
                inside = (row < q_len * G) & (token < T)
                rows_of_q = gl.load(
                    query + at[:, None] + q_dim[None, :], mask=inside[:, None], other=0.0
                )
                q_tile.slice(part * Q_ROWS, Q_ROWS).store(rows_of_q)
        fence_async_shared()

        least = gl.full([TILE_ROWS], 0, gl.int32, s_rows)
        most = least + (kv_end - 1)
        if CAUSAL:
            most = gl.minimum(most, kv_end - q_len + s_query)
        if WINDOWED:
            least = gl.maximum(kv_end - q_len + s_query - window + 1, 0)
        acc = gl.full([TILE_ROWS, D], 0.0, gl.float32, o_layout)
        top = gl.full([TILE_ROWS], float("-inf"), gl.float32, s_rows)
        total = gl.full([TILE_ROWS], 0.0, gl.float32, s_rows)
        for i in range(n):
            start, low, _row = box_at(i, begin, turn, end, zero, n_old, rows, BN, WINDOWED)
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            keys = boxes.index(stage).reshape([BN, D]).permute([1, 0])
            scores = warpgroup_mma(q_tile, keys, none, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(empty.index(stage))

            edge = start < low
            if CAUSAL:
                edge = edge | (start + BN > kv_end - q_len + 1)
            if WINDOWED:
                edge = edge | (start < kv_end - window)
            weights, fade, top, total = weigh(
                scores, top, total, start, low, least, most, edge, scale, BN
            )
            weights = gl.convert_layout(weights.to(dtype), p_layout)
            acc = acc * gl.convert_layout(fade, o_rows)[:, None]

            stage = (count + 1) % STAGES
            mbarrier.wait(full.index(stage), ((count + 1) // STAGES) & 1)
            values = boxes.index(stage).reshape([BN, D])
            if WINDOWED:  # noqa: SIM102 known when compiled
                if start < low:
                    clear(values, low - start, BN, D)
            acc = warpgroup_mma(weights, values, acc, is_async=True)
            acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
            mbarrier.arrive(empty.index(stage))
            count += 2

        whole = take == n_tiles
        is_first = (tile == 0).to(gl.int32)
        top = gl.convert_layout(top, o_rows)
        total = gl.convert_layout(total, o_rows)
        finish(
            acc, top, total, scale, whole, q_start, q_len, head, run, is_first, T, ends,
            H, G, D, TILE_ROWS,
        )  # fmt: skip
        if not whole:
            owner = gl.where(tile == 0, run, owner)
            merge(
                owner, run, q_start, q_len, head, T, pieces, arrivals, ends,
                H, G, D, TILE_ROWS, RB, BP,
            )  # fmt: skip
        left = gl.where(n_tiles > 0, left - take, 0)
        tile = tile * 0
        if left > 0:
            seg, q_start, q_len, _col, kv_end, n_tiles = find_segment(
                seg + 1, S, seq_info, info_s, info_c, window, G, TILE_ROWS, KEYS
            )
    workers = gl.num_programs(0) * 2
    # The last workers are the first to have nothing else to do.
    last = workers - 1 - (run * H + head)
    zero_rows(last, workers, out, live, gaps, T, o_t, o_h, H * G, D, BG)
