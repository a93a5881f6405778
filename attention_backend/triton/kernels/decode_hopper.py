"""Attention of short segments on Hopper: a producer streams K and V, consumers keep up.

Program (run, block of HB KV heads) walks the run's segments, as in ``decode.py``. Its last warp,
the producer, lets the copy engine bring boxes of BN keys of all HB heads into a ring in shared
memory, K and V in turn, far ahead of the use. The others, MT for each head, multiply; while keys
stream, they exchange nothing but the news that a box is full or free.

Where there are only decodes MT is 1, and a warp has the 16 rows of a head. Where there may be
drafts, a segment is taken by RT tiles of 16 rows, as few as hold it: a warp has one of them, and
the MT / RT warps that then have the same rows share the keys of a box. What these sum up they leave
in memory at the segment's end and add up, while the ring fills.

Rows of a column beyond its last key may be no memory at all, so the last box of a section of keys
ends where the section does, on top of the one before or, below row 0, on rows that the copy engine
fills with zeros. Keys of a ring that has wrapped are two sections, one up to the ring's last row
and one from its row 0. What a box then holds besides new keys is masked, and cleared in V, since
0 * NaN is NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .order import after_earlier_kernels, let_later_kernels_start
from .segments import first_key, short_tiles

# Triton renamed them after 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_all_here = getattr(gl, "barrier", None) or gl.thread_barrier
_shared = gl.shared_memory_descriptor
_as_if = getattr(_shared, "reinterpret", None) or _shared._reinterpret

_ROWS = gl.constexpr(16)  # of queries, what a product takes
_STEP = gl.constexpr(4096)  # numbers of K that a warp holds at most
_GROUP = gl.constexpr(16)  # parts that are merged at once


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
def _find(
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
def _sections(
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
def _box(i, begin, turn, end, zero, n_old, rows, BN: gl.constexpr, WINDOWED: gl.constexpr):
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
def _bring(
    desc, boxes, full, empty, count, col, head, row,
    HB: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring the count-th box of all when its place is free."""
    stage = count % STAGES
    phase = (count // STAGES) & 1
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), HB * BN * D * 2)
    _copy(desc, [col, head, row, 0], full.index(stage), boxes.index(stage))


@gluon.jit
def _produce(
    k_desc,
    v_desc,
    ring,
    table,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    HB: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WINDOWED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    after_earlier_kernels(OVERLAP)
    boxes, full, empty = ring
    seq_info, pieces, info_s, info_c, S, _, rows, window = table
    run = gl.program_id(0) // (H // HB)
    head = gl.program_id(0) % (H // HB) * HB
    seg = gl.load(pieces + run * 8)
    tile = gl.load(pieces + run * 8 + 1)
    left = gl.load(pieces + run * 8 + 2)
    count = 0
    while left > 0:
        seg, _q_start, q_len, col, kv_end, n_tiles = _find(
            seg, S, seq_info, info_s, info_c, window, G, ROWS, KEYS
        )
        take = gl.minimum(n_tiles - tile, left)
        begin, turn, end, zero, n_old, n = _sections(
            tile, take, q_len, kv_end, rows, window, KEYS, BN, WINDOWED
        )
        for i in range(n):
            _start, _low, row = _box(i, begin, turn, end, zero, n_old, rows, BN, WINDOWED)
            _bring(k_desc, boxes, full, empty, count, col, head, row, HB, BN, D, STAGES)
            _bring(v_desc, boxes, full, empty, count + 1, col, head, row, HB, BN, D, STAGES)
            count += 2
        left = gl.where(n_tiles > 0, left - take, 0)
        tile = tile * 0
        seg += 1


@gluon.jit
def _axes(layout: gl.constexpr, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr):
    """The three indices of a tensor [A, B, C]."""
    a = gl.arange(0, A, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None][:, :, None]
    b = gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :][:, :, None]
    c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, :][:, None, :]
    return a, b, c


@gluon.jit
def _finish(
    acc, top, total, scale, whole, q_start, q_len, head, run, is_first, T, ends,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, P: gl.constexpr, R: gl.constexpr,
    SHARES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Write the result if it is whole, else leave it as a part; shares one below the other."""
    _, out, part_acc, part_sums, _, _, o_t, o_h = ends
    layout: gl.constexpr = acc.type.layout
    h, row, dim = _axes(layout, P, R, D)
    inside = row < q_len * G
    if whole:
        result = acc / gl.where(total > 0, total, 1.0)[:, :, None]
        token = q_start + row // G
        q_head = (head + h) * G + row % G
        at = token.to(gl.int64) * o_t + q_head.to(gl.int64) * o_h + dim
        gl.store(out + at, result.to(out.dtype.element_ty), mask=inside & (token < T))
    else:
        part = 2 * (run * H + head + h // SHARES) + is_first
        place = row + h % SHARES * R
        gl.store(part_acc + (part * ROWS + place) * D + dim, acc, mask=inside)
        sums: gl.constexpr = top.type.layout
        sums_row = gl.arange(0, R, gl.SliceLayout(0, sums))[None, :]
        share = gl.arange(0, P, gl.SliceLayout(1, sums))[:, None]
        part = 2 * (run * H + head + share // SHARES) + is_first
        to = part_sums + part * 2 * ROWS + (sums_row + share % SHARES * R)
        gl.store(to, top * scale, mask=sums_row < q_len * G)
        gl.store(to + ROWS, total, mask=sums_row < q_len * G)


@gluon.jit
def _combine(
    owner, first, n, step, final, q_start, q_len, head, T, ends,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, HB: gl.constexpr, MT: gl.constexpr,
    R: gl.constexpr, SHARES: gl.constexpr, ROWS: gl.constexpr, RB: gl.constexpr, BP: gl.constexpr,
):  # fmt: skip
    """Add up n parts of the segment, the first-th and every step-th from it, of SHARES each.

    To out if final, else to where the first one was.
    """
    _, out, part_acc, part_sums, _, _, o_t, o_h = ends
    LANES: gl.constexpr = 16 if D == 64 else 32
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 4], [1, 1, 32 // LANES, LANES], [1, HB, MT, 1], [3, 2, 1, 0]
    )
    L3: gl.constexpr = gl.SliceLayout(0, L)
    sums: gl.constexpr = gl.SliceLayout(3, L)
    i = gl.arange(0, BP, gl.SliceLayout(1, gl.SliceLayout(2, sums)))[:, None][:, :, None]
    h, r, dim = _axes(L3, HB, RB, D)
    r_sums = gl.arange(0, RB, gl.SliceLayout(0, gl.SliceLayout(1, sums)))[None, :][:, None, :]
    h_sums = gl.arange(0, HB, gl.SliceLayout(0, gl.SliceLayout(2, sums)))[None, :][:, :, None]
    for begin_row in range(0, q_len * G, RB):
        row = begin_row + r_sums
        acc = gl.full([HB, RB, D], 0.0, gl.float32, L3)
        top = gl.full([HB, RB], float("-inf"), gl.float32, gl.SliceLayout(0, sums))
        total = gl.full([HB, RB], 0.0, gl.float32, gl.SliceLayout(0, sums))
        for at in range(0, n * SHARES, BP):
            j = first + (at + i) // SHARES * step
            there = (at + i < n * SHARES) & (row < q_len * G)
            part = 2 * ((owner + j) * H + head + h_sums) + (j == 0).to(gl.int32)
            at_row = row + (at + i) % SHARES * R
            tops = gl.load(part_sums + part * 2 * ROWS + at_row, mask=there, other=float("-inf"))
            totals = gl.load(part_sums + part * 2 * ROWS + ROWS + at_row, mask=there, other=0.0)
            place = gl.expand_dims((part * ROWS + at_row) * D, 3)
            values = gl.load(
                part_acc + place + gl.expand_dims(dim, 0),
                mask=gl.expand_dims(there, 3),
                other=0.0,
            )
            new = gl.maximum(top, gl.max(tops, 0))
            base = gl.where(new == float("-inf"), 0.0, new)
            weights = gl.exp2(tops - gl.expand_dims(base, 0))
            fade = gl.exp2(top - base)
            total = total * fade + gl.sum(weights * totals, 0)
            fade = gl.convert_layout(fade, gl.SliceLayout(2, L3))
            acc = acc * gl.expand_dims(fade, 2) + gl.sum(gl.expand_dims(weights, 3) * values, 0)
            top = new
        row = begin_row + r
        inside = row < q_len * G
        if final:
            all_of = gl.where(total > 0, total, 1.0)
            all_of = gl.convert_layout(all_of, gl.SliceLayout(2, L3))
            token = q_start + row // G
            q_head = (head + h) * G + row % G
            to = token.to(gl.int64) * o_t + q_head.to(gl.int64) * o_h + dim
            result = acc / gl.expand_dims(all_of, 2)
            gl.store(out + to, result.to(out.dtype.element_ty), mask=inside & (token < T))
        else:
            _all_here()  # all have read what is written over
            is_first = (first == 0).to(gl.int32)
            part = 2 * ((owner + first) * H + head + h) + is_first
            gl.store(part_acc + (part * ROWS + row) * D + dim, acc, mask=inside)
            S2: gl.constexpr = gl.SliceLayout(0, sums)
            row2 = begin_row + gl.arange(0, RB, gl.SliceLayout(0, S2))[None, :]
            h2 = gl.arange(0, HB, gl.SliceLayout(1, S2))[:, None]
            part2 = 2 * ((owner + first) * H + head + h2) + is_first
            to_sums = part_sums + part2 * 2 * ROWS + row2
            gl.store(to_sums, top, mask=row2 < q_len * G)
            gl.store(to_sums + ROWS, total, mask=row2 < q_len * G)


@gluon.jit
def _arrive(counter, expected):
    """Whether this program is the last of the expected ones; the count is zero again then."""
    _all_here()  # all of the part is stored before its arrival is told
    before = gl.atomic_add(counter, 1, sem="acq_rel")
    _all_here()
    last = before == expected - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def _merge(
    owner, run, q_start, q_len, head, T, pieces, arrivals, ends,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, HB: gl.constexpr, MT: gl.constexpr,
    ROWS: gl.constexpr, RB: gl.constexpr, BP: gl.constexpr,
):  # fmt: skip
    """Say that the part is there. The last to come merges them, always in the order of the runs.

    Many are merged in groups first, by the last of each group. A group counts at its first run,
    at which no segment begins; the group of the owner, which counts all, at the run after it.
    """
    parts = gl.load(pieces + owner * 8 + 3)
    go = parts > 0
    n = parts
    step = 1
    if parts > _GROUP:
        first = (run - owner) // _GROUP * _GROUP
        size = gl.minimum(parts - first, _GROUP)
        if size > 1:
            place = owner + gl.maximum(first, 1)
            go = _arrive(arrivals + place * H + head, size)
            if go:
                _combine(
                    owner, first, size, 1, False, q_start, q_len, head, T, ends,
                    H, G, D, HB, MT, ROWS, 1, ROWS, RB, BP,
                )  # fmt: skip
        n = (parts + _GROUP - 1) // _GROUP
        step = _GROUP
    if go:
        go = _arrive(arrivals + owner * H + head, n)
        if go:
            _combine(
                owner, 0, n, step, True, q_start, q_len, head, T, ends,
                H, G, D, HB, MT, ROWS, 1, ROWS, RB, BP,
            )  # fmt: skip


@gluon.jit
def _zero_rows(
    out, live, gaps, T, o_t, o_h,
    HQ: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, BG: gl.constexpr,
):  # fmt: skip
    """Zero the rows that have no segment, in blocks of BG."""
    LANES: gl.constexpr = D // 8 if D < 256 else 32
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    dim = gl.arange(0, D, gl.SliceLayout(0, L))[None, :]
    nothing = gl.full([BG, D], 0.0, out.dtype.element_ty, L)
    for block in range(gl.program_id(0), (T + BG - 1) // BG, gl.num_programs(0)):
        if gl.load(gaps + block) > 0:
            token = block * BG + gl.arange(0, BG, gl.SliceLayout(1, L))
            dead = gl.load(live + token, mask=token < T, other=1) == 0
            at = token.to(gl.int64) * o_t
            for head in range(HQ):
                to = out + (at + gl.to_tensor(head).to(gl.int64) * o_h)[:, None] + dim
                gl.store(to, nothing, mask=dead[:, None])


@gluon.jit
def _halves(x, P: gl.constexpr, R: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """x [P, R, 2 * N] as two of N; no number changes its thread."""
    left, right = x.reshape([P, R, 2, N]).permute([0, 1, 3, 2]).split()
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def _attend(
    ring,
    table,
    ends,
    counts,
    scale,
    count,
    tile,
    take,
    n_tiles,
    owner,
    run,
    head,
    q_start,
    q_len,
    kv_end,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    HB: gl.constexpr,
    MT: gl.constexpr,
    RT: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    RB: gl.constexpr,
    BP: gl.constexpr,
):
    """Tiles tile .. tile + take of a segment with at most RT tiles of rows.

    Returns the count of boxes. Where fewer tiles of rows than MT are needed, warps share the keys
    of a box: MT / RT shares of each head, which are added up at the end.
    """
    SHARES: gl.constexpr = MT // RT
    P: gl.constexpr = HB * SHARES
    R: gl.constexpr = _ROWS * RT
    N: gl.constexpr = BN // SHARES  # keys of a box that are a warp's
    boxes, full, empty = ring
    _, pieces, _, _, _, T, rows, window = table
    query, _, _, _, q_t, q_h, _, _ = ends
    _, _, arrivals = counts
    dtype: gl.constexpr = boxes.dtype
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [P, RT, 1], [1, 16, 8])
    left_side: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    right_side: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    rows_of: gl.constexpr = gl.SliceLayout(2, L)

    warp, q_row, q_dim = _axes(left_side, P, R, D)
    q_h_at = (head + warp // SHARES) * G + q_row % G
    warp, s_row, s_key = _axes(L, P, R, N)
    if SHARES > 1:
        s_key += warp % SHARES * N
    warp, v_key, _dim = _axes(right_side, P, N if N * D <= _STEP else N // 2, D)
    if SHARES > 1:
        v_key += warp % SHARES * N

    begin, turn, end, zero, n_old, n = _sections(
        tile, take, q_len, kv_end, rows, window, KEYS, BN, WINDOWED
    )
    q_len = gl.where(n_tiles > 0, q_len, 0)
    token = q_start + q_row // G
    q_at = query + token.to(gl.int64) * q_t + q_h_at.to(gl.int64) * q_h + q_dim
    q = gl.load(q_at, mask=(q_row < q_len * G) & (token < T), other=0.0)
    position = kv_end - q_len + s_row // G

    acc = gl.full([P, R, D], 0.0, gl.float32, L)
    top = gl.full([P, R], float("-inf"), gl.float32, rows_of)
    total = gl.full([P, R], 0.0, gl.float32, rows_of)
    for i in range(n):
        start, low, _row = _box(i, begin, turn, end, zero, n_old, rows, BN, WINDOWED)
        stage = count % STAGES
        phase = (count // STAGES) & 1
        mbarrier.wait(full.index(stage), phase)
        keys = boxes.index(stage).reshape([P, N, D]).permute([0, 2, 1]).load(right_side)
        if N * D > _STEP:  # not all at once in registers
            scores = mma_v2(q, keys, gl.full([P, R, N], 0.0, gl.float32, L))
        _all_here()  # all have read it
        mbarrier.arrive(empty.index(stage))
        if N * D <= _STEP:
            scores = mma_v2(q, keys, gl.full([P, R, N], 0.0, gl.float32, L))

        edge = start < low
        if CAUSAL:
            edge = edge | (start + BN > kv_end - q_len + 1)
        if WINDOWED:
            edge = edge | (start < kv_end - window)
        if edge:
            seen = s_key >= low - start
            if CAUSAL:
                seen = seen & (s_key <= position - start)
            if WINDOWED:
                seen = seen & (s_key > position - window - start)
            scores = gl.where(seen, scores, float("-inf"))
        new = gl.maximum(top, gl.max(scores, 2))
        shift = gl.where(new == float("-inf"), 0.0, new * scale)  # -inf - -inf would be NaN
        fade = gl.exp2(top * scale - shift)
        weights = gl.exp2(scores * scale - shift[:, :, None])
        total = total * fade + gl.sum(weights, 2)
        top = new

        stage = (count + 1) % STAGES
        phase = ((count + 1) // STAGES) & 1
        mbarrier.wait(full.index(stage), phase)
        if N * D <= _STEP:
            values = boxes.index(stage).reshape([P, N, D]).load(right_side)
            _all_here()
            mbarrier.arrive(empty.index(stage))
            if start < low:
                values = gl.where(v_key >= low - start, values, 0.0)
            weights = gl.convert_layout(weights.to(dtype), left_side)
            acc = mma_v2(weights, values, acc * fade[:, :, None])
        else:
            gl.static_assert(N * D == 2 * _STEP)
            places: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)  # those of the box
            box = _as_if(boxes.index(stage), dtype, [P, N, D], places)
            upper, lower = _halves(weights.to(dtype), P, R, N // 2, L)
            values = box.slice(0, N // 2, dim=1).load(right_side)
            if start < low:
                values = gl.where(v_key >= low - start, values, 0.0)
            acc = mma_v2(gl.convert_layout(upper, left_side), values, acc * fade[:, :, None])
            values = box.slice(N // 2, N // 2, dim=1).load(right_side)
            _all_here()
            mbarrier.arrive(empty.index(stage))
            if start < low:
                values = gl.where(v_key >= low - start - N // 2, values, 0.0)
            acc = mma_v2(gl.convert_layout(lower, left_side), values, acc)
        count += 2

    whole = take == n_tiles
    is_first = (tile == 0).to(gl.int32)
    if SHARES == 1:
        _finish(
            acc, top, total, scale, whole, q_start, q_len, head, run, is_first, T, ends,
            H, G, D, P, R, SHARES, ROWS,
        )  # fmt: skip
    else:
        _finish(
            acc, top, total, scale, False, q_start, q_len, head, run, is_first, T, ends,
            H, G, D, P, R, SHARES, ROWS,
        )  # fmt: skip
        _all_here()  # all shares are stored
        _combine(
            run - 1 + is_first, 1 - is_first, 1, 1, whole, q_start, q_len, head, T, ends,
            H, G, D, HB, MT, R, SHARES, ROWS, RB, BP,
        )  # fmt: skip
    if not whole:
        owner = gl.where(tile == 0, run, owner)
        _merge(
            owner, run, q_start, q_len, head, T, pieces, arrivals, ends,
            H, G, D, HB, MT, ROWS, RB, BP,
        )  # fmt: skip
    return count


@gluon.jit
def _consume(
    ring,
    table,
    ends,
    counts,
    scale,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    HB: gl.constexpr,
    MT: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    RB: gl.constexpr,
    BP: gl.constexpr,
    BG: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    after_earlier_kernels(OVERLAP)
    let_later_kernels_start(OVERLAP)
    seq_info, pieces, info_s, info_c, S, T, _, window = table
    _, out, _, _, _, _, o_t, o_h = ends
    live, gaps, _ = counts
    run = gl.program_id(0) // (H // HB)
    head = gl.program_id(0) % (H // HB) * HB
    seg = gl.load(pieces + run * 8)
    tile = gl.load(pieces + run * 8 + 1)
    left = gl.load(pieces + run * 8 + 2)
    owner = gl.load(pieces + run * 8 + 4)
    count = 0
    while left > 0:
        seg, q_start, q_len, _col, kv_end, n_tiles = _find(
            seg, S, seq_info, info_s, info_c, window, G, ROWS, KEYS
        )
        take = gl.minimum(n_tiles - tile, left)
        if MT == 1:
            count = _attend(
                ring, table, ends, counts, scale, count, tile, take, n_tiles, owner,
                run, head, q_start, q_len, kv_end,
                H, G, D, HB, MT, 1, BN, STAGES, ROWS, KEYS, CAUSAL, WINDOWED, RB, BP,
            )  # fmt: skip
        elif q_len * G > 2 * _ROWS:
            count = _attend(
                ring, table, ends, counts, scale, count, tile, take, n_tiles, owner,
                run, head, q_start, q_len, kv_end,
                H, G, D, HB, MT, MT, BN, STAGES, ROWS, KEYS, CAUSAL, WINDOWED, RB, BP,
            )  # fmt: skip
        elif q_len * G > _ROWS:
            count = _attend(
                ring, table, ends, counts, scale, count, tile, take, n_tiles, owner,
                run, head, q_start, q_len, kv_end,
                H, G, D, HB, MT, 2, BN, STAGES, ROWS, KEYS, CAUSAL, WINDOWED, RB, BP,
            )  # fmt: skip
        else:
            count = _attend(
                ring, table, ends, counts, scale, count, tile, take, n_tiles, owner,
                run, head, q_start, q_len, kv_end,
                H, G, D, HB, MT, 1, BN, STAGES, ROWS, KEYS, CAUSAL, WINDOWED, RB, BP,
            )  # fmt: skip
        left = gl.where(n_tiles > 0, left - take, 0)
        tile = tile * 0
        seg += 1
    _zero_rows(out, live, gaps, T, o_t, o_h, H * G, D, HB * MT, BG)


@gluon.jit(do_not_specialize=["S", "T", "rows", "window"])
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
    MT: gl.constexpr,
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
    """``attend_short`` for segments of at most 16 * MT rows a KV head; ROWS says which are short.

    What earlier kernels have written is awaited by all warps.

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
    gl.warp_specialize(
        [
            (_consume, (ring, table, ends, counts, scale,
                        H, G, D, HB, MT, BN, STAGES, ROWS, KEYS, CAUSAL, WINDOWED,
                        RB, BP, BG, OVERLAP)),
            (_produce, (k_desc, v_desc, ring, table,
                        H, G, D, HB, BN, STAGES, ROWS, KEYS, WINDOWED, OVERLAP)),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip
