"""Which file page backs which page of which column; pages in several columns are counted.

Pure bookkeeping of one region: a file page is a number, its offset in the file is the number
times the page size. Numbers are handed out so that a page of a column that grows in peace follows
the one before it in the file too (one mapping for the whole run), and so that a number given back
while shared is never handed out again.
"""

from collections import Counter
from collections.abc import Iterable

__all__ = ["PageTable", "runs"]


class PageTable:
    """Columns as lists of file pages, always a prefix of the column."""

    def __init__(self, cols: int, pages_per_column: int) -> None:
        self.pages: list[list[int]] = [[] for _ in range(cols)]
        self.committed = 0
        self._pages_per_column = pages_per_column
        self._extents: list[int | None] = [None] * cols  # first file page of the current extent
        self._next_extent = 0
        self._sharers: dict[int, int] = {}  # file page -> columns, for two and more

    @property
    def any_shared(self) -> bool:
        return bool(self._sharers)

    def is_shared(self, page: int) -> bool:
        return page in self._sharers

    def fresh(self, col: int, index: int) -> int:
        """File page for page ``index`` of a column, in no other column's use. Reads as zeros."""
        extent = self._extents[col]
        if extent is None:
            extent = self._extents[col] = self._next_extent
            self._next_extent += self._pages_per_column
        return extent + index

    def append(self, col: int, first: int, count: int) -> None:
        """Pages first .. first+count now back the column's next pages."""
        self.pages[col].extend(range(first, first + count))
        self.committed += count

    def replace_shared(self, col: int, index: int, page: int) -> None:
        """A private ``page`` takes the place of a shared one, which the others keep."""
        self._drop(self.pages[col][index])
        self.pages[col][index] = page
        self.committed += 1

    def truncate(self, col: int, keep: int) -> list[int]:
        """Drop all but the first ``keep`` pages; returns those that no column holds any more."""
        dropped = self.pages[col][keep:]
        freed = [page for page in dropped if self._drop(page)]
        del self.pages[col][keep:]
        if keep == 0:
            self._extents[col] = None
        self.committed -= len(freed)
        return freed

    def share(self, src: int, dst: int, count: int) -> None:
        """The first ``count`` pages of ``src`` now back the empty ``dst`` too.

        Both columns go on in new extents, so that neither is handed a page of the other.
        """
        shared = self.pages[src][:count]
        for page in shared:
            self._sharers[page] = self._sharers.get(page, 1) + 1
        self.pages[dst] = shared
        self._extents[src] = self._extents[dst] = None

    def copies_needed(self, writers: Counter[int]) -> int:
        """Copies made when ``writers[page]`` of the holders of each page write to it.

        The last holder of a page writes in place.
        """
        return sum(
            min(count, self._sharers[page] - 1)
            for page, count in writers.items()
            if page in self._sharers
        )

    def _drop(self, page: int) -> bool:
        """One holder less; whether it was the last."""
        count = self._sharers.get(page, 1)
        if count > 2:
            self._sharers[page] = count - 1
        elif count == 2:
            del self._sharers[page]
        return count == 1


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending runs of consecutive numbers as (first, count)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found
