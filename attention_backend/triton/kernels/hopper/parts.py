"""Results of short segments: whole, or parts that whoever is last merges; rows without one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Triton renamed it after 3.6.
all_here = getattr(gl, "barrier", None) or gl.thread_barrier

_GROUP = gl.constexpr(16)  # parts that are merged at once


@gluon.jit
def axes(layout: gl.constexpr, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr):
    """The three indices of a tensor [A, B, C]."""
    a = gl.arange(0, A, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None][:, :, None]
    b = gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :][:, :, None]
    c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, :][:, None, :]
    return a, b, c


@gluon.jit
def finish(
    acc, top, total, scale, whole, q_start, q_len, head, run, is_first, T, ends,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, HB: gl.constexpr, R: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Write the result, acc [HB, R, D], if it is whole, else leave it as a part."""
    _, out, part_acc, part_sums, _, _, o_t, o_h = ends
    layout: gl.constexpr = acc.type.layout
    h, row, dim = axes(layout, HB, R, D)
    inside = row < q_len * G
    if whole:
        result = acc / gl.where(total > 0, total, 1.0)[:, :, None]
        token = q_start + row // G
        q_head = (head + h) * G + row % G
        at = token.to(gl.int64) * o_t + q_head.to(gl.int64) * o_h + dim
        gl.store(out + at, result.to(out.dtype.element_ty), mask=inside & (token < T))
    else:
        part = 2 * (run * H + head + h) + is_first
        gl.store(part_acc + (part * ROWS + row) * D + dim, acc, mask=inside)
        sums: gl.constexpr = top.type.layout
        sums_row = gl.arange(0, R, gl.SliceLayout(0, sums))[None, :]
        sums_head = head + gl.arange(0, HB, gl.SliceLayout(1, sums))[:, None]
        to = part_sums + (2 * (run * H + sums_head) + is_first) * 2 * ROWS + sums_row
        gl.store(to, top * scale, mask=sums_row < q_len * G)
        gl.store(to + ROWS, total, mask=sums_row < q_len * G)


@gluon.jit
def _combine(
    owner, first, n, step, final, q_start, q_len, head, T, ends,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, HB: gl.constexpr, WARPS: gl.constexpr,
    ROWS: gl.constexpr, RB: gl.constexpr, BP: gl.constexpr,
):  # fmt: skip
    """Add up n parts of the segment, the first-th and every step-th from it.

    To out if final, else to where the first one was.
    """
    _, out, part_acc, part_sums, _, _, o_t, o_h = ends
    LANES: gl.constexpr = 16 if D == 64 else 32
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 4], [1, 1, 32 // LANES, LANES], [1, HB, WARPS // HB, 1], [3, 2, 1, 0]
    )
    L3: gl.constexpr = gl.SliceLayout(0, L)
    sums: gl.constexpr = gl.SliceLayout(3, L)
    i = gl.arange(0, BP, gl.SliceLayout(1, gl.SliceLayout(2, sums)))[:, None][:, :, None]
    h, r, dim = axes(L3, HB, RB, D)
    r_sums = gl.arange(0, RB, gl.SliceLayout(0, gl.SliceLayout(1, sums)))[None, :][:, None, :]
    h_sums = gl.arange(0, HB, gl.SliceLayout(0, gl.SliceLayout(2, sums)))[None, :][:, :, None]
    for begin_row in range(0, q_len * G, RB):
        row = begin_row + r_sums
        acc = gl.full([HB, RB, D], 0.0, gl.float32, L3)
        top = gl.full([HB, RB], float("-inf"), gl.float32, gl.SliceLayout(0, sums))
        total = gl.full([HB, RB], 0.0, gl.float32, gl.SliceLayout(0, sums))
        for at in range(0, n, BP):
            j = first + (at + i) * step
            there = (at + i < n) & (row < q_len * G)
            part = 2 * ((owner + j) * H + head + h_sums) + (j == 0).to(gl.int32)
            tops = gl.load(part_sums + part * 2 * ROWS + row, mask=there, other=float("-inf"))
            totals = gl.load(part_sums + part * 2 * ROWS + ROWS + row, mask=there, other=0.0)
            place = gl.expand_dims((part * ROWS + row) * D, 3)
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
            all_here()  # all have read what is written over
            is_first = (first == 0).to(gl.int32)
            part = 2 * ((owner + first) * H + head + h) + is_first
            gl.store(part_acc + (part * ROWS + row) * D + dim, acc, mask=inside)
            S2: gl.constexpr = gl.SliceLayout(0, sums)
            row2 = begin_row + gl.arange(0, RB, gl.SliceLayout(0, S2))[None, :]
            h2 = gl.arange(0, HB, gl.SliceLayout(1, S2))[:, None]
            to = part_sums + (2 * ((owner + first) * H + head + h2) + is_first) * 2 * ROWS + row2
            gl.store(to, top, mask=row2 < q_len * G)
            gl.store(to + ROWS, total, mask=row2 < q_len * G)


@gluon.jit
def _arrive(counter, expected):
    """Whether this program is the last of the expected ones; the count is zero again then."""
    all_here()  # all of the part is stored before its arrival is told
    before = gl.atomic_add(counter, 1, sem="acq_rel")
    all_here()
    last = before == expected - 1
    if last:
        gl.store(counter, 0)
    return last


@gluon.jit
def merge(
    owner, run, q_start, q_len, head, T, pieces, arrivals, ends,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, HB: gl.constexpr, WARPS: gl.constexpr,
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
                    H, G, D, HB, WARPS, ROWS, RB, BP,
                )  # fmt: skip
        n = (parts + _GROUP - 1) // _GROUP
        step = _GROUP
    if go:
        go = _arrive(arrivals + owner * H + head, n)
        if go:
            _combine(
                owner, 0, n, step, True, q_start, q_len, head, T, ends,
                H, G, D, HB, WARPS, ROWS, RB, BP,
            )  # fmt: skip


@gluon.jit
def zero_rows(
    first, step, out, live, gaps, T, o_t, o_h,
    HQ: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, BG: gl.constexpr,
):  # fmt: skip
    """Zero the rows without a segment, in blocks of BG, the first-th and every step-th after it."""
    LANES: gl.constexpr = D // 8 if D < 256 else 32
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    dim = gl.arange(0, D, gl.SliceLayout(0, L))[None, :]
    nothing = gl.full([BG, D], 0.0, out.dtype.element_ty, L)
    for block in range(first, (T + BG - 1) // BG, step):
        if gl.load(gaps + block) > 0:
            token = block * BG + gl.arange(0, BG, gl.SliceLayout(1, L))
            dead = gl.load(live + token, mask=token < T, other=1) == 0
            at = token.to(gl.int64) * o_t
            for head in range(HQ):
                to = out + (at + gl.to_tensor(head).to(gl.int64) * o_h)[:, None] + dim
                gl.store(to, nothing, mask=dead[:, None])
