"""What the kernels share: which keys a segment sees, where they lie, and one step of softmax."""

import triton
import triton.language as tl

PIECE = tl.constexpr(12)  # numbers that say what a run is


@triton.jit
def first_key(q_len, kv_end, window):
    """The oldest position that a query of the segment attends."""
    return tl.maximum(kv_end - q_len - window + 1, 0)


@triton.jit
def short_tiles(q_len, kv_end, window, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Key tiles of one KV head of a segment, 0 for empty segments and for long ones."""
    keys = kv_end - first_key(q_len, kv_end, window)
    short = (q_len > 0) & (kv_end > 0) & (q_len * G <= BM)
    return tl.where(short, (keys + BN - 1) // BN, 0)


@triton.jit
def long_tiles(q_len, kv_end, G: tl.constexpr, BM_SHORT: tl.constexpr, BM: tl.constexpr):
    """Query tiles of one KV head of a segment, 0 for empty segments and for short ones."""
    long = (kv_end > 0) & (q_len * G > BM_SHORT)
    return tl.where(long, (q_len * G + BM - 1) // BM, 0)


@triton.jit
def slots_of(start, rows, BN: tl.constexpr, SMALL: tl.constexpr):
    """Rows, as int64, of positions start .. start + BN; SMALL says that a tile may lap a ring."""
    slot = tl.arange(0, BN)
    if SMALL:
        slot = (start + slot) % rows
    else:
        slot = start % rows + slot
        slot = tl.where(slot >= rows, slot - rows, slot)
    return slot.to(tl.int64)


@triton.jit
def absorb(scores, v, acc, top, total, scale, MASKED: tl.constexpr):
    """Take a tile into the running softmax; scores are unscaled, -inf where masked; scale > 0.

    top: largest scaled score so far; total: sum of 2 ** (score - top); acc: the same of V.
    """
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    base = new
    if MASKED:  # a row that has seen nothing yet: -inf - -inf would be NaN
        base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores * scale - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, new, total
