"""The warpgroups of the long segments' kernel that multiply."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .layouts import product_layout, row_layout
from .long_items import CONSUMER_ROWS, CONSUMERS, hear, tile_below
from .softmax import anew, clear, weigh


@gluon.jit
def _places(
    begin,
    q_start,
    q_len,
    head,
    T,
    by_token,
    by_head,
    G: gl.constexpr,
    D: gl.constexpr,
    layout: gl.constexpr,
):
    """Offsets of a consumer's rows of query or out, and which are in there."""
    row = begin + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, layout))
    token = q_start + row // G
    q_head = head * G + row % G
    at = token.to(gl.int64) * by_token + q_head.to(gl.int64) * by_head
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))
    inside = (row < q_len * G) & (token < T)
    return at[:, None] + dims[None, :], inside[:, None]


@gluon.jit
def _load_queries(
    query,
    q_tile,
    begin,
    q_start,
    q_len,
    head,
    T,
    q_t,
    q_h,
    G: gl.constexpr,
    D: gl.constexpr,
    io: gl.constexpr,
):
    at, inside = _places(begin, q_start, q_len, head, T, q_t, q_h, G, D, io)
    q_tile.store(gl.load(query + at, mask=inside, other=0.0))
    fence_async_shared()


@gluon.jit
def _floor(start, wrap, BN: gl.constexpr, WINDOWED: gl.constexpr):
    """The lowest position that the key tile at start can hold."""
    floor = 0
    if WINDOWED:
        floor = gl.where(start + BN > wrap, wrap, 0)
    return floor


@gluon.jit
def consume(
    buffers,
    queries,
    orders,
    table,
    ends,
    my_turn,
    next_turn,
    ME: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    TURNS: gl.constexpr,
    Q_PLACES: gl.constexpr,
    Q_COPIED: gl.constexpr,
    OUT_DIRECT: gl.constexpr,
):
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = buffers
    q_tiles, q_full, q_empty = queries
    _, _, _, _, _, _, window = table
    query, out, T, q_t, q_h, o_t, o_h, scale = ends
    dtype: gl.constexpr = q_tiles.dtype
    s_layout: gl.constexpr = product_layout(BN)
    o_layout: gl.constexpr = product_layout(D)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    io: gl.constexpr = row_layout(D)

    count = 0
    asked = 0
    done = 0
    tile, head, q_start, q_len, kv_end, base, wrap, n = hear(orders, done)
    while n > 0:
        begin = (tile * CONSUMERS + ME) * CONSUMER_ROWS
        q_place = done % Q_PLACES
        q_tile = q_tiles.index(q_place * CONSUMERS + ME).reshape([CONSUMER_ROWS, D])
        if Q_COPIED:
            mbarrier.wait(q_full.index(q_place), (done // Q_PLACES) & 1)
        else:
            _load_queries(query, q_tile, begin, q_start, q_len, head, T, q_t, q_h, G, D, io)

        # What each row sees, and what all rows do.
        position = kv_end - q_len + (begin + gl.arange(0, CONSUMER_ROWS, s_rows)) // G
        most = gl.full([CONSUMER_ROWS], 0, gl.int32, s_rows) + (kv_end - 1)
        least = gl.full([CONSUMER_ROWS], 0, gl.int32, s_rows)
        all_high = kv_end
        all_low = 0
        first = 0
        if CAUSAL:
            most = gl.minimum(position, most)
            all_high = gl.minimum(kv_end - q_len + begin // G + 1, kv_end)
        if WINDOWED:
            least = gl.maximum(position - window + 1, 0)
            all_low = gl.maximum(kv_end - q_len + (begin + CONSUMER_ROWS - 1) // G - window + 1, 0)
            first = gl.maximum(kv_end - q_len - window + 1, 0)

        stage = count % STAGES
        phase = (count // STAGES) & 1
        start = base - BN
        none = gl.full([CONSUMER_ROWS, BN], 0.0, gl.float32, s_layout)
        top = gl.full([CONSUMER_ROWS], float("-inf"), gl.float32, s_rows)
        total = gl.full([CONSUMER_ROWS], 0.0, gl.float32, s_rows)
        acc = gl.full([CONSUMER_ROWS, D], 0.0, gl.float32, o_layout)
        mbarrier.wait(k_full.index(stage), phase)
        keys = k_buffers.index(stage).reshape([BN, D]).permute([1, 0])
        scores = warpgroup_mma(q_tile, keys, none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage))
        floor = _floor(start, wrap, BN, WINDOWED)
        edge = (start < gl.maximum(all_low, floor)) | (base > all_high)
        weights, fade, top, total = weigh(
            scores, top, total, start, floor, least, most, edge, scale, BN
        )
        weights = gl.convert_layout(weights.to(dtype), p_layout)

        for _i in range(1, n):
            v_stage = stage
            v_phase = phase
            values = v_buffers.index(v_stage).reshape([BN, D])
            if WINDOWED:  # noqa: SIM102 known when compiled
                if (start < first) & (start + BN > 0):
                    mbarrier.wait(v_full.index(v_stage), v_phase)
                    clear(values, first - start, BN, D)
            count += 1
            stage = count % STAGES
            phase = (count // STAGES) & 1
            start = tile_below(start, wrap, BN, WINDOWED)
            mbarrier.wait(k_full.index(stage), phase)
            if TURNS:
                mbarrier.wait(my_turn, (asked & 1) ^ (1 if ME == 0 else 0))
            keys = k_buffers.index(stage).reshape([BN, D]).permute([1, 0])
            scores = warpgroup_mma(q_tile, keys, none, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc = warpgroup_mma(weights, values, acc, is_async=True)
            if TURNS:
                mbarrier.arrive(next_turn)
                asked += 1
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_empty.index(stage))
            floor = _floor(start, wrap, BN, WINDOWED)
            edge = (start < gl.maximum(all_low, floor)) | (start + BN > all_high)
            newer, fade, top, total = weigh(
                scores, top, total, start, floor, least, most, edge, scale, BN
            )
            # Long complete; a branch, above which the assembler does not move the wait for acc.
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
            mbarrier.arrive(v_empty.index(v_stage))
            acc = acc * gl.convert_layout(fade, o_rows)[:, None]
            weights = gl.convert_layout(newer.to(dtype), p_layout)

        if Q_COPIED and OUT_DIRECT:
            mbarrier.arrive(q_empty.index(q_place))
        values = v_buffers.index(stage).reshape([BN, D])
        mbarrier.wait(v_full.index(stage), phase)
        if WINDOWED:  # noqa: SIM102 known when compiled
            if (start < first) & (start + BN > 0):
                clear(values, first - start, BN, D)
        acc = warpgroup_mma(weights, values, acc, is_async=True)
        total = gl.where(total > 0, total, 1.0)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(v_empty.index(stage))
        count += 1

        result = acc / gl.convert_layout(total, o_rows)[:, None]
        if OUT_DIRECT:
            at, inside = _places(anew(begin), q_start, q_len, head, T, o_t, o_h, G, D, o_layout)
            gl.store(out + at, result.to(dtype), mask=inside)
        else:
            q_tile.store(result.to(dtype))
            at, inside = _places(anew(begin), q_start, q_len, head, T, o_t, o_h, G, D, io)
            gl.store(out + at, q_tile.load(io), mask=inside)
            if Q_COPIED:
                fence_async_shared()
                mbarrier.arrive(q_empty.index(q_place))
        done += 1
        tile, head, q_start, q_len, kv_end, base, wrap, n = hear(orders, done)
