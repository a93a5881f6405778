"""One region of the cuda-vmm store: reserved addresses, and which extents are mapped there."""

from collections.abc import Mapping, Sequence

import torch

from ...errors import StoreError
from ...geometry import RegionGeometry
from .addresses import Addresses
from .driver import Driver
from .extent_table import ExtentTable
from .extents import Extent, ExtentPool
from .pieces import Cut, Piece, whole
from .window import Window

__all__ = ["CudaRegion", "Write"]

Write = tuple[int, int, int]
"""Positions [start, end) to be written, in a column that was prepared for positions [0, known)."""


class CudaRegion:
    """Addresses ``geometry.nbytes`` long. Every column's mapped pages are a prefix of it.

    Live pieces come first, then idle ones: pages of a former life (or beyond a rewind) that wait
    until the device is done with them, and that can become live again where they are.
    """

    def __init__(
        self, geometry: RegionGeometry, driver: Driver, pool: ExtentPool, window: Window
    ) -> None:
        self.geometry = geometry
        self.reused_pages = 0  # counted each time
        self._table = ExtentTable(geometry.cols)
        self._addresses = Addresses(geometry, driver)
        self._pool = pool
        self._window = window
        self._loose: set[int] = set()  # columns with extents that they may not need whole

    def open(self) -> None:
        """Make the tensor; the region's first page must be mapped."""
        self._addresses.open()

    def view(self, layer: str) -> torch.Tensor:
        """[rows, cols, 2, H, D] of a layer."""
        return self._addresses.view(layer)

    # --- what is where

    @property
    def mapped_pages(self) -> int:
        return self._addresses.mapped_pages

    @property
    def unmapped_pages(self) -> int:
        return self._addresses.unmapped_pages

    @property
    def committed(self) -> int:
        """Pages of extents that live columns have, each counted once."""
        return self._table.committed

    @property
    def idle(self) -> int:
        """Pages of extents that are mapped and that no live column has."""
        return self._table.idle

    def surplus(self, ends: Sequence[int]) -> int:
        """Committed pages that columns of these lengths do not need: the rest of large extents."""
        rest: dict[Extent, int] = {}
        pages = [self.geometry.pages_of(col, end) for col, end in enumerate(ends)]
        for col in list(self._loose):
            found = dict(self._table.unneeded(pages, col))
            rest.update(found)
            if not found:
                self._loose.discard(col)
        return sum(rest.values())

    def live_pages(self, col: int) -> int:
        return self._table.columns[col].live_pages

    def shared_end(self, col: int) -> int:
        """From this page on no page of the column is in another one."""
        return self._table.columns[col].shared_end

    def idle_pages(self, col: int) -> int:
        return self._table.columns[col].idle_pages

    def frees(self, col: int, size: int) -> bool:
        """Whether an extent of that size is free once the column's idle pieces are unmapped."""
        return size in self._table.idle_sizes(col)

    def next_whole(self, col: int) -> int:
        """Pages of the next idle extent if it can be live again where it is, else 0."""
        return self._table.next_whole(col)

    def pages_needed(self, wants: Mapping[int, Write]) -> int:
        """New pages and copies of shared ones."""
        new = sum(
            max(0, self.geometry.pages_of(col, end) - self.live_pages(col))
            for col, (_, end, _) in wants.items()
        )
        return new + self._table.copies_needed(
            [(col, *self._written(write)) for col, write in wants.items()]
        )

    # --- growth; ``pages`` is how many live pages the column is to have

    def reuse(self, col: int, pages: int, stream: int) -> None:
        """Make idle extents live, zeroed, where they are and as long as they are not too large."""
        first = self.live_pages(col)
        while 0 < self.next_whole(col) <= pages - self.live_pages(col):
            self._table.make_live(col)
        self._reused(col, first, stream)

    def reuse_too_large(self, col: int, stream: int) -> None:
        """Make the next idle extent live, zeroed, though it has more pages than are needed."""
        first = self.live_pages(col)
        self._table.make_live(col)
        self._reused(col, first, stream)
        self._loose.add(col)

    def extend(self, col: int, extents: list[Extent], stream: int) -> None:
        """Map extents, zeroed, behind the live ones; the column must have no idle ones.

        When the driver refuses they become spare and the column stays as it was.
        """
        first, pieces = self.live_pages(col), whole(extents)
        try:
            self._addresses.map(col, first, pieces)
        except StoreError:
            self._pool.give(extents)
            raise
        self._table.append(col, pieces)
        self._addresses.zero(col, first, self.live_pages(col), stream)

    # --- sharing

    def leads(self, src: int, n_rows: int, known: int) -> list[Piece]:
        """What a clone of the first rows of a column can share with it.

        Nothing of a ring whose next row takes the place of its first: it would be copied soon.
        """
        geometry = self.geometry
        if geometry.policy.window is not None and known >= geometry.rows:
            return []
        return self._table.leads(src, n_rows * geometry.row_bytes // geometry.page_size)

    def share(self, src: int, dst: int, leads: Sequence[Piece]) -> None:
        """Map the leads of ``src`` in the empty ``dst`` too, which must have no idle pieces."""
        self._addresses.map(dst, 0, leads)
        self._table.share(src, dst, leads)
        if leads[-1].pages < leads[-1].extent.pages:
            self._loose.add(dst)

    def copy(self, src: int, dst: int, n_rows: int, stream: int) -> None:
        """Copy the pages that hold the first rows of ``src``, but for those that are shared."""
        first, last = self.shared_end(dst), self.geometry.pages_of_rows(n_rows)
        self._addresses.copy(src, dst, first, last, stream)

    def privatize(self, col: int, write: Write, stream: int) -> None:
        """Exchange the shared pages that are to be written for copies.

        Raises StoreFullError between two extents or before the first one.
        """
        if not self.shared_end(col):
            return
        for cut in reversed(self._table.cuts(col, *self._written(write))):
            self._cut(col, cut, write[2], stream)
        stale = self._table.take_stale(col)
        if stale:
            self._addresses.zero(col, *stale, stream)

    # --- the way back

    def retire(self, col: int, length: int, stream: int) -> None:
        """Make extents idle that hold no page for ``length`` tokens; zero the rows given up.

        A large extent that holds a needed page stays live as a whole; where it is shared, the
        rows given up are left alone until the column writes there.
        """
        geometry = self.geometry
        kept, pages = geometry.pages_of_rows(length), geometry.pages_of(col, length)
        for first, last in self._table.retire(col, kept, pages):
            self._addresses.zero(col, first, last, stream)
        if length:
            self._loose.add(col)
        else:
            self._loose.discard(col)

    def unmap_idle(self, col: int, most: int | None = None) -> None:
        """Unmap the last ``most`` idle pieces (None: all), with one call for all of them.

        The device must be done with them. Extents that are mapped nowhere any more go to the pool.
        """
        pieces = self._table.last_idle(col, most)
        if pieces:
            pages = sum(piece.pages for piece in pieces)
            self._addresses.unmap(col, self.live_pages(col) + self.idle_pages(col) - pages, pages)
            self._pool.give(self._table.drop_idle(col, len(pieces)))

    def close(self) -> None:
        """Unmap everything; the device must be idle. The addresses go with the last tensor."""
        for col in range(self.geometry.cols):
            self._table.retire(col, 0, 0)
            self.unmap_idle(col)
        self._loose.clear()
        self._addresses.close()

    def _written(self, write: Write) -> tuple[int, int]:
        """Pages [first, last) of a column that a write changes; of a ring that wraps, all."""
        start, end, known = write
        start, geometry = min(start, known), self.geometry
        if start >= end:
            return 0, 0
        if end > geometry.rows:
            return 0, geometry.pages_per_column
        size = geometry.page_size
        return start * geometry.row_bytes // size, -(-end * geometry.row_bytes // size)

    def _cut(self, col: int, cut: Cut, known: int, stream: int) -> None:
        extents = self._pool.take_all(cut.copies)
        pieces, first = whole(extents), cut.first + cut.keep
        copied = min(max(0, self.geometry.pages_of_rows(known) - first), cut.copies)
        try:
            self._window.fill(pieces, self._addresses.of(col, first), copied, stream)
            self._exchange(col, cut, pieces)
        except StoreError:
            self._pool.give(extents)
            raise
        self._table.replace(col, cut, pieces)
        if cut.keep:
            self._loose.add(col)

    def _exchange(self, col: int, cut: Cut, pieces: list[Piece]) -> None:
        """Map what a cut keeps and new pieces where its piece was, or leave that as it was."""
        self._addresses.unmap(col, cut.first, cut.piece.pages)
        kept = [Piece(cut.piece.extent, cut.keep)] if cut.keep else []
        try:
            self._addresses.map(col, cut.first, [*kept, *pieces])
        except StoreError:
            self._addresses.map(col, cut.first, [cut.piece])
            raise

    def _reused(self, col: int, first: int, stream: int) -> None:
        self.reused_pages += self.live_pages(col) - first
        self._addresses.zero(col, first, self.live_pages(col), stream)
