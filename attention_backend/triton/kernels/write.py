"""The slot write."""

import triton
import triton.language as tl

from .order import after_earlier_kernels, let_later_kernels_start


@triton.jit(do_not_specialize=["rows"])
def write_slots(
    key,
    value,
    key_cache,
    value_cache,
    seq_cols,
    positions,
    rows,
    new_k_t,
    new_k_h,
    new_k_d,
    new_v_t,
    new_v_h,
    new_v_d,
    k_row,
    k_col,
    k_h,
    k_d,
    v_row,
    v_col,
    v_h,
    v_d,
    H: tl.constexpr,
    D: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (t, j): heads j*BH .. of token t. Tokens of column 0 go to its row 0."""
    let_later_kernels_start(OVERLAP)
    after_earlier_kernels(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BH + tl.arange(0, BH)).to(tl.int64)[:, None]
    dim = tl.arange(0, BD).to(tl.int64)[None, :]
    inside = (head < H) & (dim < D)
    col = tl.load(seq_cols + token).to(tl.int64)
    position = tl.load(positions + token)
    row = tl.where(col == 0, 0, position % rows).to(tl.int64)
    k = tl.load(key + token * new_k_t + head * new_k_h + dim * new_k_d, mask=inside)
    v = tl.load(value + token * new_v_t + head * new_v_h + dim * new_v_d, mask=inside)
    tl.store(key_cache + col * k_col + row * k_row + head * k_h + dim * k_d, k, mask=inside)
    tl.store(value_cache + col * v_col + row * v_row + head * v_h + dim * v_d, v, mask=inside)
