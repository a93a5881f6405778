"""One region of the cuda-vmm store: reserved addresses, and which extents are mapped there."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ...errors import StoreError, StoreFullError
from ...geometry import RegionGeometry
from .driver import Driver
from .extents import Extent, ExtentPool

__all__ = ["CudaRegion"]


@dataclass(slots=True)
class _Column:
    """Extents mapped from the column's first page on: ``live`` of them, the rest idle."""

    extents: list[Extent] = field(default_factory=list)
    live: int = 0
    live_pages: int = 0
    idle_pages: int = 0


class CudaRegion:
    """Addresses ``geometry.nbytes`` long. Every column's mapped pages are a prefix of it.

    Live extents come first, then idle ones: pages of a former life (or beyond a rewind) that wait
    until the device is done with them, and that can become live again where they are.
    The addresses stay reserved until the last tensor over them is gone.
    """

    def __init__(self, geometry: RegionGeometry, driver: Driver, pool: ExtentPool) -> None:
        self.geometry = geometry
        self.committed = 0  # pages of live extents
        self.idle = 0  # pages of idle ones
        self.mapped_pages = self.unmapped_pages = self.reused_pages = 0  # counted each time
        self._driver = driver
        self._pool = pool
        self._columns = [_Column() for _ in range(geometry.cols)]
        self._loose: set[int] = set()  # columns that may have more live pages than they need
        self._flat: torch.Tensor | None = None
        self._base = driver.reserve(geometry.nbytes, geometry.page_size)
        self._free = partial(driver.free, self._base, geometry.nbytes)

    def open(self) -> None:
        """Make the tensor; the region's first page must be mapped."""
        flat = self._driver.tensor(self._base, self.geometry.nbytes, self._free)
        dtype: torch.dtype = getattr(torch, self.geometry.dtype)
        with torch.inference_mode(False):  # so that views can be written in and out of that mode
            self._flat = flat.view(dtype)

    def view(self, layer: str) -> torch.Tensor:
        """[rows, cols, 2, H, D] of a layer."""
        assert self._flat is not None
        geometry = self.geometry
        with torch.inference_mode(False):
            return self._flat.as_strided(
                geometry.shape, geometry.strides, geometry.layer_offset(layer)
            )

    # --- what is where

    def surplus(self, ends: Sequence[int]) -> int:
        """Live pages that columns of these lengths do not need: the rest of large extents."""
        extra = 0
        for col in list(self._loose):
            pages = self._columns[col].live_pages - self.geometry.pages_of(col, ends[col])
            if pages > 0:
                extra += pages
            else:
                self._loose.discard(col)
        return extra

    def live_pages(self, col: int) -> int:
        return self._columns[col].live_pages

    def idle_pages(self, col: int) -> int:
        return self._columns[col].idle_pages

    def idle_sizes(self, col: int) -> list[int]:
        """Pages of each idle extent, in the order of the addresses."""
        column = self._columns[col]
        return [extent.pages for extent in column.extents[column.live :]]

    # --- growth; ``pages`` is how many live pages the column is to have

    def reuse(self, col: int, pages: int, stream: int) -> None:
        """Make idle extents live, zeroed, where they are and as long as they are not too large."""
        column = self._columns[col]
        first = column.live_pages
        for extent in column.extents[column.live :]:
            if column.live_pages + extent.pages > pages:
                break
            self._make_live(column, extent)
        self._zero(col, first, stream)

    def reuse_too_large(self, col: int, stream: int) -> None:
        """Make the next idle extent live, zeroed, though it has more pages than are needed."""
        column = self._columns[col]
        first = column.live_pages
        self._make_live(column, column.extents[column.live])
        self._zero(col, first, stream)
        self._loose.add(col)

    def extend(self, col: int, extents: list[Extent], stream: int) -> None:
        """Map extents, zeroed, behind the live ones; the column must have no idle ones.

        When the driver refuses they become spare and the column stays as it was.
        """
        column = self._columns[col]
        assert not column.idle_pages
        first = column.live_pages
        self._map(self._address(col, first), extents)
        column.extents += extents
        for extent in extents:
            column.live += 1
            column.live_pages += extent.pages
            self.committed += extent.pages
            self.mapped_pages += extent.pages
        self._zero(col, first, stream)

    def copy(self, src: int, dst: int, pages: int, stream: int) -> None:
        """Copy the bytes of the first pages of a column."""
        if pages:
            nbytes = pages * self.geometry.page_size
            self._driver.copy(self._address(dst, 0), self._address(src, 0), nbytes, stream)

    # --- the way back

    def retire(self, col: int, length: int, stream: int) -> None:
        """Make extents idle that hold no page for ``length`` tokens; zero the rows given up.

        A large extent that holds a needed page stays live as a whole.
        """
        geometry, column = self.geometry, self._columns[col]
        pages = geometry.pages_of(col, length)
        while column.live:
            extent = column.extents[column.live - 1]
            if column.live_pages - extent.pages < pages:
                break
            column.live -= 1
            column.live_pages -= extent.pages
            column.idle_pages += extent.pages
            self.committed -= extent.pages
            self.idle += extent.pages
        self._zero(col, geometry.pages_of_rows(length), stream)
        if column.live_pages > pages:
            self._loose.add(col)
        else:
            self._loose.discard(col)

    def unmap_idle(self, col: int, most: int | None = None) -> None:
        """Give the last ``most`` idle extents (None: all) to the pool, one call for all of them.

        The device must be done with them.
        """
        column = self._columns[col]
        first = column.live if most is None else max(column.live, len(column.extents) - most)
        extents = column.extents[first:]
        if not extents:
            return
        pages = sum(extent.pages for extent in extents)
        start = column.live_pages + column.idle_pages - pages
        self._driver.unmap(self._address(col, start), pages * self.geometry.page_size)
        self._pool.give(extents)
        del column.extents[first:]
        column.idle_pages -= pages
        self.idle -= pages
        self.unmapped_pages += pages

    def close(self) -> None:
        """Unmap everything; the device must be idle. The addresses go with the last tensor."""
        for col, column in enumerate(self._columns):
            column.idle_pages += column.live_pages
            self.idle += column.live_pages
            column.live = column.live_pages = 0
            self.unmap_idle(col)
        self.committed = 0
        self._loose.clear()
        if self._flat is None:  # no tensor was ever made
            self._free()
        self._flat = None

    def _make_live(self, column: _Column, extent: Extent) -> None:
        column.live += 1
        column.live_pages += extent.pages
        column.idle_pages -= extent.pages
        self.committed += extent.pages
        self.idle -= extent.pages
        self.reused_pages += extent.pages

    def _zero(self, col: int, first: int, stream: int) -> None:
        """Zero the column's live pages from ``first`` on."""
        count = self._columns[col].live_pages - first
        if count > 0:
            size = self.geometry.page_size
            self._driver.zero(self._address(col, first), count * size, stream)

    def _address(self, col: int, page: int) -> int:
        return self._base + col * self.geometry.col_bytes + page * self.geometry.page_size

    def _map(self, address: int, extents: list[Extent]) -> None:
        end = address
        try:
            for extent in extents:
                nbytes = extent.pages * self.geometry.page_size
                self._driver.map(end, nbytes, extent.handle)
                end += nbytes
            self._driver.allow(address, end - address)
        except StoreError as error:
            if end > address:
                self._driver.unmap(address, end - address)
            self._pool.give(extents)
            if isinstance(error, StoreFullError):
                raise StoreFullError(str(error), sum(x.pages for x in extents)) from error
            raise
