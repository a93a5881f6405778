"""Items of the long segments' kernel, and how the producer hands them to the consumers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

CONSUMERS = gl.constexpr(2)
CONSUMER_ROWS = gl.constexpr(64)  # of a consumer
NUMBERS = gl.constexpr(8)  # that say what an item is
ORDERS = gl.constexpr(2)  # items that the producer may be ahead


@gluon.jit
def take_item(progress, total):
    """The next item of this program; total or more: there is none.

    A program's first item is that of its number, the others go to whoever asks. Who asks last of
    all, the total-th, leaves the counter at 0 for the next launch.
    """
    before = gl.atomic_add(progress, 1, sem="relaxed")
    if before == total - 1:
        gl.store(progress, 0)
    return gl.num_programs(0) + before


@gluon.jit
def describe_item(
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
def tile_below(start, wrap, BN: gl.constexpr, WINDOWED: gl.constexpr):
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
def tell(orders, done, item, n):
    """Hand an item to the consumers; n: its key tiles, 0 to end their work."""
    numbers, told, heard = orders
    tile, head, q_start, q_len, _, kv_end, base, wrap, _ = item
    slot = done % ORDERS
    mbarrier.wait(heard.index(slot), ((done // ORDERS) & 1) ^ 1)
    at = slot * NUMBERS
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
def hear(orders, done):
    """The item that the producer handed over as its done-th."""
    numbers, told, heard = orders
    slot = done % ORDERS
    mbarrier.wait(told.index(slot), (done // ORDERS) & 1)
    at = slot * NUMBERS
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
