"""One region of the cuda-vmm store: reserved addresses, and which extents are mapped there."""

from collections.abc import Mapping, Sequence

import torch

from ...errors import StoreError
from ...geometry import RegionGeometry
from .addresses import Addresses
from .driver import Driver
from .extent_table import ExtentTable
from .extents import Extent, ExtentPool
from .mapped import Exchange
from .window import Window

__all__ = ["CudaRegion", "Write"]

Write = tuple[int, int, int]
"""Positions [start, end) to be written, in a column that was prepared for positions [0, known)."""


class CudaRegion:
    """Addresses ``geometry.nbytes`` long. Every column's mapped pages are a prefix of it.

    Live extents come first, then idle ones: pages of a former life (or beyond a rewind) that wait
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
        """Whether an extent of that size is free once the column's idle ones are unmapped."""
        return size in self._table.idle_sizes(col)

    def next_reusable(self, col: int) -> int:
        """Pages of the next idle extent if it can be live again where it is, else 0."""
        return self._table.next_reusable(col)

    def pages_needed(self, wants: Mapping[int, Write]) -> int:
        """New pages and copies of shared ones."""
        new = sum(
            max(0, self.geometry.pages_of(col, end) - self.live_pages(col))
            for col, (_, end, _) in wants.items()
        )
        return new + self._table.copies_needed(
            [self._span(col, write) for col, write in wants.items()]
        )

    # --- growth; ``pages`` is how many live pages the column is to have

    def reuse(self, col: int, pages: int, stream: int) -> None:
        """Make idle extents live, zeroed, where they are and as long as they are not too large."""
        first = self.live_pages(col)
        while 0 < self.next_reusable(col) <= pages - self.live_pages(col):
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
        first = self.live_pages(col)
        self._map(col, extents, extents)
        self._addresses.zero(col, first, self.live_pages(col), stream)

    # --- sharing

    def clone_parts(
        self, src: int, dst: int, n_rows: int, known: int
    ) -> tuple[list[Extent], tuple[int, int]]:
        """What a clone of the first rows of a column shares, and the pages that it needs beside.

        These are the others that lie wholly below its length, and then the rest: apart, so that a
        clone of the same length has the former in common with this one. Nothing is shared of a
        ring whose next row takes the place of its first: it would be copied soon.
        """
        geometry = self.geometry
        whole = min(n_rows, geometry.rows) * geometry.row_bytes // geometry.page_size
        wraps = geometry.policy.window is not None and known >= geometry.rows
        shared = [] if wraps else self._table.within(src, whole)
        copied = whole - sum(extent.pages for extent in shared)
        return shared, (copied, geometry.pages_of(dst, n_rows) - whole)

    def clone(
        self, src: int, dst: int, n_rows: int, shared: list[Extent], new: list[Extent], stream: int
    ) -> None:
        """Map extents of ``src`` and new ones in ``dst``, where nothing is; copy into the new ones.

        When the driver refuses the new ones become spare and nothing is mapped.
        """
        self._map(dst, [*shared, *new], new)
        first, last = sum(extent.pages for extent in shared), self.geometry.pages_of_rows(n_rows)
        self._table.share(src, dst, first)
        self._addresses.copy(src, dst, first, last, stream)
        self._addresses.zero(dst, last, self.live_pages(dst), stream)

    def exchanges(self, col: int, write: Write) -> list[Exchange]:
        """What must be exchanged before a write, since others have it."""
        return self._table.exchanges(*self._span(col, write), {})

    def privatize(self, col: int, exchanges: Sequence[Exchange], known: int, stream: int) -> None:
        """Exchange shared extents for copies; nothing idle may be behind one that gets shorter.

        Raises StoreFullError between two extents or before the first one.
        """
        for exchange in reversed(exchanges):
            self._exchange(col, exchange, known, stream)
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
        """Unmap the last ``most`` idle extents (None: all), with one call for all of them.

        The device must be done with them. Those that are mapped nowhere any more go to the pool.
        """
        extents = self._table.last_idle(col, most)
        if extents:
            pages = sum(extent.pages for extent in extents)
            self._addresses.unmap(col, self.live_pages(col) + self.idle_pages(col) - pages, pages)
            self._pool.give(self._table.drop_idle(col, len(extents)))

    def close(self) -> None:
        """Unmap everything; the device must be idle. The addresses go with the last tensor."""
        for col in range(self.geometry.cols):
            self._table.retire(col, 0, 0)
            self.unmap_idle(col)
        self._loose.clear()
        self._addresses.close()

    def _map(self, col: int, extents: list[Extent], new: list[Extent]) -> None:
        """Map extents behind the live ones; when the driver refuses the new ones become spare."""
        try:
            self._addresses.map(col, self.live_pages(col), extents)
        except StoreError:
            self._pool.give(new)
            raise
        self._table.append(col, extents)

    def _span(self, col: int, write: Write) -> tuple[int, int, int, int]:
        """Column, pages [first, last) that a write changes, pages that the column needs then.

        Of a ring that wraps a write changes all.
        """
        start, end, known = write
        start, geometry = min(start, known), self.geometry
        pages = geometry.pages_of(col, max(end, known))
        if start >= end:
            return col, 0, 0, pages
        if end > geometry.rows:
            return col, 0, geometry.pages_per_column, pages
        size = geometry.page_size
        return col, start * geometry.row_bytes // size, -(-end * geometry.row_bytes // size), pages

    def _exchange(self, col: int, exchange: Exchange, known: int, stream: int) -> None:
        """Put copies in the place of a shared extent, or leave that as it was."""
        first, old = exchange.first, exchange.extent
        (extents,) = self._pool.take_all([exchange.pages])
        copied = min(self.geometry.pages_of_rows(known) - first, exchange.pages)
        try:
            self._window.fill(extents, self._addresses.of(col, first), copied, stream)
            self._addresses.unmap(col, first, old.pages)
            try:
                self._addresses.map(col, first, extents)
            except StoreError:
                self._addresses.map(col, first, [old])
                raise
        except StoreError:
            self._pool.give(extents)
            raise
        self._table.replace(col, exchange, extents)

    def _reused(self, col: int, first: int, stream: int) -> None:
        self.reused_pages += self.live_pages(col) - first
        self._addresses.zero(col, first, self.live_pages(col), stream)
