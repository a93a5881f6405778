"""Which extents back which pages of which column; those in several columns are counted once.

Pure bookkeeping of one region. An extent is at the same page in every column that has it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .extents import Extent
from .mapped import Exchange, MappedColumn

__all__ = ["ExtentTable"]


class ExtentTable:
    """Columns as lists of extents.

    Pages are counted by whole extents: ``committed`` of those that a live column has, ``idle`` of
    those that are mapped and no live column has.
    """

    def __init__(self, cols: int) -> None:
        self.columns = [MappedColumn() for _ in range(cols)]
        self.committed = 0
        self.idle = 0

    def append(self, col: int, extents: Sequence[Extent]) -> None:
        """Extents were mapped behind the live ones; there are no idle ones."""
        column = self.columns[col]
        assert not column.idle_pages
        for extent in extents:
            column.extents.append(extent)
            extent.mappings += 1
            self._hold(col, extent, new=True)

    def next_reusable(self, col: int) -> int:
        """Pages of the next idle extent if no live column has it, else 0."""
        column = self.columns[col]
        if column.live == len(column.extents):
            return 0
        extent = column.extents[column.live]
        return 0 if extent.holders else extent.pages

    def make_live(self, col: int) -> None:
        """The next idle extent becomes live where it is."""
        column = self.columns[col]
        extent = column.extents[column.live]
        column.idle_pages -= extent.pages
        self._hold(col, extent, new=False)

    def retire(self, col: int, kept: int, pages: int) -> list[tuple[int, int]]:
        """Make extents idle that hold none of the first ``kept`` pages, private ones of ``pages``.

        Returns the ranges of live pages that have to be zeroed.
        """
        column = self.columns[col]
        index = cut = column.live
        at = end = column.live_pages
        while index:
            extent = column.extents[index - 1]
            at, end = at - extent.pages, at
            if at < kept:
                break
            index -= 1
            if at >= pages or len(extent.holders) > 1:
                cut = index
        for extent in column.extents[cut : column.live]:
            self._let_go(col, extent)
        column.live = cut
        column.shared_end = min(column.shared_end, column.live_pages)
        column.stale = None
        if index and kept < end and len(column.extents[index - 1].holders) > 1:
            column.stale = (kept, end)  # it is others' too
            kept = end
        return [(kept, column.live_pages)] if kept < column.live_pages else []

    def last_idle(self, col: int, most: int | None) -> list[Extent]:
        """The last ``most`` idle extents, None: all."""
        column = self.columns[col]
        first = column.live if most is None else max(column.live, len(column.extents) - most)
        return column.extents[first:]

    def drop_idle(self, col: int, count: int) -> list[Extent]:
        """Forget the last idle extents; returns those that are mapped nowhere any more."""
        column, free = self.columns[col], list[Extent]()
        for _ in range(count):
            extent = column.extents.pop()
            column.idle_pages -= extent.pages
            extent.mappings -= 1
            if not extent.mappings:
                self.idle -= extent.pages
                free.append(extent)
        return free

    def idle_sizes(self, col: int) -> Iterator[int]:
        """Pages of each extent that would be free if the column's idle ones were dropped."""
        column = self.columns[col]
        return (extent.pages for extent in column.extents[column.live :] if extent.mappings == 1)

    # --- sharing

    def within(self, col: int, pages: int) -> list[Extent]:
        """The extents that lie wholly in the first pages of a column: others can have them too."""
        column, found = self.columns[col], list[Extent]()
        for extent in column.extents[: column.live]:
            pages -= extent.pages
            if pages < 0:
                break
            found.append(extent)
        return found

    def share(self, src: int, dst: int, pages: int) -> None:
        """The first pages of ``dst`` are now those of ``src``."""
        self.columns[dst].shared_end = pages
        self.columns[src].shared_end = max(self.columns[src].shared_end, pages)

    def exchanges(
        self, col: int, first: int, last: int, pages: int, gone: Mapping[Extent, int]
    ) -> list[Exchange]:
        """What must be exchanged before pages [first, last) are written.

        ``pages``: how many the column needs. ``gone``: how many columns of an extent exchange it
        before; whoever is left alone with it writes in place.
        """
        column, found, at = self.columns[col], list[Exchange](), 0
        if first >= min(last, column.shared_end):
            return found
        for index, extent in enumerate(column.extents[: column.live]):
            if at >= last:
                break
            end = at + extent.pages
            if first < end and len(extent.holders) - gone.get(extent, 0) > 1:
                needed = min(end, pages) if index == column.live - 1 else end
                found.append(Exchange(index, at, extent, needed - at))
            at = end
        return found

    def copies_needed(self, writes: Sequence[tuple[int, int, int, int]]) -> int:
        """Pages that exchanges take for (column, first, last, pages) one after the other."""
        needed, gone = 0, Counter[Extent]()
        for write in writes:
            for exchange in self.exchanges(*write, gone):
                needed += exchange.pages
                gone[exchange.extent] += 1
        return needed

    def replace(self, col: int, exchange: Exchange, extents: Sequence[Extent]) -> None:
        """Private extents were mapped in the place of a shared one."""
        column, old = self.columns[col], exchange.extent
        column.extents[exchange.index : exchange.index + 1] = extents
        column.live += len(extents) - 1
        column.live_pages += exchange.pages - old.pages
        old.holders.remove(col)
        old.mappings -= 1
        for extent in extents:
            extent.mappings = 1
            extent.holders.add(col)
        self.committed += exchange.pages
        if column.stale and exchange.first <= column.stale[0] < exchange.first + old.pages:
            column.stale = None

    def take_stale(self, col: int) -> tuple[int, int] | None:
        """Stale pages that are in no other column any more, and are to be zeroed now."""
        column = self.columns[col]
        at = column.shared_end = 0
        for extent in column.extents[: column.live]:
            at += extent.pages
            if len(extent.holders) > 1:
                column.shared_end = at
        stale = column.stale
        if stale is None or column.shared_end >= stale[1]:
            return None
        column.stale = None
        return stale

    def unneeded(self, pages: Sequence[int], col: int) -> Iterator[tuple[Extent, int]]:
        """Extents of a column that it does not need whole, with the pages that nobody needs.

        ``pages``: of each column how many it needs.
        """
        column, end = self.columns[col], 0
        for extent in column.extents[: column.live]:
            end += extent.pages
            if end > pages[col]:
                most = max(pages[holder] for holder in extent.holders)
                yield extent, min(extent.pages, max(0, end - most))

    def _hold(self, col: int, extent: Extent, *, new: bool) -> None:
        column = self.columns[col]
        column.live += 1
        column.live_pages += extent.pages
        if not extent.holders:
            self.committed += extent.pages
            if not new:
                self.idle -= extent.pages
        extent.holders.add(col)

    def _let_go(self, col: int, extent: Extent) -> None:
        column = self.columns[col]
        column.live_pages -= extent.pages
        column.idle_pages += extent.pages
        extent.holders.remove(col)
        if not extent.holders:
            self.committed -= extent.pages
            self.idle += extent.pages
