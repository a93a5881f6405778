"""Many decodes in one call over a block of columns, padded to the longest of them."""

import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from .masks import batch_mask
from .schedule import DecodeBatch
from .segment import column_block

__all__ = ["BatchRun"]


class BatchRun:
    """A decode batch with its mask and row numbers, ready to run in every layer of a step."""

    __slots__ = ("_block", "_first_row", "_mask", "_num_rows", "_pick", "_rows", "_take", "members")

    def __init__(self, batch: DecodeBatch, dtype: torch.dtype) -> None:
        self.members = batch.members
        self._block = (batch.first_col, batch.num_cols, batch.first_slot, batch.num_slots)
        self._mask = batch_mask(batch, dtype)
        rows = [member.q_start for member in batch.members]
        offsets = [member.col - batch.first_col for member in batch.members]
        self._first_row, self._num_rows = rows[0], len(rows)
        consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
        self._rows = None if consecutive else torch.tensor(rows)
        self._take = self._pick = None
        if not consecutive or offsets != list(range(batch.num_cols)):
            # Query row of each column (an idle one takes any), and column of each query row.
            take = [rows[0]] * batch.num_cols
            for row, offset in zip(rows, offsets, strict=True):
                take[offset] = row
            self._take, self._pick = torch.tensor(take), torch.tensor(offsets)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> bool:
        """Write the members' rows of out. Returns whether the result is good.

        The block holds rows that a member does not attend. Their weight is zero, and only a NaN
        or infinity among them can reach the result, which then is not finite: False, and the
        members are to be attended one by one.
        """
        heads, size = key_cache.shape[2:]
        shape = (-1, heads, query.shape[1] // heads, size)
        rows = slice(self._first_row, self._first_row + self._num_rows)
        queries = query[rows] if self._take is None else query.index_select(0, self._take)
        result = scaled_dot_product_attention(
            queries.view(shape),
            column_block(key_cache, *self._block),
            column_block(value_cache, *self._block),
            attn_mask=self._mask,
            scale=scale,
        )
        if self._pick is None:
            out[rows].view(shape).copy_(result)
        elif self._rows is None:
            result = torch.index_select(result, 0, self._pick, out=out[rows].view(shape))
        else:
            result = result.index_select(0, self._pick)
            out.index_copy_(0, self._rows, result.view(-1, *out.shape[1:]))
        return math.isfinite(result.sum(dtype=torch.float32).item())
