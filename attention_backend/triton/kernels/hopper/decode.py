"""Attention of decodes on Hopper: a producer that streams K and V, consumers that keep up.

Program (run, block of HB KV heads) walks the run's segments, as in ``kernels/decode.py``. Its last
warp, the producer, lets the copy engine bring boxes of BN keys of all HB heads into a ring in
shared memory, K and V in turn, far ahead of the use. Each of the HB others takes one head, through
products of its own: while keys stream, warps exchange nothing but the news that a box is full or
free.

Rows of a column beyond its last key may be no memory at all, so the last box of a section of keys
ends where the section does, on top of the one before or, below row 0, on rows that the copy engine
fills with zeros. Keys of a ring that has wrapped are two sections, one up to the ring's last row
and one from its row 0. What a box then holds besides new keys is masked, and cleared in V, since
0 * NaN is NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .boxes import produce
from .decode_consumer import consume


@gluon.jit(do_not_specialize=["S", "T", "rows", "window", "early"])
def attend_decodes_hopper(
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
    HB: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    RB: gl.constexpr,
    BP: gl.constexpr,
    BG: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """``attend_short`` for segments of at most 16 rows a KV head; there may be no others.

    The layer's only attention kernel: what earlier kernels have written is awaited by all warps.

    Descriptors are of [columns, H, rows, D]. KEYS: of a tile of the schedule, BN: of a box,
    ROWS: of a part. scale is positive. Dimensions of query and out lie side by side.
    """
    gl.static_assert(H % HB == 0)
    dtype: gl.constexpr = k_desc.dtype
    boxes = gl.allocate_shared_memory(dtype, [STAGES, 1, HB, BN, D], k_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    ring = (boxes, full, empty)
    table = (seq_info, pieces, info_s, info_c, S, T, rows, window)
    ends = (query, out, part_acc, part_sums, q_t, q_h, o_t, o_h)
    counts = (live, gaps, arrivals)
    where = (gl.program_id(0) // (H // HB), gl.program_id(0) % (H // HB) * HB)
    gl.warp_specialize(
        [
            (consume, (ring, table, ends, counts, where, scale, early,
                        H, G, D, HB, BN, STAGES, ROWS, KEYS, CAUSAL, WINDOWED,
                        RB, BP, BG, OVERLAP)),
            (produce, (k_desc, v_desc, ring, table, where, early,
                        G, D, HB, BN, STAGES, ROWS, KEYS, WINDOWED, OVERLAP)),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip
