"""The step's schedule, made on the device once for all layers; see the folder's README."""

import triton
import triton.language as tl

from .order import after_earlier_kernels, let_later_kernels_start
from .segments import long_tiles, short_tiles


@triton.jit
def _lengths(seq_info, info_s, info_c, seg, mask):
    q_len = tl.load(seq_info + seg * info_s + info_c, mask=mask, other=0)
    kv_end = tl.load(seq_info + seg * info_s + 3 * info_c, mask=mask, other=0)
    return q_len, kv_end


@triton.jit
def _cut(
    pid,
    seq_info,
    info_s,
    info_c,
    pieces,
    S,
    short_programs,
    window,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
):
    """Give each of short_programs an equal run of the short segments' (segment, head, tile).

    Less than 2 ** 31 tiles; products with a program's number may be more.
    """
    total = tl.full([], 0, tl.int32)
    for at in range(0, S, BS):
        seg = at + tl.arange(0, BS)
        q_len, kv_end = _lengths(seq_info, info_s, info_c, seg, seg < S)
        n = short_tiles(q_len, kv_end, window, G, BM, BN) * H
        total += tl.sum(n, 0)
    programs = tl.minimum((total + MIN_TILES - 1) // MIN_TILES, short_programs)
    divisor = tl.maximum(programs, 1)

    p = pid * BE + tl.arange(0, BE)
    works = p < programs
    begin = (p.to(tl.int64) * total // divisor).to(tl.int32)
    end = ((p + 1).to(tl.int64) * total // divisor).to(tl.int32)
    last = end - 1
    # The segment of tile x is the first whose running sum exceeds x: count those that do not.
    seg_begin = tl.zeros([BE], tl.int32)
    seg_last = tl.zeros([BE], tl.int32)
    base_begin = tl.zeros([BE], tl.int32)
    base_last = tl.zeros([BE], tl.int32)
    carry = tl.full([], 0, tl.int32)
    for at in range(0, S, BS):
        seg = at + tl.arange(0, BS)
        q_len, kv_end = _lengths(seq_info, info_s, info_c, seg, seg < S)
        n = short_tiles(q_len, kv_end, window, G, BM, BN) * H
        ends = (carry + tl.cumsum(n, 0))[None, :]
        before = ends <= begin[:, None]
        seg_begin += tl.sum(before.to(tl.int32), 1)
        base_begin = tl.maximum(base_begin, tl.max(tl.where(before, ends, 0), 1))
        before = ends <= last[:, None]
        seg_last += tl.sum(before.to(tl.int32), 1)
        base_last = tl.maximum(base_last, tl.max(tl.where(before, ends, 0), 1))
        carry += tl.sum(n, 0)

    q_len, kv_end = _lengths(seq_info, info_s, info_c, seg_begin, works)
    n = tl.maximum(short_tiles(q_len, kv_end, window, G, BM, BN), 1)
    rest = begin - base_begin
    head, tile = rest // n, rest % n
    # The program of tile x is the last that begins at or before it.
    head_begin = (begin - tile).to(tl.int64)
    owner_begin = (((head_begin + 1) * programs - 1) // tl.maximum(total, 1)).to(tl.int32)
    # A head cut by this program's end, and begun by it, comes in so many parts.
    q_len, kv_end = _lengths(seq_info, info_s, info_c, seg_last, works)
    n = tl.maximum(short_tiles(q_len, kv_end, window, G, BM, BN), 1)
    head_last = (last - base_last) // n
    head_begin = base_last + head_last * n
    head_end = head_begin + n
    owner = (head_end.to(tl.int64) * programs - 1) // tl.maximum(total, 1)
    parts = owner.to(tl.int32) - p + 1
    parts = tl.where((head_end > end) & (head_begin >= begin) & works, parts, 0)

    entry = pieces + p * 8
    known = p < P
    tl.store(entry, seg_begin, mask=known)
    tl.store(entry + 1, head, mask=known)
    tl.store(entry + 2, tile, mask=known)
    tl.store(entry + 3, tl.where(works, end - begin, 0), mask=known)
    tl.store(entry + 4, parts, mask=known)
    tl.store(entry + 5, owner_begin, mask=known)


@triton.jit
def _list_tiles(
    pid,
    seq_info,
    info_s,
    info_c,
    tiles,
    progress,
    S,
    max_tiles,
    G: tl.constexpr,
    BM_SHORT: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
):
    """List the query tiles of the long segments, of each the last (with most keys) first."""
    x = pid * BE + tl.arange(0, BE)
    seg_of = tl.zeros([BE], tl.int32)
    base = tl.zeros([BE], tl.int32)
    carry = tl.full([], 0, tl.int32)
    for at in range(0, S, BS):
        seg = at + tl.arange(0, BS)
        q_len, kv_end = _lengths(seq_info, info_s, info_c, seg, seg < S)
        n = long_tiles(q_len, kv_end, G, BM_SHORT, BM)
        ends = (carry + tl.cumsum(n, 0))[None, :]
        before = ends <= x[:, None]
        seg_of += tl.sum(before.to(tl.int32), 1)
        base = tl.maximum(base, tl.max(tl.where(before, ends, 0), 1))
        carry += tl.sum(n, 0)
    if pid == 0:
        tl.store(progress + 1, carry)
    used = x < carry
    q_len, kv_end = _lengths(seq_info, info_s, info_c, seg_of, used)
    n = long_tiles(q_len, kv_end, G, BM_SHORT, BM)
    tl.store(tiles + x * 2, tl.where(used, seg_of, -1), mask=x < max_tiles)
    tl.store(tiles + x * 2 + 1, n - 1 - (x - base), mask=x < max_tiles)


@triton.jit
def _mark_live(pid, seq_info, info_s, info_c, live, gaps, S, T, BE: tl.constexpr, BS: tl.constexpr):
    """Flag the query rows that a segment with keys covers, count the others of a block."""
    t = pid * BE + tl.arange(0, BE)
    found = tl.zeros([BE], tl.int32)
    for at in range(0, S, BS):
        seg = at + tl.arange(0, BS)
        start = tl.load(seq_info + seg * info_s, mask=seg < S, other=0)
        q_len, kv_end = _lengths(seq_info, info_s, info_c, seg, seg < S)
        stop = tl.where(kv_end > 0, start + q_len, 0)
        inside = (t[:, None] >= start[None, :]) & (t[:, None] < stop[None, :])
        found = tl.maximum(found, tl.max(inside.to(tl.int32), 1))
    tl.store(live + t, found, mask=t < T)
    tl.store(gaps + pid, tl.sum(tl.where(t < T, 1 - found, 0), 0))


@triton.jit(do_not_specialize=["S", "T", "max_tiles", "short_programs", "window"])
def make_schedule(
    seq_info,
    info_s,
    info_c,
    pieces,
    tiles,
    progress,
    live,
    gaps,
    S,
    T,
    max_tiles,
    short_programs,
    window,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BM_SHORT: tl.constexpr,
    BN_SHORT: tl.constexpr,
    BM_LONG: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Fill pieces [P, 8], tiles [max_tiles, 2], live [T] and gaps [T / BE], BE entries a program.

    The second number of progress becomes that of the tiles.

    pieces: segment, head and tile that a program begins with, its number of tiles; the number of
    parts of the head that it ends within and began, 0 for none; the program that began the head
    that it begins within. tiles: segment (-1 for none) and query tile. window: 1 << 30 for none.
    """
    after_earlier_kernels(OVERLAP)
    let_later_kernels_start(OVERLAP)
    pid = tl.program_id(0)
    cut_programs: tl.constexpr = (P + BE - 1) // BE
    tile_programs = (max_tiles + BE - 1) // BE
    if pid < cut_programs:
        _cut(
            pid, seq_info, info_s, info_c, pieces, S, short_programs, window,
            H, G, P, MIN_TILES, BM_SHORT, BN_SHORT, BE, BS,
        )  # fmt: skip
    elif pid < cut_programs + tile_programs:
        _list_tiles(
            pid - cut_programs, seq_info, info_s, info_c, tiles, progress, S, max_tiles,
            G, BM_SHORT, BM_LONG, BE, BS,
        )  # fmt: skip
    else:
        _mark_live(
            pid - cut_programs - tile_programs, seq_info, info_s, info_c, live, gaps, S, T, BE, BS
        )
