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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..order import after_earlier_kernels, let_later_kernels_start
from .long_consumer import consume
from .long_items import CONSUMERS, NUMBERS, ORDERS
from .long_producer import produce


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
    places: gl.constexpr = Q_PLACES * CONSUMERS
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(q_block, dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [places, q_block[0], q_block[1], D], q_layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, BN, 1, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, BN, 1, D], v_desc.layout)
    numbers = gl.allocate_shared_memory(
        gl.int32, [ORDERS * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [ORDERS, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [ORDERS, 1], mbarrier.MBarrierLayout())
    # No barrier is made that nobody uses. The compiler would give its place to numbers, but for the
    # device it would be a barrier still, and come back there when processes take turns.
    q_full = k_full
    q_empty = k_empty
    turn_0 = k_full
    turn_1 = k_empty
    if Q_COPIED:
        q_full = gl.allocate_shared_memory(gl.int64, [Q_PLACES, 1], mbarrier.MBarrierLayout())
        q_empty = gl.allocate_shared_memory(gl.int64, [Q_PLACES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(Q_PLACES):
            mbarrier.init(q_full.index(i), count=1)
            mbarrier.init(q_empty.index(i), count=CONSUMERS)
    if TURNS:
        # One allocation each, or the compiler would order what one consumer does to two of them.
        turn_0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        turn_1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(turn_0, count=1)
        mbarrier.init(turn_1, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(ORDERS):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(heard.index(i), count=CONSUMERS)
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
            (consume, (buffers, queries, orders, table, ends, turn_0, turn_1,
                        0, G, D, BN, STAGES, CAUSAL, WINDOWED, TURNS,
                        Q_PLACES, Q_COPIED, OUT_DIRECT)),
            (consume, (buffers, queries, orders, table, ends, turn_1, turn_0,
                        1, G, D, BN, STAGES, CAUSAL, WINDOWED, TURNS,
                        Q_PLACES, Q_COPIED, OUT_DIRECT)),
            (produce, (q_desc, k_desc, v_desc, buffers, queries, orders, progress, table,
                        H, G, D, BN, STAGES, CAUSAL, WINDOWED, Q_PLACES, Q_COPIED, HEADS_FIRST)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
    after_earlier_kernels(OVERLAP)
