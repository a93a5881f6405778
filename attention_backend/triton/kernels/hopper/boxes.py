"""The boxes of K and V of short segments, and the warp that has them brought."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..order import after_earlier_kernels
from ..segments import PIECE, first_key, short_tiles
from .ring import bring


@gluon.jit
def _segment(
    seq_info, info_s, info_c, seg, window, G: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr
):
    info = seq_info + seg * info_s
    q_start = gl.load(info)
    q_len = gl.load(info + info_c)
    col = gl.load(info + 2 * info_c)
    kv_end = gl.load(info + 3 * info_c)
    return q_start, q_len, col, kv_end, short_tiles(q_len, kv_end, window, G, ROWS, KEYS)


@gluon.jit
def _keep(at):
    """A number that every layer of the step reads: weights between them do not drive it out."""
    return gl.load(at, eviction_policy="evict_last")


@gluon.jit
def load_piece(pieces, run):
    """A run: segment, tile, tiles, owner; q_start, q_len, column and kv_end of the segment."""
    at = pieces + run * PIECE
    return (
        _keep(at), _keep(at + 1), _keep(at + 2), _keep(at + 4),
        _keep(at + 5), _keep(at + 6), _keep(at + 7), _keep(at + 8),
    )  # fmt: skip


@gluon.jit
def find_segment(
    seg, S, seq_info, info_s, info_c, window,
    G: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """The first segment from seg on that has tiles, with what it is."""
    q_start, q_len, col, kv_end, n_tiles = _segment(
        seq_info, info_s, info_c, seg, window, G, ROWS, KEYS
    )
    while (n_tiles == 0) & (seg + 1 < S):
        seg += 1
        q_start, q_len, col, kv_end, n_tiles = _segment(
            seq_info, info_s, info_c, seg, window, G, ROWS, KEYS
        )
    return seg, q_start, q_len, col, kv_end, n_tiles


@gluon.jit
def sections_of(
    tile, take, q_len, kv_end, rows, window,
    KEYS: gl.constexpr, BN: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Keys begin .. turn and turn .. end of the tiles, and boxes of each; turn: key of row 0."""
    first = first_key(q_len, kv_end, window)
    begin = first + tile * KEYS
    end = gl.minimum(begin + take * KEYS, kv_end)
    turn = begin
    zero = 0
    if WINDOWED:
        zero = (end - 1) // rows * rows
        turn = gl.maximum(zero, begin)
    n_old = (turn - begin + BN - 1) // BN
    n = n_old + (end - turn + BN - 1) // BN
    return begin, turn, end, zero, n_old, n


@gluon.jit
def box_at(i, begin, turn, end, zero, n_old, rows, BN: gl.constexpr, WINDOWED: gl.constexpr):
    """The first key of box i, the first that is new in it, and the row of the first."""
    low = begin + i * BN
    start = gl.minimum(low, end - BN)
    row = start
    if WINDOWED:
        old = i < n_old
        low = gl.where(old, low, turn + (i - n_old) * BN)
        start = gl.minimum(low, gl.where(old, turn, end) - BN)
        row = start - gl.where(old, zero - rows, zero)
    return start, low, row


@gluon.jit
def produce(
    k_desc,
    v_desc,
    ring,
    table,
    where,
    early,
    G: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WINDOWED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Bring the boxes of a run.

    early: what earlier kernels have written is in place, apart from keys and values of this step's
    tokens.
    """
    if early == 0:
        after_earlier_kernels(OVERLAP)
    boxes, full, empty = ring
    seq_info, pieces, info_s, info_c, S, _, rows, window = table
    run, head = where
    seg, tile, left, _owner, _q_start, q_len, col, kv_end = load_piece(pieces, run)
    n_tiles = short_tiles(q_len, kv_end, window, G, ROWS, KEYS)
    count = 0
    while left > 0:
        take = gl.minimum(n_tiles - tile, left)
        begin, turn, end, zero, n_old, n = sections_of(
            tile, take, q_len, kv_end, rows, window, KEYS, BN, WINDOWED
        )
        for i in range(n):
            start, _low, row = box_at(i, begin, turn, end, zero, n_old, rows, BN, WINDOWED)
            if start + BN > kv_end - q_len:
                after_earlier_kernels(OVERLAP)
            at = [col, head, row, 0]
            bring(k_desc, at, boxes, full, empty, count, BN * D, STAGES)
            bring(v_desc, at, boxes, full, empty, count + 1, BN * D, STAGES)
            count += 2
        left = gl.where(n_tiles > 0, left - take, 0)
        tile = tile * 0
        if left > 0:
            seg, _q_start, q_len, col, kv_end, n_tiles = find_segment(
                seg + 1, S, seq_info, info_s, info_c, window, G, ROWS, KEYS
            )
