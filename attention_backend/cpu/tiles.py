"""Query tiles of a segment: which keys each of them needs. Free of torch."""

from dataclasses import dataclass

from .schedule import Segment

__all__ = ["TILE_ROWS", "Tile", "tiles_of"]

TILE_ROWS = 512
"""Rows of a tile, at most: its queries times the query heads of a KV head.

More rows skip less of what causality and window hide, fewer make more calls.
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive queries of a segment and the keys that at least one of them sees.

    first_query counts from the segment's first query, first_key from its first_key, and
    first_position, the position of the first query, from the tile's first key.
    """

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    first_position: int


def tiles_of(segment: Segment, *, window: int | None, causal: bool, group: int) -> tuple[Tile, ...]:
    """Tiles that cover the segment's queries in order."""
    length = max(1, TILE_ROWS // group)
    position = segment.kv_end - segment.q_len
    tiles = []
    for first in range(0, segment.q_len, length):
        stop = min(first + length, segment.q_len)
        low = 0 if window is None else max(0, position + first - window + 1)
        high = position + stop if causal else segment.kv_end
        tiles.append(
            Tile(
                first_query=first,
                num_queries=stop - first,
                first_key=low - segment.first_key,
                num_keys=high - low,
                first_position=position + first - low,
            )
        )
    return tuple(tiles)
