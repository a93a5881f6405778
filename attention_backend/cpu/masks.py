"""Additive masks: 0 where a query sees a key, -inf where not, in the dtype of the query."""

from collections.abc import Iterable

import torch

from .schedule import DecodeBatch
from .tiles import Tile

__all__ = ["TileMasks", "band_mask", "batch_mask"]


def band_mask(
    num_queries: int,
    num_keys: int,
    *,
    first_position: int,
    window: int | None,
    causal: bool,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[num_queries * group, num_keys]: consecutive queries over keys at positions 0, 1, 2 ...

    first_position is that of the first query; each query is repeated for the ``group`` query
    heads of a KV head.
    """
    queries = torch.arange(first_position, first_position + num_queries).unsqueeze(1)
    keys = torch.arange(num_keys).unsqueeze(0)
    hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    if causal:
        hidden |= keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    mask = torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(group, dim=0)


def batch_mask(batch: DecodeBatch, dtype: torch.dtype) -> torch.Tensor | None:
    """[num_cols, 1, 1, num_slots] of a decode batch; None when every column sees all slots."""
    edges = torch.tensor(batch.visible).unsqueeze(2)
    start, stop = edges[:, 0], edges[:, 1]
    slots = torch.arange(batch.first_slot, batch.first_slot + batch.num_slots).unsqueeze(0)
    # Between the two edges lies what a plain run shows, and what a wrapped run hides.
    seen = (slots >= start) ^ (slots >= stop) ^ (start >= stop)
    if bool(seen.all()):
        return None
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return mask.unsqueeze(1).unsqueeze(1)


class TileMasks:
    """The masks of a step's tiles, shared where tiles see alike.

    A causal tile's keys end at its last query, so its mask is the lower right corner of the
    largest tile's.
    """

    def __init__(
        self,
        tiles: Iterable[Tile],
        *,
        window: int | None,
        causal: bool,
        group: int,
        dtype: torch.dtype,
    ) -> None:
        self._window, self._causal, self._group, self._dtype = window, causal, group, dtype
        self._bands: dict[tuple[int, int, int], torch.Tensor] = {}
        several = [tile for tile in tiles if tile.num_queries > 1]
        if causal and several:
            num_queries = max(tile.num_queries for tile in several)
            num_keys = max(tile.num_keys for tile in several)
            self._corner = self._band(num_queries, num_keys, num_keys - num_queries)

    def of(self, tile: Tile) -> torch.Tensor | None:
        """[num_queries * group, num_keys]; None when all queries of the tile see all its keys."""
        if self._causal:
            if tile.num_queries == 1:
                return None
            return self._corner[-tile.num_queries * self._group :, -tile.num_keys :]
        last_position = tile.first_position + tile.num_queries - 1
        if self._window is None or last_position < self._window:
            return None
        return self._band(tile.num_queries, tile.num_keys, tile.first_position)

    def _band(self, num_queries: int, num_keys: int, first_position: int) -> torch.Tensor:
        key = (num_queries, num_keys, first_position)
        if key not in self._bands:
            self._bands[key] = band_mask(
                num_queries,
                num_keys,
                first_position=first_position,
                window=self._window,
                causal=self._causal,
                group=self._group,
                dtype=self._dtype,
            )
        return self._bands[key]
