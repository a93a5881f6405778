"""Attention of long segments on Hopper: a producer and consumers that share a multiprocessor.

A program takes items (query tile, KV head) from the schedule's table. Its last warps, the
producer, let the copy engine bring tiles of K and V into rings of shared memory; each consumer, a
warpgroup with 64 rows of the query tile in its tensor cores, multiplies. A consumer asks for the
scores of a key tile before it weighs the values of the one above, so that its softmax runs while
products do, and consumers take turns to ask, so that one's softmax runs while another's products
do. All walk the keys from the last one seen to the first.

Rows of a column beyond its last key may be no memory at all, so key tiles are laid from the last
key that the query tile sees downwards. One may begin before row 0, which the copy engine fills
with zeros; in a ring that has wrapped the next tile goes on from the ring's last row. What a tile
holds besides the keys is masked, and what a window has left behind is cleared in V, since 0 * NaN
is NaN.

Query tiles take unequal time. The producer asks for the next one while its consumers still have
key tiles to go on with, so that whoever is free first takes it and its first tiles are there when
the consumers are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .order import after_earlier_kernels, let_later_kernels_start

# Triton renamed it after 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

_CONSUMERS = gl.constexpr(2)
_ROWS = gl.constexpr(64)  # of a consumer
_NUMBERS = gl.constexpr(8)  # that say what an item is
_ORDERS = gl.constexpr(2)  # items that the producer may be ahead


@gluon.jit
def _take(progress, total):
    """The next item of this program; total or more: there is none.

    A program's first item is that of its number, the others go to whoever asks. Who asks last of
    all, the total-th, leaves the counter at 0 for the next launch.
    """
    before = gl.atomic_add(progress, 1, sem="relaxed")
    if before == total - 1:
        gl.store(progress, 0)
    return gl.num_programs(0) + before


@gluon.jit
def _describe(
    x,
    table,
    H: gl.constexpr,
    G: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    HEADS_FIRST: gl.constexpr,
):
    """Item x: query tile, head, what its segment is, where the top key tile ends, how many.

    wrap: the highest position in row 0 of the column that may be seen. HEADS_FIRST: neighbouring
    items share a head, not a query tile.
    """
    seq_info, tiles, info_s, info_c, used, rows, window = table
    if HEADS_FIRST:
        head = x // gl.maximum(used, 1)
        entry = x % gl.maximum(used, 1)
    else:
        head = x % H
        entry = x // H
    known = x < used * H
    seg = gl.load(tiles + entry * 2, mask=known, other=0)
    tile = gl.load(tiles + entry * 2 + 1, mask=known, other=0)
    info = seq_info + seg * info_s
    q_start = gl.load(info)
    q_len = gl.load(info + info_c)
    col = gl.load(info + 2 * info_c)
    kv_end = gl.load(info + 3 * info_c)
    base = kv_end
    low = 0
    if CAUSAL:
        base = gl.minimum(kv_end - q_len + (tile * BM + BM - 1) // G + 1, kv_end)
    wrap = 0
    n = 0
    if WINDOWED:
        low = gl.maximum(kv_end - q_len + tile * BM // G - window + 1, 0)
        wrap = gl.maximum(base - 1, 0) // rows * rows
        if wrap > low:
            n = (base - wrap + BN - 1) // BN
            base_below = wrap
        else:
            base_below = base
        n += (base_below - low + BN - 1) // BN
    else:
        n = (base - low + BN - 1) // BN
    # A tile whose queries see nothing takes one that is masked.
    return tile, head, q_start, q_len, col, kv_end, base, wrap, gl.maximum(n, 1)


@gluon.jit
def _below(start, wrap, BN: gl.constexpr, WINDOWED: gl.constexpr):
    """Where the key tile below the one at start begins."""
    if WINDOWED:
        start = gl.where((start < wrap) & (start + BN > wrap), wrap, start)
    return start - BN


@gluon.jit
def _put(place, number):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place.store(gl.full([1], 0, gl.int32, layout) + number)


@gluon.jit
def _get(place):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(place.load(layout), 0)


@gluon.jit
def _tell(orders, done, item, n):
    """Hand an item to the consumers; n: its key tiles, 0 to end their work."""
    numbers, told, heard = orders
    tile, head, q_start, q_len, _, kv_end, base, wrap, _ = item
    slot = done % _ORDERS
    mbarrier.wait(heard.index(slot), ((done // _ORDERS) & 1) ^ 1)
    at = slot * _NUMBERS
    _put(numbers.index(at + 0), tile)
    _put(numbers.index(at + 1), head)
    _put(numbers.index(at + 2), q_start)
    _put(numbers.index(at + 3), gl.where(n > 0, q_len, 0))
    _put(numbers.index(at + 4), kv_end)
    _put(numbers.index(at + 5), base)
    _put(numbers.index(at + 6), wrap)
    _put(numbers.index(at + 7), n)
    mbarrier.arrive(told.index(slot))


@gluon.jit
def _hear(orders, done):
    """The item that the producer handed over as its done-th."""
    numbers, told, heard = orders
    slot = done % _ORDERS
    mbarrier.wait(told.index(slot), (done // _ORDERS) & 1)
    at = slot * _NUMBERS
    tile = _get(numbers.index(at + 0))
    head = _get(numbers.index(at + 1))
    q_start = _get(numbers.index(at + 2))
    q_len = _get(numbers.index(at + 3))
    kv_end = _get(numbers.index(at + 4))
    base = _get(numbers.index(at + 5))
    wrap = _get(numbers.index(at + 6))
    n = _get(numbers.index(at + 7))
    mbarrier.arrive(heard.index(slot))
    return tile, head, q_start, q_len, kv_end, base, wrap, n


@gluon.jit
def _bring(
    desc,
    buffers,
    full,
    empty,
    count,
    start,
    col,
    head,
    wrap,
    rows,
    BN: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """Bring the key tile at position start, the count-th of all, when its place is free."""
    stage = count % STAGES
    phase = (count // STAGES) & 1
    row = start
    if WINDOWED:
        row = start - gl.where((start + BN > wrap) | (wrap == 0), wrap, wrap - rows)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), BN * D * 2)
    _copy(desc, [col, row, head, 0], full.index(stage), buffers.index(stage))


@gluon.jit
def _bring_queries(
    desc,
    queries,
    done,
    tile,
    head,
    q_start,
    G: gl.constexpr,
    D: gl.constexpr,
    Q_PLACES: gl.constexpr,
):
    """Bring the query tile of the done-th item when its place is free."""
    q_tiles, q_full, q_empty = queries
    TOKENS: gl.constexpr = _ROWS // G
    place = done % Q_PLACES
    phase = (done // Q_PLACES) & 1
    mbarrier.wait(q_empty.index(place), phase ^ 1)
    mbarrier.expect(q_full.index(place), _CONSUMERS * _ROWS * D * 2)
    for i in gl.static_range(_CONSUMERS):
        at = [q_start + (tile * _CONSUMERS + i) * TOKENS, head * G, 0]
        _copy(desc, at, q_full.index(place), q_tiles.index(place * _CONSUMERS + i))


@gluon.jit
def _produce(
    q_desc,
    k_desc,
    v_desc,
    buffers,
    queries,
    orders,
    progress,
    table,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    Q_PLACES: gl.constexpr,
    Q_COPIED: gl.constexpr,
    HEADS_FIRST: gl.constexpr,
):
    BM: gl.constexpr = _ROWS * _CONSUMERS
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = buffers
    _, _, _, _, used, rows, _ = table
    total = used * H
    count = 0
    done = 0
    x = gl.program_id(0)
    item = _describe(x, table, H, G, BM, BN, CAUSAL, WINDOWED, HEADS_FIRST)
    while x < total:
        tile, head, q_start, _, col, _, base, wrap, n = item
        _tell(orders, done, item, n)
        start = base - BN
        _bring(
            k_desc, k_buffers, k_full, k_empty, count, start, col, head, wrap, rows,
            BN, D, STAGES, WINDOWED,
        )  # fmt: skip
        if Q_COPIED:
            _bring_queries(q_desc, queries, done, tile, head, q_start, G, D, Q_PLACES)
        for _i in range(1, n):
            below = _below(start, wrap, BN, WINDOWED)
            _bring(
                k_desc, k_buffers, k_full, k_empty, count + 1, below, col, head, wrap, rows,
                BN, D, STAGES, WINDOWED,
            )  # fmt: skip
            _bring(
                v_desc, v_buffers, v_full, v_empty, count, start, col, head, wrap, rows,
                BN, D, STAGES, WINDOWED,
            )  # fmt: skip
            start = below
            count += 1
        done += 1
        x = _take(progress, total)
        item = _describe(x, table, H, G, BM, BN, CAUSAL, WINDOWED, HEADS_FIRST)
        _bring(
            v_desc, v_buffers, v_full, v_empty, count, start, col, head, wrap, rows,
            BN, D, STAGES, WINDOWED,
        )  # fmt: skip
        count += 1
    _tell(orders, done, item, 0)


@gluon.jit
def _anew(x):
    """x, of which the compiler does not know that it is: what follows from it is not kept."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


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
    row = begin + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
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
def _clear(values, first, BN: gl.constexpr, D: gl.constexpr):
    """Zero the rows of V before first. Other consumers write the same."""
    PART: gl.constexpr = 32 if D < 256 else 16
    LANES: gl.constexpr = D // 8 if D < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    row = gl.arange(0, PART, gl.SliceLayout(1, layout))
    for part in gl.static_range(BN // PART):
        n = row + part * PART
        known = n >= first
        piece = values.slice(part * PART, PART)
        piece.store(gl.where(known[:, None], piece.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _weigh(
    scores,
    top,
    total,
    start,
    floor,
    least,
    most,
    edge,
    scale,
    BN: gl.constexpr,
):
    """One step of softmax: weights, the factor for older sums, new top and total.

    scores are unscaled; top is the largest of them so far, total the sum of weights. A row sees
    keys least .. most, both included, of this tile none below floor; edge says that some row does
    not see all of the tile.
    """
    if edge:
        columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        n = (gl.arange(0, BN, columns) + _anew(0))[None, :]
        lowest = gl.maximum(least, floor) - start
        seen = (n <= (most - start)[:, None]) & (n >= lowest[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    new = gl.maximum(top, gl.max(scores, 1))
    shift = gl.where(new == float("-inf"), 0.0, new * scale)  # -inf - -inf would be NaN
    fade = gl.exp2(top * scale - shift)
    weights = gl.exp2(scores * scale - shift[:, None])
    total = total * fade + gl.sum(weights, 1)
    return weights, fade, new, total


@gluon.jit
def _consume(
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
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    LANES: gl.constexpr = D // 8 if D < 256 else 32
    io: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])

    count = 0
    asked = 0
    done = 0
    tile, head, q_start, q_len, kv_end, base, wrap, n = _hear(orders, done)
    while n > 0:
        begin = (tile * _CONSUMERS + ME) * _ROWS
        q_place = done % Q_PLACES
        q_tile = q_tiles.index(q_place * _CONSUMERS + ME).reshape([_ROWS, D])
        if Q_COPIED:
            mbarrier.wait(q_full.index(q_place), (done // Q_PLACES) & 1)
        else:
            _load_queries(query, q_tile, begin, q_start, q_len, head, T, q_t, q_h, G, D, io)

        # What each row sees, and what all rows do.
        position = kv_end - q_len + (begin + gl.arange(0, _ROWS, s_rows)) // G
        most = gl.full([_ROWS], 0, gl.int32, s_rows) + (kv_end - 1)
        least = gl.full([_ROWS], 0, gl.int32, s_rows)
        all_high = kv_end
        all_low = 0
        first = 0
        if CAUSAL:
            most = gl.minimum(position, most)
            all_high = gl.minimum(kv_end - q_len + begin // G + 1, kv_end)
        if WINDOWED:
            least = gl.maximum(position - window + 1, 0)
            all_low = gl.maximum(kv_end - q_len + (begin + _ROWS - 1) // G - window + 1, 0)
            first = gl.maximum(kv_end - q_len - window + 1, 0)

        stage = count % STAGES
        phase = (count // STAGES) & 1
        start = base - BN
        none = gl.full([_ROWS, BN], 0.0, gl.float32, s_layout)
        top = gl.full([_ROWS], float("-inf"), gl.float32, s_rows)
        total = gl.full([_ROWS], 0.0, gl.float32, s_rows)
        acc = gl.full([_ROWS, D], 0.0, gl.float32, o_layout)
        mbarrier.wait(k_full.index(stage), phase)
        keys = k_buffers.index(stage).reshape([BN, D]).permute([1, 0])
        scores = warpgroup_mma(q_tile, keys, none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage))
        floor = _floor(start, wrap, BN, WINDOWED)
        edge = (start < gl.maximum(all_low, floor)) | (base > all_high)
        weights, fade, top, total = _weigh(
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
                    _clear(values, first - start, BN, D)
            count += 1
            stage = count % STAGES
            phase = (count // STAGES) & 1
            start = _below(start, wrap, BN, WINDOWED)
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
            newer, fade, top, total = _weigh(
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
                _clear(values, first - start, BN, D)
        acc = warpgroup_mma(weights, values, acc, is_async=True)
        total = gl.where(total > 0, total, 1.0)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(v_empty.index(stage))
        count += 1

        result = acc / gl.convert_layout(total, o_rows)[:, None]
        if OUT_DIRECT:
            at, inside = _places(_anew(begin), q_start, q_len, head, T, o_t, o_h, G, D, o_layout)
            gl.store(out + at, result.to(dtype), mask=inside)
        else:
            q_tile.store(result.to(dtype))
            at, inside = _places(_anew(begin), q_start, q_len, head, T, o_t, o_h, G, D, io)
            gl.store(out + at, q_tile.load(io), mask=inside)
            if Q_COPIED:
                fence_async_shared()
                mbarrier.arrive(q_empty.index(q_place))
        done += 1
        tile, head, q_start, q_len, kv_end, base, wrap, n = _hear(orders, done)


@gluon.jit(do_not_specialize=["T", "rows", "window"])
def attend_long_hopper(
    query,
    q_desc,
    k_desc,
    v_desc,
    out,
    seq_info,
    tiles,
    progress,
    T,
    rows,
    window,
    scale,
    info_s,
    info_c,
    q_t,
    q_h,
    o_t,
    o_h,
    H: gl.constexpr,
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
    HEADS_FIRST: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Rows of a tile are (query, head of the group), so that a tile reads one KV head once.

    progress: items that programs took beyond their first, 0 at rest; query tiles in the table.
    scale is positive. Dimensions of query, out and caches lie side by side. Q_COPIED: the copy
    engine brings queries, too; G divides 64 then.
    """
    dtype: gl.constexpr = k_desc.dtype
    q_block: gl.constexpr = [64 // G, G, D] if Q_COPIED else [64, 1, D]
    places: gl.constexpr = Q_PLACES * _CONSUMERS
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(q_block, dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [places, q_block[0], q_block[1], D], q_layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, BN, 1, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, BN, 1, D], v_desc.layout)
    numbers = gl.allocate_shared_memory(
        gl.int32, [_ORDERS * _NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [Q_PLACES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_PLACES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [_ORDERS, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [_ORDERS, 1], mbarrier.MBarrierLayout())
    # One allocation each, or the compiler would order what one consumer does to two of them.
    turn_0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn_1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=_CONSUMERS)
        mbarrier.init(v_empty.index(i), count=_CONSUMERS)
    for i in gl.static_range(Q_PLACES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=_CONSUMERS)
    for i in gl.static_range(_ORDERS):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(heard.index(i), count=_CONSUMERS)
    mbarrier.init(turn_0, count=1)
    mbarrier.init(turn_1, count=1)
    fence_async_shared()
    let_later_kernels_start(OVERLAP)
    used = gl.load(progress + 1)
    buffers = (k_buffers, v_buffers, k_full, k_empty, v_full, v_empty)
    queries = (q_tiles, q_full, q_empty)
    orders = (numbers, told, heard)
    table = (seq_info, tiles, info_s, info_c, used, rows, window)
    ends = (query, out, T, q_t, q_h, o_t, o_h, scale)
    # Constants are spelled out in the calls: kept in a variable they would be no constants.
    gl.warp_specialize(
        [
            (_consume, (buffers, queries, orders, table, ends, turn_0, turn_1,
                        0, G, D, BN, STAGES, CAUSAL, WINDOWED, TURNS,
                        Q_PLACES, Q_COPIED, OUT_DIRECT)),
            (_consume, (buffers, queries, orders, table, ends, turn_1, turn_0,
                        1, G, D, BN, STAGES, CAUSAL, WINDOWED, TURNS,
                        Q_PLACES, Q_COPIED, OUT_DIRECT)),
            (_produce, (q_desc, k_desc, v_desc, buffers, queries, orders, progress, table,
                        H, G, D, BN, STAGES, CAUSAL, WINDOWED, Q_PLACES, Q_COPIED, HEADS_FIRST)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
    after_earlier_kernels(OVERLAP)
