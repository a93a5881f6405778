"""Columns as the scheduler knows them: numbers that are free, and what the others hold."""

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

__all__ = ["Column", "FreeColumns", "Hit"]


class FreeColumns:
    """Columns 1 .. count that hold nothing; handed out lowest first, or first given first."""

    def __init__(self, count: int, lowest_first: bool) -> None:
        self._lowest_first = lowest_first
        self._free = deque(range(1, count + 1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.popleft()

    def give(self, column: int) -> None:
        if self._lowest_first:
            insort(self._free, column)
        else:
            self._free.append(column)


@dataclass(eq=False)
class Column:
    """A column that holds something, or is about to.

    Attributes:
        number: as workers know it, from 1.
        pages: of each region in order, the pages under its rows.
        hashes: of the blocks of tokens that it holds since an earlier step.
        cuts: of each region, numbers of pages below which a store can tell pages apart.
        high: positions 0 .. high-1 may have been written.
        floor: what `geometry.floor(high)` is, if it is known.
        request: whose it is; None: retained.
    """

    number: int
    pages: list[list["KVCacheBlock"]]
    cuts: list[set[int]]
    hashes: list[bytes] = field(default_factory=list)
    high: int = 0
    floor: int | None = None
    request: str | None = None


@dataclass(frozen=True)
class Hit:
    """What of a prompt is there already.

    Attributes:
        source: the column that holds it; None if nothing is there.
        blocks: of tokens, that `source` holds and every layer can go on from.
        coming: blocks that columns will hold after the step that is being planned.
    """

    source: Column | None
    blocks: int
    coming: int
