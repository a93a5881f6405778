"""The warp of the long segments' kernel that lets the copy engine bring queries, K and V."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .long_items import CONSUMER_ROWS, CONSUMERS, describe_item, take_item, tell, tile_below
from .ring import bring, copy


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
    row = start
    if WINDOWED:
        row = start - gl.where((start + BN > wrap) | (wrap == 0), wrap, wrap - rows)
    bring(desc, [col, row, head, 0], buffers, full, empty, count, BN * D, STAGES)


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
    TOKENS: gl.constexpr = CONSUMER_ROWS // G
    place = done % Q_PLACES
    phase = (done // Q_PLACES) & 1
    mbarrier.wait(q_empty.index(place), phase ^ 1)
    mbarrier.expect(q_full.index(place), CONSUMERS * CONSUMER_ROWS * D * 2)
    for i in gl.static_range(CONSUMERS):
        at = [q_start + (tile * CONSUMERS + i) * TOKENS, head * G, 0]
        copy(desc, at, q_full.index(place), q_tiles.index(place * CONSUMERS + i))


@gluon.jit
def produce(
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
    BM: gl.constexpr = CONSUMER_ROWS * CONSUMERS
    k_buffers, v_buffers, k_full, k_empty, v_full, v_empty = buffers
    _, _, _, _, used, rows, _ = table
    total = used * H
    count = 0
    done = 0
    x = gl.program_id(0)
    item = describe_item(x, table, H, G, BM, BN, CAUSAL, WINDOWED, HEADS_FIRST)
    while x < total:
        tile, head, q_start, _, col, _, base, wrap, n = item
        tell(orders, done, item, n)
        start = base - BN
        _bring(
            k_desc, k_buffers, k_full, k_empty, count, start, col, head, wrap, rows,
            BN, D, STAGES, WINDOWED,
        )  # fmt: skip
        if Q_COPIED:
            _bring_queries(q_desc, queries, done, tile, head, q_start, G, D, Q_PLACES)
        for _i in range(1, n):
            below = tile_below(start, wrap, BN, WINDOWED)
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
        x = take_item(progress, total)
        item = describe_item(x, table, H, G, BM, BN, CAUSAL, WINDOWED, HEADS_FIRST)
        _bring(
            v_desc, v_buffers, v_full, v_empty, count, start, col, head, wrap, rows,
            BN, D, STAGES, WINDOWED,
        )  # fmt: skip
        count += 1
    tell(orders, done, item, 0)
