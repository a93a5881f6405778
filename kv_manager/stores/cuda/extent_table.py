"""Which extents back which pages of which column; those in several columns are counted once.

Pure bookkeeping of one region. An extent is at the same page in every column that has it.
"""

from collections.abc import Iterator, Sequence

from .extents import Extent
from .pieces import Cut, Piece, Pieces

__all__ = ["ExtentTable"]

Holders = dict[int, int]


class ExtentTable:
    """Columns as lists of pieces.

    Pages are counted by whole extents: ``committed`` of those that a live column has, ``idle`` of
    those that are mapped and no live column has.
    """

    def __init__(self, cols: int) -> None:
        self.columns = [Pieces() for _ in range(cols)]
        self.committed = 0
        self.idle = 0

    def append(self, col: int, pieces: Sequence[Piece]) -> None:
        """Pieces were mapped behind the live ones; there are no idle ones."""
        column = self.columns[col]
        assert not column.idle_pages
        for piece in pieces:
            column.pieces.append(piece)
            piece.extent.mappings += 1
            self._hold(col, piece, new=True)

    def next_whole(self, col: int) -> int:
        """Pages of the next idle extent if it can be live again where it is, else 0.

        That is: if no live column has it, and all of it is mapped here.
        """
        column = self.columns[col]
        if column.live == len(column.pieces):
            return 0
        piece = column.pieces[column.live]
        alone = not piece.extent.holders and piece.pages == piece.extent.pages
        return piece.pages if alone else 0

    def make_live(self, col: int) -> None:
        """The next idle piece becomes live where it is."""
        column = self.columns[col]
        piece = column.pieces[column.live]
        column.idle_pages -= piece.pages
        self._hold(col, piece, new=False)

    def retire(self, col: int, kept: int, pages: int) -> list[tuple[int, int]]:
        """Make pieces idle that hold none of the first ``kept`` pages, nor of ``pages`` if private.

        Returns the ranges of live pages that have to be zeroed.
        """
        column = self.columns[col]
        index = cut = column.live
        at = end = column.live_pages
        while index:
            piece = column.pieces[index - 1]
            at, end = at - piece.pages, at
            if at < kept:
                break
            index -= 1
            if at >= pages or self._shared(col, piece):
                cut = index
        for piece in column.pieces[cut : column.live]:
            self._let_go(col, piece)
        column.live = cut
        column.shared_end = min(column.shared_end, column.live_pages)
        column.stale = None
        if index and at + self._shared(col, column.pieces[index - 1]) > kept:
            column.stale = (kept, end)  # some of it is others' too
            column.shared_end = max(column.shared_end, end)
            kept = end
        return [(kept, column.live_pages)] if kept < column.live_pages else []

    def last_idle(self, col: int, most: int | None) -> list[Piece]:
        """The last ``most`` idle pieces, None: all."""
        column = self.columns[col]
        first = column.live if most is None else max(column.live, len(column.pieces) - most)
        return column.pieces[first:]

    def drop_idle(self, col: int, count: int) -> list[Extent]:
        """Forget the last idle pieces; returns the extents that are mapped nowhere any more."""
        column, free = self.columns[col], list[Extent]()
        for _ in range(count):
            piece = column.pieces.pop()
            column.idle_pages -= piece.pages
            piece.extent.mappings -= 1
            if not piece.extent.mappings:
                self.idle -= piece.extent.pages
                free.append(piece.extent)
        return free

    def idle_sizes(self, col: int) -> Iterator[int]:
        """Pages of each extent that would be free if the column's idle pieces were dropped."""
        column = self.columns[col]
        for piece in column.pieces[column.live :]:
            if piece.extent.mappings == 1:
                yield piece.extent.pages

    # --- sharing

    def leads(self, src: int, pages: int) -> list[Piece]:
        """What of the first pages of a column another one can have too.

        These are whole extents, and of the last one a leading part if that is half of it at least:
        the rest is lost to everybody once ``src`` has no use for it.
        """
        column, found = self.columns[src], list[Piece]()
        for piece in column.pieces[: column.live]:
            lead = min(piece.pages, pages)
            if not lead or 2 * lead < piece.extent.pages:
                break
            found.append(Piece(piece.extent, lead))
            pages = pages - lead if lead == piece.pages else 0
        return found

    def share(self, src: int, dst: int, leads: Sequence[Piece]) -> None:
        """The leads of ``src`` were mapped in the empty ``dst``."""
        self.append(dst, leads)
        end = self.columns[dst].shared_end = self.columns[dst].live_pages
        self.columns[src].shared_end = max(self.columns[src].shared_end, end)

    def cuts(
        self, col: int, first: int, last: int, after: dict[Extent, Holders] | None = None
    ) -> list[Cut]:
        """What must be private before pages [first, last) are written.

        ``after``: who holds an extent, where others are to write first. Less than half of an extent
        is not kept shared.
        """
        column, found, at = self.columns[col], list[Cut](), 0
        if first >= min(last, column.shared_end):
            return found
        for index, piece in enumerate(column.pieces[: column.live]):
            if at >= last:
                break
            keep = max(0, first - at)
            if keep < piece.pages and keep < self._shared(col, piece, after):
                if 2 * keep < piece.extent.pages:
                    keep = 0
                found.append(Cut(index, at, piece, keep))
            at += piece.pages
        return found

    def copies_needed(self, writes: Sequence[tuple[int, int, int]]) -> int:
        """Pages that cuts take for (column, first, last) one after the other.

        Whoever is left alone with an extent writes in place.
        """
        needed, after = 0, dict[Extent, Holders]()
        for col, first, last in writes:
            for cut in self.cuts(col, first, last, after):
                needed += cut.copies
                extent = cut.piece.extent
                holders = after.setdefault(extent, dict(extent.holders))
                holders[col] = cut.keep
        return needed

    def replace(self, col: int, cut: Cut, pieces: Sequence[Piece]) -> None:
        """Private pieces were mapped in the place of those that a cut does not keep."""
        column, old = self.columns[col], cut.piece
        kept = [Piece(old.extent, cut.keep)] if cut.keep else []
        column.pieces[cut.index : cut.index + 1] = [*kept, *pieces]
        column.live += len(kept) + len(pieces) - 1
        if kept:
            old.extent.holders[col] = cut.keep
        else:
            del old.extent.holders[col]
            old.extent.mappings -= 1
        for piece in pieces:
            piece.extent.mappings = 1
            piece.extent.holders[col] = piece.pages
            self.committed += piece.pages
        if column.stale and cut.first <= column.stale[0] < cut.first + old.pages:
            column.stale = None

    def take_stale(self, col: int) -> tuple[int, int] | None:
        """Stale pages that are in no other column any more, and are to be zeroed now."""
        column, at = self.columns[col], 0
        stale, column.shared_end = column.stale, 0
        for piece in column.pieces[: column.live]:
            shared = self._shared(col, piece)
            if shared:
                column.shared_end = at + shared
            if stale and at <= stale[0] < at + piece.pages:
                if at + shared > stale[0]:
                    column.shared_end = stale[1]
                else:
                    column.stale = None
            at += piece.pages
        return stale if column.stale is None else None

    def unneeded(self, pages: Sequence[int], col: int) -> Iterator[tuple[Extent, int]]:
        """Extents of a column that it does not need whole, with the pages that nobody needs.

        ``pages``: of each column how many it needs.
        """
        column, at = self.columns[col], 0
        for piece in column.pieces[: column.live]:
            extent = piece.extent
            if piece.pages < extent.pages or at + piece.pages > pages[col]:
                used = (min(has, pages[holder] - at) for holder, has in extent.holders.items())
                yield extent, extent.pages - max(0, *used)
            at += piece.pages

    def _shared(self, col: int, piece: Piece, after: dict[Extent, Holders] | None = None) -> int:
        """How many of a piece's leading pages are in another live column too."""
        holders = piece.extent.holders
        if after is not None:
            holders = after.get(piece.extent, holders)
        if len(holders) < 2:
            return 0
        return min(piece.pages, max(has for holder, has in holders.items() if holder != col))

    def _hold(self, col: int, piece: Piece, *, new: bool) -> None:
        column, extent = self.columns[col], piece.extent
        column.live += 1
        column.live_pages += piece.pages
        if not extent.holders:
            self.committed += extent.pages
            if not new:
                self.idle -= extent.pages
        extent.holders[col] = piece.pages

    def _let_go(self, col: int, piece: Piece) -> None:
        column, extent = self.columns[col], piece.extent
        column.live_pages -= piece.pages
        column.idle_pages += piece.pages
        del extent.holders[col]
        if not extent.holders:
            self.committed -= extent.pages
            self.idle += extent.pages
