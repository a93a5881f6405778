"""The addresses of one region, and what the driver does there."""

from collections.abc import Sequence
from functools import partial

import torch

from ...geometry import RegionGeometry
from .driver import Driver
from .extents import Extent
from .mapped import map_extents

__all__ = ["Addresses"]


class Addresses:
    """``geometry.nbytes`` of them, reserved until the last tensor over them is gone."""

    def __init__(self, geometry: RegionGeometry, driver: Driver) -> None:
        self.mapped_pages = self.unmapped_pages = 0  # counted each time
        self._geometry = geometry
        self._driver = driver
        self._flat: torch.Tensor | None = None
        self._base = driver.reserve(geometry.nbytes, geometry.page_size)
        self._free = partial(driver.free, self._base, geometry.nbytes)

    def open(self) -> None:
        """Make the tensor; the first page must be mapped."""
        flat = self._driver.tensor(self._base, self._geometry.nbytes, self._free)
        dtype: torch.dtype = getattr(torch, self._geometry.dtype)
        with torch.inference_mode(False):  # so that views can be written in and out of that mode
            self._flat = flat.view(dtype)

    def view(self, layer: str) -> torch.Tensor:
        """[rows, cols, 2, H, D] of a layer."""
        assert self._flat is not None
        geometry = self._geometry
        with torch.inference_mode(False):
            return self._flat.as_strided(
                geometry.shape, geometry.strides, geometry.layer_offset(layer)
            )

    def close(self) -> None:
        """Nothing is mapped any more; the addresses go with the last tensor."""
        if self._flat is None:  # no tensor was ever made
            self._free()
        self._flat = None

    def of(self, col: int, page: int) -> int:
        """Where a page of a column begins."""
        return self._base + col * self._geometry.col_bytes + page * self._geometry.page_size

    def map(self, col: int, first: int, extents: Sequence[Extent]) -> None:
        """Map extents from page ``first`` on, or raise StoreError and map nothing."""
        map_extents(self._driver, self.of(col, first), extents, self._geometry.page_size)
        self.mapped_pages += sum(extent.pages for extent in extents)

    def unmap(self, col: int, first: int, pages: int) -> None:
        """Unmap a range of whole extents; the device must be done with it."""
        self._driver.unmap(self.of(col, first), pages * self._geometry.page_size)
        self.unmapped_pages += pages

    def zero(self, col: int, first: int, last: int, stream: int) -> None:
        """Zero pages [first, last) of a column, in the order of the stream."""
        if first < last:
            nbytes = (last - first) * self._geometry.page_size
            self._driver.zero(self.of(col, first), nbytes, stream)

    def copy(self, src: int, dst: int, first: int, last: int, stream: int) -> None:
        """Copy pages [first, last) from one column to another, in the order of the stream."""
        if first < last:
            nbytes = (last - first) * self._geometry.page_size
            self._driver.copy(self.of(dst, first), self.of(src, first), nbytes, stream)
