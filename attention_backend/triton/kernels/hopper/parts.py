"""Results of short segments: whole, or parts that whoever is last merges; rows without one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..segments import PIECE
from .layouts import WARPS, row_layout

# Triton renamed it after 3.6.
_all_here = getattr(gl, "barrier", None) or gl.thread_barrier

_GROUP = gl.constexpr(16)  # parts that are merged at once


@gluon.jit
def finish(
    acc, top, total, scale, whole, q_start, q_len, head, run, is_first, T, ends,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Write the result, acc [ROWS, D], if it is whole, else leave it as a part."""
    _, out, part_acc, part_sums, _, _, o_t, o_h = ends
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    inside = row < q_len * G
    if whole:
        # One division a row: the code for so many numbers would be long, and it is often cold.
        result = acc * (1.0 / gl.where(total > 0, total, 1.0))[:, None]
        token = q_start + row // G
        q_head = head * G + row % G
        at = token.to(gl.int64) * o_t + q_head.to(gl.int64) * o_h
        inside = inside & (token < T)
        gl.store(out + at[:, None] + dim, result.to(out.dtype.element_ty), mask=inside[:, None])
    else:
        part = 2 * (run * H + head) + is_first
        to = part_acc + ((part * ROWS + row) * D)[:, None] + dim
        gl.store(to, acc, mask=inside[:, None])
        to = part_sums + part * 2 * ROWS + row
        gl.store(to, top * scale, mask=inside)
        gl.store(to + ROWS, total, mask=inside)


@gluon.jit
def _combine(
    owner, first, n, step, final, q_start, q_len, head, T, ends,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr, RB: gl.constexpr, BP: gl.constexpr,
):  # fmt: skip
    """Add up n parts of the segment, the first-th and every step-th from it.

    To out if final, else to where the first one was.
    """
    _, out, part_acc, part_sums, _, _, o_t, o_h = ends
    LANES: gl.constexpr = 16 if D == 64 else 32
    L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32 // LANES, LANES], [1, WARPS, 1], [2, 1, 0])
    L2: gl.constexpr = gl.SliceLayout(0, L)
    sums: gl.constexpr = gl.SliceLayout(2, L)
    rows_of: gl.constexpr = gl.SliceLayout(0, sums)
    i = gl.arange(0, BP, gl.SliceLayout(1, sums))[:, None]
    row_in = gl.arange(0, RB, rows_of)
    dim = gl.arange(0, D, gl.SliceLayout(0, L2))[None, :]
    for begin_row in range(0, q_len * G, RB):
        row = begin_row + row_in
        inside = row < q_len * G
        acc = gl.full([RB, D], 0.0, gl.float32, L2)
        top = gl.full([RB], float("-inf"), gl.float32, rows_of)
        total = gl.full([RB], 0.0, gl.float32, rows_of)
        for at in range(0, n, BP):
            j = first + (at + i) * step
            there = (at + i < n) & inside[None, :]
            part = 2 * ((owner + j) * H + head) + (j == 0).to(gl.int32)
            from_sums = part_sums + part * 2 * ROWS + row[None, :]
            tops = gl.load(from_sums, mask=there, other=float("-inf"))
            totals = gl.load(from_sums + ROWS, mask=there, other=0.0)
            place = gl.expand_dims((part * ROWS + row[None, :]) * D, 2)
            values = gl.load(
                part_acc + place + gl.expand_dims(dim, 0),
                mask=gl.expand_dims(there, 2),
                other=0.0,
            )
            new = gl.maximum(top, gl.max(tops, 0))
            base = gl.where(new == float("-inf"), 0.0, new)
            weights = gl.exp2(tops - base[None, :])
            fade = gl.exp2(top - base)
            total = total * fade + gl.sum(weights * totals, 0)
            fade = gl.convert_layout(fade, gl.SliceLayout(1, L2))
            acc = acc * fade[:, None] + gl.sum(gl.expand_dims(weights, 2) * values, 0)
            top = new
        row2 = begin_row + gl.arange(0, RB, gl.SliceLayout(1, L2))
        inside2 = row2 < q_len * G
        if final:
            all_of = gl.where(total > 0, total, 1.0)
            all_of = gl.convert_layout(all_of, gl.SliceLayout(1, L2))
            token = q_start + row2 // G
            q_head = head * G + row2 % G
            to = token.to(gl.int64) * o_t + q_head.to(gl.int64) * o_h
            known = (inside2 & (token < T))[:, None]
            result = (acc * (1.0 / all_of)[:, None]).to(out.dtype.element_ty)
            gl.store(out + to[:, None] + dim, result, mask=known)
        else:
            _all_here()  # all have read what is written over
            part_of_all = 2 * ((owner + first) * H + head) + (first == 0).to(gl.int32)
            to_acc = part_acc + ((part_of_all * ROWS + row2) * D)[:, None] + dim
            gl.store(to_acc, acc, mask=inside2[:, None])
            to_sums = part_sums + part_of_all * 2 * ROWS + row
            gl.store(to_sums, top, mask=inside)
            gl.store(to_sums + ROWS, total, mask=inside)


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
def merge(
    owner, run, q_start, q_len, head, T, pieces, arrivals, ends,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr, RB: gl.constexpr, BP: gl.constexpr,
):  # fmt: skip
    """Say that the part is there. The last to come merges them, always in the order of the runs.

    Many are merged in groups first, by the last of each group. A group counts at its first run,
    at which no segment begins; the group of the owner, which counts all, at the run after it.
    """
    parts = gl.load(pieces + owner * PIECE + 3)
    many = parts > _GROUP
    first = gl.where(many, (run - owner) // _GROUP * _GROUP, 0)
    n = gl.where(many, gl.minimum(parts - first, _GROUP), parts)
    place = gl.where(many, owner + gl.maximum(first, 1), owner)
    step = gl.to_tensor(1)
    levels = gl.where(many, 2, 1)
    # One loop, and so the code of a level once: it is often cold.
    while levels > 0:
        last = n == 1
        if n > 1:
            last = _arrive(arrivals + place * H + head, n)
            if last:
                _combine(
                    owner, first, n, step, levels == 1, q_start, q_len, head, T, ends,
                    H, G, D, ROWS, RB, BP,
                )  # fmt: skip
        levels = gl.where(last, levels - 1, 0)
        first = first * 0
        step = step * 0 + _GROUP
        n = (parts + _GROUP - 1) // _GROUP
        place = owner


@gluon.jit
def zero_rows(
    first, step, out, live, gaps, T, o_t, o_h,
    HQ: gl.constexpr, D: gl.constexpr, BG: gl.constexpr,
):  # fmt: skip
    """Zero the rows without a segment, in blocks of BG, the first-th and every step-th after it.

    Rows from T on count as such in gaps, too.
    """
    L: gl.constexpr = row_layout(D)
    dim = gl.arange(0, D, gl.SliceLayout(0, L))[None, :]
    nothing = gl.full([BG, D], 0.0, out.dtype.element_ty, L)
    for block in range(first, (T + BG - 1) // BG, step):
        if gl.load(gaps + block) > gl.maximum((block + 1) * BG - T, 0):
            token = block * BG + gl.arange(0, BG, gl.SliceLayout(1, L))
            dead = gl.load(live + token, mask=token < T, other=1) == 0
            at = token.to(gl.int64) * o_t
            for head in range(HQ):
                to = out + (at + gl.to_tensor(head).to(gl.int64) * o_h)[:, None] + dim
                gl.store(to, nothing, mask=dead[:, None])
