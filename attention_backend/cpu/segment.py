"""One segment by itself, exact: it reads the rows that its queries attend and no others."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from .masks import TileMasks
from .schedule import Segment
from .tiles import Tile

__all__ = ["SegmentRun", "column_block"]


def column_block(
    cache: torch.Tensor, first_col: int, num_cols: int, first_slot: int, num_slots: int
) -> torch.Tensor:
    """View [num_cols, H, num_slots, D] of a cache [rows, cols, H, D]."""
    row, col, head, dim = cache.stride()
    return cache.as_strided(
        (num_cols, cache.shape[2], num_slots, cache.shape[3]),
        (col, head, row, dim),
        cache.storage_offset() + first_col * col + first_slot * row,
    )


class SegmentRun:
    """A segment with its tiles and masks, ready to run in every layer of a step."""

    __slots__ = ("_col", "_q_len", "_q_start", "_slots", "_tiles")

    def __init__(
        self, segment: Segment, rows: int, tiles: tuple[Tile, ...], masks: TileMasks
    ) -> None:
        self._q_start, self._q_len, self._col = segment.q_start, segment.q_len, segment.col
        self._slots = segment.slot_runs(rows)
        self._tiles = [(tile, masks.of(tile)) for tile in tiles]

    @property
    def stop_slot(self) -> int:
        """All slots that the segment attends are below."""
        return max(stop for _, stop in self._slots)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Write the segment's rows of out. The query heads of a KV head are rows of one matrix."""
        heads, size = key_cache.shape[2:]
        group = query.shape[1] // heads
        keys, values = self._attended(key_cache), self._attended(value_cache)
        rows = slice(self._q_start, self._q_start + self._q_len)
        target = out[rows].view(self._q_len, heads, group, size)
        if self._q_len == 1:
            queries = query[rows].view(1, heads, group, size)
            target.copy_(scaled_dot_product_attention(queries, keys, values, scale=scale))
            return
        queries = query[rows].view(self._q_len, heads, group, size).transpose(0, 1)
        queries = queries.reshape(1, heads, self._q_len * group, size)
        for tile, mask in self._tiles:
            first, stop = tile.first_query, tile.first_query + tile.num_queries
            seen = slice(tile.first_key, tile.first_key + tile.num_keys)
            result = scaled_dot_product_attention(
                queries[:, :, first * group : stop * group],
                keys[:, :, seen],
                values[:, :, seen],
                attn_mask=mask,
                scale=scale,
            )
            result = result.view(heads, tile.num_queries, group, size)
            target[first:stop].copy_(result.transpose(0, 1))

    def _attended(self, cache: torch.Tensor) -> torch.Tensor:
        """[1, H, num_keys, D], oldest key first: a view, or a copy where slots wrap around."""
        runs = [
            column_block(cache, self._col, 1, start, stop - start) for start, stop in self._slots
        ]
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim=2)
