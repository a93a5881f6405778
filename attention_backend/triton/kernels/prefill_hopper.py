"""Attention of long segments on Hopper: a producer and consumers that share a multiprocessor.

A program takes items (query tile, KV head) from the schedule's table. Its last warps, the
producer, let the copy engine bring tiles of K and V into rings of shared memory; each consumer, a
warpgroup with 64 rows of the query tile in its tensor cores, multiplies. A consumer asks for the
scores of a key tile before it weighs the values of the one above, so that its softmax runs while
products do, and consumers take turns to ask, so that one's softmax runs while another's products
do. All walk the keys from the last one seen to the first.

Rows of a column beyond its last key may be no memory at all, so key tiles are laid from the last
key that the query tile sees downwards: the lowest one may begin before row 0, which the copy
engine fills with zeros. A ring that has wrapped has all of its rows; there tiles are laid on
multiples of their size, which must divide the ring. What a tile then holds besides the keys is
masked, and cleared in V, since 0 * NaN is NaN.
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

# Triton renamed it after 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

_ROWS = gl.constexpr(64)  # of a consumer


@gluon.jit
def _item(x, tiles, items, H: gl.constexpr):
    """Segment, -1 for none, and query tile of item x."""
    entry = tiles + x // H * 2
    seg = gl.load(entry, mask=x < items, other=-1)
    tile = gl.load(entry + 1, mask=x < items, other=0)
    return seg, tile


@gluon.jit
def _nth(n):
    """The n-th item of this program: there and back again, so that long items find short ones."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    return n * programs + gl.where(n % 2 == 0, place, programs - 1 - place)


@gluon.jit
def _span(
    seg,
    tile,
    seq_info,
    info_s,
    info_c,
    rows,
    window,
    G: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """The segment, where the top key tile ends and how many there are."""
    info = seq_info + seg * info_s
    q_start = gl.load(info)
    q_len = gl.load(info + info_c)
    col = gl.load(info + 2 * info_c)
    kv_end = gl.load(info + 3 * info_c)
    base = kv_end
    low = 0
    if CAUSAL:
        base = gl.minimum(kv_end - q_len + (tile * BM + BM - 1) // G + 1, kv_end)
    if WINDOWED:
        low = gl.maximum(kv_end - q_len + tile * BM // G - window + 1, 0)
        base = gl.where(kv_end > rows, (base + BN - 1) // BN * BN, base)
    # A tile whose queries see nothing takes one that is masked.
    n = gl.maximum((base - low + BN - 1) // BN, 1)
    return q_start, q_len, col, kv_end, base, n


@gluon.jit
def _bring(
    desc,
    buffers,
    full,
    empty,
    count,
    i,
    base,
    col,
    head,
    rows,
    BN: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """Bring key tile i of the item, the count-th of all, when its place is free."""
    stage = count % STAGES
    phase = (count // STAGES) & 1
    start = base - (i + 1) * BN
    if WINDOWED:
        start = gl.where(start >= rows, start % rows, start)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), BN * D * 2)
    _copy(desc, [col, start, head, 0], full.index(stage), buffers.index(stage))


@gluon.jit
def _produce(
    k_desc,
    v_desc,
    buffers,
    table,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = buffers
    seq_info, tiles, info_s, info_c, _, rows, window, items = table
    count = 0
    done = 0
    x = _nth(done)
    seg, tile = _item(x, tiles, items, H)
    while seg >= 0:
        head = x % H
        _, _, col, _, base, n = _span(
            seg, tile, seq_info, info_s, info_c, rows, window, G, BM, BN, CAUSAL, WINDOWED
        )
        _bring(
            k_desc, k_buffers, k_full, k_empty, count, 0, base, col, head, rows,
            BN, D, STAGES, WINDOWED,
        )  # fmt: skip
        for i in range(n):
            if i + 1 < n:
                _bring(
                    k_desc, k_buffers, k_full, k_empty, count + 1, i + 1, base, col, head, rows,
                    BN, D, STAGES, WINDOWED,
                )  # fmt: skip
            _bring(
                v_desc, v_buffers, v_full, v_empty, count, i, base, col, head, rows,
                BN, D, STAGES, WINDOWED,
            )  # fmt: skip
            count += 1
        done += 1
        x = _nth(done)
        seg, tile = _item(x, tiles, items, H)


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
def _clear(values, first, last, BN: gl.constexpr, D: gl.constexpr):
    """Zero the rows of V outside first .. last. Other consumers write the same."""
    PART: gl.constexpr = 32 if D < 256 else 16
    LANES: gl.constexpr = D // 8 if D < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    row = gl.arange(0, PART, gl.SliceLayout(1, layout))
    for part in gl.static_range(BN // PART):
        n = row + part * PART
        known = (n >= first) & (n < last)
        piece = values.slice(part * PART, PART)
        piece.store(gl.where(known[:, None], piece.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _weigh(
    scores,
    top,
    total,
    start,
    least,
    most,
    edge,
    scale,
    BN: gl.constexpr,
):
    """One step of softmax: weights, the factor for older sums, new top and total.

    scores are unscaled; top is the largest of them so far, total the sum of weights. A row sees
    keys least .. most, both included; edge says that some row does not see all of the tile.
    """
    if edge:
        columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        n = gl.arange(0, BN, columns)[None, :]
        seen = (n <= (most - start)[:, None]) & (n >= (least - start)[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    new = gl.maximum(top, gl.max(scores, 1))
    shift = gl.where(new == float("-inf"), 0.0, new * scale)  # -inf - -inf would be NaN
    fade = gl.exp2(top * scale - shift)
    weights = gl.exp2(scores * scale - shift[:, None])
    total = total * fade + gl.sum(weights, 1)
    return weights, fade, new, total


@gluon.jit
def _consume(
    q_tile,
    buffers,
    table,
    ends,
    my_turn,
    next_turn,
    ME: gl.constexpr,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    TURNS: gl.constexpr,
):
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = buffers
    seq_info, tiles, info_s, info_c, T, rows, window, items = table
    query, out, q_t, q_h, o_t, o_h, scale = ends
    dtype: gl.constexpr = q_tile.dtype
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
    x = _nth(done)
    seg, tile = _item(x, tiles, items, H)
    while seg >= 0:
        head = x % H
        q_start, q_len, _, kv_end, base, n = _span(
            seg, tile, seq_info, info_s, info_c, rows, window, G, BM, BN, CAUSAL, WINDOWED
        )
        begin = tile * BM + ME * _ROWS

        at, inside = _places(begin, q_start, q_len, head, T, q_t, q_h, G, D, io)
        q_tile.store(gl.load(query + at, mask=inside, other=0.0))
        fence_async_shared()

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
        edge = (start < all_low) | (base > all_high)
        weights, fade, top, total = _weigh(scores, top, total, start, least, most, edge, scale, BN)
        weights = gl.convert_layout(weights.to(dtype), p_layout)

        for _i in range(1, n):
            v_stage = stage
            v_phase = phase
            values = v_buffers.index(v_stage).reshape([BN, D])
            if WINDOWED:  # noqa: SIM102 known when compiled
                if ((start < first) & (start + BN > 0)) | (start + BN > kv_end):
                    mbarrier.wait(v_full.index(v_stage), v_phase)
                    _clear(values, first - start, kv_end - start, BN, D)
            count += 1
            stage = count % STAGES
            phase = (count // STAGES) & 1
            start -= BN
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
            edge = (start < all_low) | (start + BN > all_high)
            newer, fade, top, total = _weigh(
                scores, top, total, start, least, most, edge, scale, BN
            )
            # Long complete; a branch, above which the assembler does not move the wait for acc.
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
            mbarrier.arrive(v_empty.index(v_stage))
            acc = acc * gl.convert_layout(fade, o_rows)[:, None]
            weights = gl.convert_layout(newer.to(dtype), p_layout)

        values = v_buffers.index(stage).reshape([BN, D])
        mbarrier.wait(v_full.index(stage), phase)
        if WINDOWED:  # noqa: SIM102 known when compiled
            if ((start < first) & (start + BN > 0)) | (start + BN > kv_end):
                _clear(values, first - start, kv_end - start, BN, D)
        acc = warpgroup_mma(weights, values, acc, is_async=True)
        total = gl.where(total > 0, total, 1.0)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(v_empty.index(stage))
        count += 1

        result = acc / gl.convert_layout(total, o_rows)[:, None]
        q_tile.store(result.to(dtype))
        at, inside = _places(_anew(begin), q_start, q_len, head, T, o_t, o_h, G, D, io)
        gl.store(out + at, q_tile.load(io), mask=inside)
        done += 1
        x = _nth(done)
        seg, tile = _item(x, tiles, items, H)


@gluon.jit(do_not_specialize=["T", "rows", "window", "items"])
def attend_long_hopper(
    query,
    k_desc,
    v_desc,
    out,
    seq_info,
    tiles,
    T,
    rows,
    window,
    scale,
    items,
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
    CONSUMERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Rows of a tile are (query, head of the group), so that a tile reads one KV head once.

    items: tiles times KV heads. scale is positive. Dimensions of query, out and caches lie side
    by side. BN divides rows where a ring has wrapped.
    """
    dtype: gl.constexpr = k_desc.dtype
    BM: gl.constexpr = 64 * CONSUMERS
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, D], q_layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, BN, 1, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, BN, 1, D], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # One allocation each, or the compiler would order what one consumer does to two of them.
    turn_0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn_1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn_2 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    mbarrier.init(turn_0, count=1)
    mbarrier.init(turn_1, count=1)
    mbarrier.init(turn_2, count=1)
    fence_async_shared()
    buffers = (k_buffers, v_buffers, k_full, k_empty, v_full, v_empty)
    table = (seq_info, tiles, info_s, info_c, T, rows, window, items)
    ends = (query, out, q_t, q_h, o_t, o_h, scale)
    # Constants are spelled out in the calls: kept in a variable they would be no constants.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (q_tiles.index(0), buffers, table, ends, turn_0, turn_1,
                            0, H, G, D, BM, BN, STAGES, CAUSAL, WINDOWED, TURNS)),
                (_consume, (q_tiles.index(1), buffers, table, ends, turn_1, turn_0,
                            1, H, G, D, BM, BN, STAGES, CAUSAL, WINDOWED, TURNS)),
                (_produce, (k_desc, v_desc, buffers, table,
                            H, G, D, BM, BN, STAGES, CAUSAL, WINDOWED)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_consume, (q_tiles.index(0), buffers, table, ends, turn_0, turn_1,
                            0, H, G, D, BM, BN, STAGES, CAUSAL, WINDOWED, TURNS)),
                (_consume, (q_tiles.index(1), buffers, table, ends, turn_1, turn_2,
                            1, H, G, D, BM, BN, STAGES, CAUSAL, WINDOWED, TURNS)),
                (_consume, (q_tiles.index(2), buffers, table, ends, turn_2, turn_0,
                            2, H, G, D, BM, BN, STAGES, CAUSAL, WINDOWED, TURNS)),
                (_produce, (k_desc, v_desc, buffers, table,
                            H, G, D, BM, BN, STAGES, CAUSAL, WINDOWED)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
