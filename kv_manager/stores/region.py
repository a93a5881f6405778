"""One region of the host store: reserved addresses, a file in memory, and pages between them."""

import ctypes
import os
import weakref
from collections import Counter
from collections.abc import Mapping

import torch

from ..errors import StoreError
from ..geometry import RegionGeometry
from . import libc
from .page_table import PageTable, runs

__all__ = ["HostRegion"]


class HostRegion:
    """Addresses ``geometry.nbytes`` long; backed pages are file pages, the rest reads as zeros.

    The addresses stay reserved until the last tensor over them is gone.

    Attributes:
        mapped_pages: put under columns so far, a shared page once for each column.
        unmapped_pages: taken from under columns so far, counted in the same way.
    """

    def __init__(self, geometry: RegionGeometry) -> None:
        self.geometry = geometry
        self.mapped_pages = self.unmapped_pages = 0
        self.table = PageTable(geometry.cols, geometry.pages_per_column)
        self._fd = libc.new_file(f"kv_columns:{geometry.name}")
        self._close_file = weakref.finalize(self, os.close, self._fd)
        self._base = libc.reserve(geometry.nbytes)
        memory = (ctypes.c_char * geometry.nbytes).from_address(self._base)
        # torch.frombuffer keeps `memory` alive as long as any view of it
        weakref.finalize(memory, libc.unmap, self._base, geometry.nbytes).atexit = False
        dtype: torch.dtype = getattr(torch, geometry.dtype)
        with torch.inference_mode(False):  # so that views can be written in and out of that mode
            self._flat: torch.Tensor | None = torch.frombuffer(memory, dtype=dtype)

    def view(self, layer: str) -> torch.Tensor:
        """[rows, cols, 2, H, D] of a layer."""
        assert self._flat is not None
        geometry = self.geometry
        with torch.inference_mode(False):
            return self._flat.as_strided(
                geometry.shape, geometry.strides, geometry.layer_offset(layer)
            )

    def pages_needed(self, wants: Mapping[int, tuple[int, int]]) -> int:
        """New pages and copies of shared ones for {col: (start, end)}."""
        new = 0
        writers: Counter[int] = Counter()
        for col, (start, end) in wants.items():
            pages = self.table.pages[col]
            new += max(0, self.geometry.pages_of(col, end) - len(pages))
            if self.table.any_shared:
                writers.update(
                    pages[index]
                    for index in self.geometry.written_pages(start, end)
                    if index < len(pages)
                )
        return new + self.table.copies_needed(writers)

    def grow(self, col: int, end: int) -> None:
        """Back the rows of positions [0, end)."""
        have = len(self.table.pages[col])
        count = self.geometry.pages_of(col, end) - have
        if count <= 0:
            return
        first = self.table.fresh(col, have)
        libc.allocate(self._fd, first, count, self.geometry.page_size)
        self._map_or_free(col, have, first, count)
        self.table.append(col, first, count)

    def privatize(self, col: int, start: int, end: int) -> None:
        """Copy the shared pages that hold rows of positions [start, end)."""
        if not self.table.any_shared:
            return
        pages = self.table.pages[col]
        for index in self.geometry.written_pages(start, end):
            if self.table.is_shared(pages[index]):
                page = self.table.fresh(col, index)
                self._copy_page(col, index, page)
                self._map_or_free(col, index, page, 1)
                self.unmapped_pages += 1  # the shared one, whose place it took
                self.table.replace_shared(col, index, page)

    def truncate(self, col: int, length: int) -> None:
        """Take the pages that hold no position below ``length``; free those nobody else holds."""
        keep = self.geometry.pages_of_rows(length)
        count = len(self.table.pages[col]) - keep
        if count <= 0:
            return
        size = self.geometry.page_size
        libc.reserve_again(self._address(col, keep), count * size)
        self.unmapped_pages += count
        for first, freed in runs(self.table.truncate(col, keep)):
            libc.punch(self._fd, first * size, freed * size)

    def share(self, src: int, dst: int, length: int) -> None:
        """Map the pages of ``src`` that hold positions [0, length) in the empty ``dst`` too."""
        pages = self.table.pages[src][: self.geometry.pages_of_rows(length)]
        index, count = 0, len(pages)
        try:
            for first, run in runs(pages):
                self._map(dst, index, first, run)
                index += run
        except StoreError:
            libc.reserve_again(self._address(dst, 0), count * self.geometry.page_size)
            self.unmapped_pages += index
            raise
        self.table.share(src, dst, count)

    def backed_positions(self, col: int, capacity: int) -> int:
        """Largest end so that positions [0, end) need no new page; capacity for a whole ring."""
        pages = len(self.table.pages[col])
        if pages == self.geometry.pages_per_column:
            return capacity
        return self.geometry.rows_within(pages)

    def resident_bytes(self) -> int:
        """Bytes that the operating system holds for the file."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Free all pages. Views that are still about read zeros, and writing to them faults."""
        self._flat = None
        libc.reserve_again(self._base, self.geometry.nbytes)
        self._close_file()

    def _address(self, col: int, index: int) -> int:
        return self._base + col * self.geometry.col_bytes + index * self.geometry.page_size

    def _map(self, col: int, index: int, first: int, count: int) -> None:
        size = self.geometry.page_size
        libc.map_file(self._address(col, index), count * size, self._fd, first * size)
        self.mapped_pages += count

    def _map_or_free(self, col: int, index: int, first: int, count: int) -> None:
        try:
            self._map(col, index, first, count)
        except StoreError:
            size = self.geometry.page_size
            libc.punch(self._fd, first * size, count * size)
            raise

    def _copy_page(self, col: int, index: int, page: int) -> None:
        size = self.geometry.page_size
        libc.allocate(self._fd, page, 1, size)
        source = (ctypes.c_char * size).from_address(self._address(col, index))
        view, done = memoryview(source), 0
        while done < size:
            done += os.pwrite(self._fd, view[done:], page * size + done)
