"""What a warpgroup does between the two products of a key tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .layouts import row_layout


@gluon.jit
def anew(x):
    """x, of which the compiler does not know that it is: what follows from it is not kept."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def clear(values, first, BN: gl.constexpr, D: gl.constexpr):
    """Zero the rows of V before first. Other consumers write the same."""
    PART: gl.constexpr = 32 if D < 256 else 16
    layout: gl.constexpr = row_layout(D)
    row = gl.arange(0, PART, gl.SliceLayout(1, layout))
    for part in gl.static_range(BN // PART):
        n = row + part * PART
        known = n >= first
        piece = values.slice(part * PART, PART)
        piece.store(gl.where(known[:, None], piece.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def weigh(
    scores,
    top,
    total,
    start,
    floor,
    least,
    most,
    edge,
    scale,
    BN: gl.constexpr,
):
    """One step of softmax: weights, the factor for older sums, new top and total.

    scores are unscaled; top is the largest of them so far, total the sum of weights. A row sees
    keys least .. most, both included, of this tile none below floor; edge says that some row does
    not see all of the tile.
    """
    if edge:
        columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        n = (gl.arange(0, BN, columns) + anew(0))[None, :]
        lowest = gl.maximum(least, floor) - start
        seen = (n <= (most - start)[:, None]) & (n >= lowest[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    new = gl.maximum(top, gl.max(scores, 1))
    shift = gl.where(new == float("-inf"), 0.0, new * scale)  # -inf - -inf would be NaN
    fade = gl.exp2(top * scale - shift)
    weights = gl.exp2(scores * scale - shift[:, None])
    total = total * fade + gl.sum(weights, 1)
    return weights, fade, new, total
