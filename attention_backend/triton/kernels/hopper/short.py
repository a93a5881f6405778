"""Attention of short segments on Hopper: producers stream K and V, consumers keep up.

A worker (run, KV head) walks the run's segments, as in ``kernels/decode.py``: a warp, the producer,
lets the copy engine bring boxes of BN keys into a ring in shared memory, K and V in turn, far ahead
of the use; a warpgroup, the consumer, multiplies tiles of 64 rows by them. A program is two
workers, with nothing in common but a multiprocessor, so that one's softmax runs while the other's
products do.

Rows of a column beyond its last key may be no memory at all, so the last box of a section of keys
ends where the section does, on top of the one before or, below row 0, on rows that the copy engine
fills with zeros. Keys of a ring that has wrapped are two sections, one up to the ring's last row
and one from its row 0. What a box then holds besides new keys is masked, and with a window cleared
in V, since 0 * NaN is NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .boxes import produce
from .short_consumer import TILE_ROWS, consume


@gluon.jit(do_not_specialize=["S", "T", "rows", "window", "early"])
def attend_short_hopper(
    query,
    k_desc,
    v_desc,
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
    early,
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
    KEYS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    RB: gl.constexpr,
    BP: gl.constexpr,
    BG: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """``attend_short`` for segments of at most 64 rows a KV head.

    early: 0 if the schedule may be what the kernel in front writes, see ``kernels/order.py``. There
    are as many workers as runs times heads.

    Descriptors are of [columns, H, rows, D]. KEYS: of a tile of the schedule, BN: of a box. scale
    is positive. Dimensions of query and out lie side by side.
    """
    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_ROWS, D], dtype)
    # One allocation each, or the compiler would order what one worker does to two of them.
    q_0 = gl.allocate_shared_memory(dtype, [TILE_ROWS, D], q_layout)
    q_1 = gl.allocate_shared_memory(dtype, [TILE_ROWS, D], q_layout)
    boxes_0 = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], k_desc.layout)
    boxes_1 = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], k_desc.layout)
    full_0 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_1 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_0 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_1 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_0.index(i), count=1)
        mbarrier.init(full_1.index(i), count=1)
        mbarrier.init(empty_0.index(i), count=1)
        mbarrier.init(empty_1.index(i), count=1)
    fence_async_shared()
    worker = gl.program_id(0) * 2
    where_0 = (worker // H, worker % H)
    where_1 = ((worker + 1) // H, (worker + 1) % H)
    ring_0 = (boxes_0, full_0, empty_0)
    ring_1 = (boxes_1, full_1, empty_1)
    table = (seq_info, pieces, info_s, info_c, S, T, rows, window)
    ends = (query, out, part_acc, part_sums, q_t, q_h, o_t, o_h)
    counts = (live, gaps, arrivals)
    gl.warp_specialize(
        [
            (consume, (q_0, ring_0, table, ends, counts, where_0, scale, early,
                        H, G, D, BN, STAGES, KEYS, CAUSAL, WINDOWED, RB, BP, BG, OVERLAP)),
            (consume, (q_1, ring_1, table, ends, counts, where_1, scale, early,
                        H, G, D, BN, STAGES, KEYS, CAUSAL, WINDOWED, RB, BP, BG, OVERLAP)),
            (produce, (k_desc, v_desc, ring_0, table, where_0, early,
                        G, D, BN, STAGES, TILE_ROWS, KEYS, WINDOWED, OVERLAP)),
            (produce, (k_desc, v_desc, ring_1, table, where_1, early,
                        G, D, BN, STAGES, TILE_ROWS, KEYS, WINDOWED, OVERLAP)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
