"""The step's schedule, made on the device once for all layers; see the folder's README."""

import triton
import triton.language as tl

from .order import after_earlier_kernels, let_later_kernels_start
from .segments import PIECE, long_tiles, short_tiles


@triton.jit
def _lengths(seq_info, info_s, info_c, seg, mask):
    q_len = tl.load(seq_info + seg * info_s + info_c, mask=mask, other=0)
    kv_end = tl.load(seq_info + seg * info_s + 3 * info_c, mask=mask, other=0)
    return q_len, kv_end


@triton.jit
def _first_tile(r, total, runs):
    """r * total // runs, for less than 2 ** 15 runs without 64 bits, whose division is long."""
    return total // runs * r + total % runs * r // runs


@triton.jit
def _run_of(tile, total, runs):
    """The last run that begins at or before the tile: an estimate that is off by one at most."""
    r = (tile.to(tl.float32) * (runs / tl.maximum(total, 1).to(tl.float32))).to(tl.int32)
    r = tl.minimum(tl.maximum(r, 0), runs - 1)
    r = tl.where(_first_tile(r, total, runs) > tile, r - 1, r)
    return tl.where(_first_tile(r + 1, total, runs) <= tile, r + 1, r)


@triton.jit
def _cut(
    pid,
    seq_info,
    info_s,
    info_c,
    pieces,
    S,
    window,
    G: tl.constexpr,
    R: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
):
    """Cut the key tiles of all short segments, one after the other, in R equal runs or fewer.

    As many as segments where these are short: what cutting saves, merging costs. A few less, if
    each then has as many segments as the others or each segment as many runs: of equal lengths,
    none or few are cut.

    Less than 2 ** 31 tiles.
    """
    total = tl.full([], 0, tl.int32)
    segments = tl.full([], 0, tl.int32)
    for at in range(0, S, BS):
        seg = at + tl.arange(0, BS)
        q_len, kv_end = _lengths(seq_info, info_s, info_c, seg, seg < S)
        n = short_tiles(q_len, kv_end, window, G, BM, BN)
        total += tl.sum(n, 0)
        segments += tl.sum((n > 0).to(tl.int32), 0)
    segments = tl.maximum(segments, 1)
    cut = total > 2 * MIN_TILES * segments
    most = tl.minimum(tl.where(cut, (total + MIN_TILES - 1) // MIN_TILES, segments), R)
    of_each = (segments + most - 1) // most
    whole = (segments + of_each - 1) // of_each
    even = tl.where(segments > most, whole, most // segments * segments)
    runs = tl.where(even * 8 >= most * 7, even, most)
    runs = tl.where(total > 0, runs, 0)
    divisor = tl.maximum(runs, 1)

    r = pid * BE + tl.arange(0, BE)
    works = r < runs
    begin = _first_tile(r, total, divisor)
    end = _first_tile(r + 1, total, divisor)
    last = end - 1
    # The segment of tile x is the first whose running sum exceeds x: count those that do not.
    seg_begin = tl.zeros([BE], tl.int32)
    base_begin = tl.zeros([BE], tl.int32)
    base_last = tl.zeros([BE], tl.int32)
    end_last = tl.zeros([BE], tl.int32)
    carry = tl.full([], 0, tl.int32)
    for at in range(0, S, BS):
        seg = at + tl.arange(0, BS)
        q_len, kv_end = _lengths(seq_info, info_s, info_c, seg, seg < S)
        n = short_tiles(q_len, kv_end, window, G, BM, BN)
        ends = (carry + tl.cumsum(n, 0))[None, :]
        before = ends <= begin[:, None]
        seg_begin += tl.sum(before.to(tl.int32), 1)
        base_begin = tl.maximum(base_begin, tl.max(tl.where(before, ends, 0), 1))
        before = ends <= last[:, None]
        base_last = tl.maximum(base_last, tl.max(tl.where(before, ends, 0), 1))
        inside = (ends > last[:, None]) & (ends - n[None, :] <= last[:, None])
        end_last = tl.maximum(end_last, tl.max(tl.where(inside, ends, 0), 1))
        carry += tl.sum(n, 0)

    owner = _run_of(base_begin, total, divisor)
    last_run = _run_of(end_last - 1, total, divisor)
    parts = tl.where((end_last > end) & (base_last >= begin) & works, last_run - r + 1, 0)

    # What the segment is that a run begins with: who reads the run need not wait for that, too.
    info = seq_info + tl.where(works, seg_begin, 0) * info_s
    entry = pieces + r * PIECE
    known = r < R
    tl.store(entry, seg_begin, mask=known)
    tl.store(entry + 1, begin - base_begin, mask=known)
    tl.store(entry + 2, tl.where(works, end - begin, 0), mask=known)
    tl.store(entry + 3, parts.to(tl.int32), mask=known)
    tl.store(entry + 4, owner.to(tl.int32), mask=known)
    tl.store(entry + 5, tl.load(info, mask=works, other=0), mask=known)
    tl.store(entry + 6, tl.load(info + info_c, mask=works, other=0), mask=known)
    tl.store(entry + 7, tl.load(info + 2 * info_c, mask=works, other=0), mask=known)
    tl.store(entry + 8, tl.load(info + 3 * info_c, mask=works, other=0), mask=known)


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
    """Flag the query rows that a segment with keys covers, count the others of a block.

    Rows from T on, which is the buffers' end and not the step's, count as others.
    """
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
    tl.store(gaps + pid, tl.sum(1 - found, 0))


@triton.jit(do_not_specialize=["S", "T", "max_tiles", "window"])
def make_schedule(
    seq_info,
    info_s,
    info_c,
    pieces,
    draft_pieces,
    tiles,
    progress,
    live,
    gaps,
    S,
    T,
    max_tiles,
    window,
    G: tl.constexpr,
    R: tl.constexpr,
    DRAFT_R: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BN: tl.constexpr,
    BM_SHORT: tl.constexpr,
    BM_LONG: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Fill pieces [R, 12], draft_pieces, tiles [max_tiles, 2], live [T] and gaps [T / BE].

    Each program fills BE entries. The second number of progress becomes that of the query tiles.

    pieces: segment and tile that a run begins with, its number of tiles; the number of runs that
    share the segment that it ends within and began, 0 for none; the run that began the segment
    that it begins within; q_start, q_len, column and kv_end of the segment. draft_pieces: the same
    for the kernel of steps that may have drafts, where that has runs of its own (DRAFT_R, else 0);
    which of them a captured layer reads was settled before the lengths were known. tiles: segment
    (-1 for none) and query tile. window: 1 << 30 for none.
    """
    after_earlier_kernels(OVERLAP)
    let_later_kernels_start(OVERLAP)
    pid = tl.program_id(0)
    cut_programs: tl.constexpr = (R + BE - 1) // BE
    draft_programs: tl.constexpr = (DRAFT_R + BE - 1) // BE
    before_tiles: tl.constexpr = cut_programs + draft_programs
    tile_programs = (max_tiles + BE - 1) // BE
    if pid < cut_programs:
        _cut(
            pid, seq_info, info_s, info_c, pieces, S, window,
            G, R, MIN_TILES, BM_SHORT, BN, BE, BS,
        )  # fmt: skip
    elif pid < before_tiles:
        if DRAFT_R > 0:
            _cut(
                pid - cut_programs, seq_info, info_s, info_c, draft_pieces, S, window,
                G, DRAFT_R, MIN_TILES, BM_SHORT, BN, BE, BS,
            )  # fmt: skip
    elif pid < before_tiles + tile_programs:
        _list_tiles(
            pid - before_tiles, seq_info, info_s, info_c, tiles, progress, S, max_tiles,
            G, BM_SHORT, BM_LONG, BE, BS,
        )  # fmt: skip
    else:
        _mark_live(
            pid - before_tiles - tile_programs, seq_info, info_s, info_c, live, gaps, S, T, BE, BS
        )
