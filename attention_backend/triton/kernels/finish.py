"""What is left of a layer: merge the parts of heads that programs shared, zero the other rows."""

import triton
import triton.language as tl


@triton.jit
def _merge(
    p,
    lane,
    out,
    seq_info,
    pieces,
    part_acc,
    part_sums,
    T,
    info_s,
    info_c,
    o_t,
    o_h,
    o_d,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    LANES: tl.constexpr,
    BP: tl.constexpr,
):
    """Rows lane, lane + LANES .. of the head that program p began and others went on with."""
    parts = tl.load(pieces + p * 8 + 6)
    if parts > 0:
        seg = tl.load(pieces + p * 8 + 4)
        head = tl.load(pieces + p * 8 + 5)
        q_start = tl.load(seq_info + seg * info_s)
        q_len = tl.load(seq_info + seg * info_s + info_c)
        dim = tl.arange(0, BD)
        for row in range(lane, q_len * G, LANES):
            acc = tl.zeros([BD], tl.float32)
            top = tl.full([1], float("-inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            for at in range(0, parts, BP):
                i = at + tl.arange(0, BP)
                part = 2 * (p + i) + (i == 0).to(tl.int32)
                there = i < parts
                sums = part_sums + part * 2 * BM + row
                tops = tl.load(sums, mask=there, other=float("-inf"))
                totals = tl.load(sums + BM, mask=there, other=0.0)
                values = tl.load(
                    part_acc + (part * BM + row)[:, None] * BD + dim[None, :],
                    mask=there[:, None] & (dim < D)[None, :],
                    other=0.0,
                )
                new = tl.maximum(top, tl.max(tops, 0))
                base = tl.where(new == float("-inf"), 0.0, new)
                weights = tl.exp2(tops - base)
                fade = tl.exp2(top - base)
                total = total * fade + tl.sum(weights * totals, 0)
                acc = acc * fade + tl.sum(weights[:, None] * values, 0)
                top = new
            result = acc / tl.where(total > 0, total, 1.0)
            token = (q_start + row // G).to(tl.int64)
            q_head = (head * G + row % G).to(tl.int64)
            o_at = out + token * o_t + q_head * o_h + dim.to(tl.int64) * o_d
            tl.store(o_at, result.to(out.dtype.element_ty), mask=dim < tl.where(token < T, D, 0))


@triton.jit
def _zero(
    block,
    out,
    live,
    T,
    o_t,
    o_h,
    o_d,
    HQ: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
):
    """Zero those of BT rows that no segment with keys covers."""
    token = block * BT + tl.arange(0, BT)
    dead = (tl.load(live + token, mask=token < T, other=1) == 0)[:, None]
    if tl.max(dead.to(tl.int32)) > 0:
        row = token.to(tl.int64)[:, None]
        dim = tl.arange(0, BD).to(tl.int64)[None, :]
        nothing = tl.zeros([BT, BD], out.dtype.element_ty)
        for head in range(HQ):
            at = out + row * o_t + (head + tl.zeros([1, 1], tl.int64)) * o_h + dim * o_d
            tl.store(at, nothing, mask=dead & (dim < D))


@triton.jit(do_not_specialize=["T"])
def finish(
    out,
    seq_info,
    pieces,
    live,
    part_acc,
    part_sums,
    T,
    info_s,
    info_c,
    o_t,
    o_h,
    o_d,
    P: tl.constexpr,
    HQ: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    LANES: tl.constexpr,
    BP: tl.constexpr,
    BT: tl.constexpr,
):
    """Programs 0 .. P * LANES merge, the others zero BT rows each. No atomics: bits repeat."""
    pid = tl.program_id(0)
    if pid < P * LANES:
        _merge(
            pid // LANES, pid % LANES, out, seq_info, pieces, part_acc, part_sums, T,
            info_s, info_c, o_t, o_h, o_d, G, D, BD, BM, LANES, BP,
        )  # fmt: skip
    else:
        _zero(pid - P * LANES, out, live, T, o_t, o_h, o_d, HQ, D, BD, BT)
