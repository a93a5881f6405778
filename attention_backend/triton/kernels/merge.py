"""Parts of heads that programs share, their merge, and the rows that nothing covers."""

import triton
import triton.language as tl

from .segments import PIECE


@triton.jit
def leave_part(
    part, row, row_ok, acc, top, total, part_acc, part_sums, dim, dim_ok,
    ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """part_acc [2P, ROWS, BD] holds sums of V, part_sums [2P, 2, ROWS] largest score and total."""
    inside = row_ok[:, None] & dim_ok[None, :]
    tl.store(part_acc + (part * ROWS + row)[:, None] * BD + dim[None, :], acc, mask=inside)
    tl.store(part_sums + part * 2 * ROWS + row, top, mask=row_ok)
    tl.store(part_sums + part * 2 * ROWS + ROWS + row, total, mask=row_ok)


@triton.jit
def merge_parts(
    owner, q_start, q_len, head, T, out, pieces, arrivals, part_acc, part_sums, o_t, o_h, o_d,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
    RB: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Say that a part of the head is there; whoever leaves the last one merges them all.

    owner: the run that begins the segment. Parts are added in the order of the runs, whoever
    adds them, so the bits do not depend on who is last. The count is zero again when all is done.
    """
    parts = tl.load(pieces + owner * PIECE + 3)
    tl.debug_barrier()  # all of the part is stored before its arrival is told
    first = owner * H + head
    before = tl.atomic_add(arrivals + first, 1, sem="acq_rel")
    tl.debug_barrier()
    if before == parts - 1:
        tl.store(arrivals + first, 0)
        i = tl.arange(0, BP)
        at_once = tl.arange(0, RB * BD)
        dim = at_once % BD
        for begin_row in range(0, q_len * G, RB):
            row = begin_row + at_once // BD
            inside = (row < q_len * G) & (dim < D)
            acc = tl.zeros([RB * BD], tl.float32)
            top = tl.full([RB * BD], float("-inf"), tl.float32)
            total = tl.zeros([RB * BD], tl.float32)
            for at in range(0, parts, BP):
                part = 2 * (first + (at + i) * H) + (at + i == 0).to(tl.int32)
                there = (at + i < parts)[:, None] & inside[None, :]
                sums = part_sums + part[:, None] * 2 * ROWS + row[None, :]
                tops = tl.load(sums, mask=there, other=float("-inf"))
                totals = tl.load(sums + ROWS, mask=there, other=0.0)
                accs = part_acc + (part[:, None] * ROWS + row[None, :]) * BD + dim[None, :]
                values = tl.load(accs, mask=there, other=0.0)
                new = tl.maximum(top, tl.max(tops, 0))
                base = tl.where(new == float("-inf"), 0.0, new)
                weights = tl.exp2(tops - base[None, :])
                fade = tl.exp2(top - base)
                total = total * fade + tl.sum(weights * totals, 0)
                acc = acc * fade + tl.sum(weights * values, 0)
                top = new
            result = acc / tl.where(total > 0, total, 1.0)
            token = q_start + row // G
            q_head = (head * G + row % G).to(tl.int64)
            o_at = out + token.to(tl.int64) * o_t + q_head * o_h + dim.to(tl.int64) * o_d
            tl.store(o_at, result.to(out.dtype.element_ty), mask=inside & (token < T))


@triton.jit
def zero_rows(
    p, gap, out, live, gaps, T, o_t, o_h, o_d,
    HQ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BG: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Zero the rows that have no segment, in blocks of BG.

    gap: the number of such in block p, rows from T on included, which never have one.
    """
    for block in range(p, (T + BG - 1) // BG, tl.num_programs(0)):
        if block != p:
            gap = tl.load(gaps + block)
        if gap > tl.maximum((block + 1) * BG - T, 0):
            dim = tl.arange(0, BD).to(tl.int64)[None, :]
            nothing = tl.zeros([BT, BD], out.dtype.element_ty)
            for at in range(block * BG, (block + 1) * BG, BT):
                token = at + tl.arange(0, BT)
                dead = (tl.load(live + token, mask=token < T, other=1) == 0)[:, None]
                row = token.to(tl.int64)[:, None]
                for head in range(HQ):
                    o_at = out + row * o_t + (head + tl.zeros([1, 1], tl.int64)) * o_h + dim * o_d
                    tl.store(o_at, nothing, mask=dead & (dim < D))
