"""Which columns hold the beginning of a prompt, and can lend it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_kv_columns.kv_manager.geometry import CacheGeometry
from vllm_kv_columns.plugin.columns import Column, Hit
from vllm_kv_columns.plugin.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_kv_columns.plugin.block_events import BlockEvents

__all__ = ["Lenders"]


class Lenders:
    """Blocks of tokens that columns hold, and those that they come to hold with the next step.

    Args:
        geometry: of the cache.
        block_tokens: tokens of a hashed block.
        columns: all that are not free, by number; another's to change.

    Attributes:
        events: hears of blocks when the first column comes to hold them, and when none does any
            longer; None: nobody wants to know.
    """

    events: "BlockEvents | None" = None

    def __init__(
        self, geometry: CacheGeometry, block_tokens: int, columns: Mapping[int, Column]
    ) -> None:
        self._geometry, self._block_tokens, self._columns = geometry, block_tokens, columns
        self._index = PrefixIndex()
        self._ends = PrefixIndex()  # of retained columns the last block alone
        # Of the step that is being planned: blocks that its columns come to hold.
        self._coming: dict[Column, list[bytes]] = {}
        self._coming_hashes: Counter[bytes] = Counter()  # and how many of them do

    def find(self, hashes: Sequence[bytes], max_tokens: int) -> Hit:
        """The longest prefix of a prompt, of at most `max_tokens`, that a column can lend.

        A ring holds what the next token looks back at only down to its floor, so that of columns
        with rings a shorter prefix may be all that serves.
        """
        most = min(len(hashes), max_tokens // self._block_tokens)
        coming = self._index.longest(hashes, most, self._coming_hashes.__contains__)
        seen: set[int] = set()
        for blocks in range(self._index.longest(hashes, most), 0, -1):
            source = self._lender(hashes[blocks - 1], blocks * self._block_tokens, seen)
            if source is not None:
                return Hit(source, blocks, coming)
        return Hit(None, 0, coming)

    def holds_any(self, column: Column) -> bool:
        """Whether the column holds a block, or comes to."""
        return bool(column.hashes) or column in self._coming

    def begin(self, column: Column) -> None:
        """The column, new so far, holds the blocks that it says."""
        self._index.add(column.number, column.hashes)

    def retain(self, column: Column) -> None:
        """The column is no request's any more."""
        self._ends.add(column.number, column.hashes[-1:])

    def stop_retaining(self, column: Column) -> None:
        """The retained column becomes a request's, or is given up."""
        self._ends.remove(column.number, column.hashes[-1:])

    def forget(self, column: Column, keep: int) -> None:
        """Of a column that is not retained only the first `keep` blocks can be lent."""
        gone = column.hashes[keep:]
        self._index.remove(column.number, gone)
        del column.hashes[keep:]
        self._tell_gone(gone)

    def forget_all(self, column: Column) -> None:
        """What the column, which is not retained, holds and comes to hold is gone."""
        self.will_not_hold(column)
        self.forget(column, 0)

    def will_hold(self, column: Column, request: "Request", tokens: int) -> None:
        """After the step that is being planned the column holds these tokens of its request."""
        coming, hashes = self._coming.get(column), request.block_hashes
        known = len(column.hashes) + (len(coming) if coming else 0)
        blocks = min(tokens // self._block_tokens, len(hashes))
        if blocks > known:
            if self.events is not None:
                held = self._index.longest(hashes, blocks, self._coming_hashes.__contains__)
                self.events.stored(request, range(held, blocks))
            new = hashes[known:blocks]
            self._coming.setdefault(column, []).extend(new)
            self._coming_hashes.update(new)

    def will_not_hold(self, column: Column) -> None:
        """The step that is being planned goes without the column's request after all."""
        coming = self._coming.pop(column, None)
        if coming:
            self._coming_hashes -= Counter(coming)
            self._tell_gone(coming)

    def next_step(self) -> None:
        """The step that was planned is on its way, and what it writes can be lent."""
        for column, hashes in self._coming.items():
            retained = column.request is None
            if retained:
                self.stop_retaining(column)
            self._index.add(column.number, hashes)
            column.hashes += hashes
            if retained:
                self.retain(column)
        self._coming.clear()
        self._coming_hashes.clear()

    def _tell_gone(self, blocks: Sequence[bytes]) -> None:
        """A column has these blocks no longer, the last of them first."""
        if self.events is not None:
            self.events.removed(
                one
                for one in reversed(blocks)
                if one not in self._index and one not in self._coming_hashes
            )

    def _lender(self, block: bytes, tokens: int, seen: set[int]) -> Column | None:
        """A column that ends with the block and is retained, at best, else the latest that has it.

        The latest may be a clone, and then its memory is cut where the prefix ends.

        Args:
            seen: columns that could not lend more tokens, and so not these; more are added.
        """
        holders = self._index.columns(block)
        if len(holders) == len(seen):
            return None
        for number in (*reversed(self._ends.columns(block)), *reversed(holders)):
            if number not in seen:
                column = self._columns[number]
                if self._floor(column) <= tokens:
                    return column
                seen.add(number)
        return None

    def _floor(self, column: Column) -> int:
        """Fewest tokens that the column can lend."""
        if column.floor is None:
            column.floor = self._geometry.floor(column.high)
        return column.floor
