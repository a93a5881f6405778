"""Columns in the memory of the host: reserved addresses, backed page by page."""

import mmap
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from ..errors import StoreError, StoreFullError
from ..geometry import SCRATCH_COLUMN, CacheGeometry
from .base import ColumnStore
from .region import HostRegion
from .usage import StoreUsage

__all__ = ["HostStore"]


class HostStore(ColumnStore):
    """One reservation and one file in memory per region; a column's pages are mapped as it grows.

    Views never move. Rows that are not backed read as zeros and commit nothing; writing to them
    faults. Pages are committed by fallocate when they are backed, not when first touched, so that
    running out of memory is a StoreError here and not a SIGBUS in a kernel; memory in use is
    therefore a whole number of pages. Released pages go back to the operating system at once.
    Rows that were given up by a rewind and share a page with live rows keep their bytes, which
    are the same sequence's (or, after a clone, its source's), and are not attended.
    """

    stable_views: ClassVar[bool] = True
    per_column: ClassVar[bool] = True

    def __init__(self, geometry: CacheGeometry) -> None:
        super().__init__(geometry)
        if geometry.page_size % mmap.PAGESIZE:
            raise StoreError(
                f"page_size is {geometry.page_size}; on this system it must be a multiple of "
                f"{mmap.PAGESIZE}, the operating system's page"
            )
        self._closed = False
        # For each column: the end of what was prepared, and positions [low, ready) that can be
        # written without any work, because their pages are there and in no other column.
        self._end = [0] * geometry.cols
        self._low = [0] * geometry.cols
        self._ready = [0] * geometry.cols
        self._regions = [HostRegion(region) for region in geometry.regions]
        self._region_of = {
            layer: region for region in self._regions for layer in region.geometry.layers
        }
        self.prepare_write(SCRATCH_COLUMN, 0, 1)

    def layer_view(self, layer: str) -> torch.Tensor:
        self._check_open("layer_view")
        self.geometry.region_of(layer)
        return self._region_of[layer].view(layer)

    def pages_needed(self, wants: Mapping[int, tuple[int, int]]) -> int:
        self._check_open("pages_needed")
        work: dict[int, tuple[int, int]] = {}
        for col, (start, end) in wants.items():
            if not self._is_ready(col, start, end):
                self._check_range("pages_needed", col, start, end)
                work[col] = (start, end)
        return sum(region.pages_needed(work) for region in self._regions) if work else 0

    def prepare_write(self, col: int, start: int, end: int) -> None:
        if not self._is_ready(col, start, end):
            self._back(col, start, end)
        if end > self._end[col]:
            self._end[col] = end

    def writable(self) -> Sequence[int]:
        return [0 if low else ready for low, ready in zip(self._low, self._ready, strict=True)]

    def _is_ready(self, col: int, start: int, end: int) -> bool:
        """Whether the positions can be written as things are; true for most decode steps."""
        return 0 <= col < len(self._low) and self._low[col] <= start <= end <= self._ready[col]

    def _back(self, col: int, start: int, end: int) -> None:
        self._check_open("prepare_write")
        self._check_range("prepare_write", col, start, end)
        self._check_limit(col, start, end)
        for region in self._regions:
            region.grow(col, end)
        for region in self._regions:
            region.privatize(col, start, end)
        capacity = 1 if col == SCRATCH_COLUMN else self.geometry.capacity
        if not any(region.table.any_shared for region in self._regions):
            self._low[col] = 0
            self._ready[col] = min(self._backed_positions(col), capacity)
        elif start < end:
            self._low[col] = start
            ready = min(region.geometry.end_within_page(end) for region in self._regions)
            self._ready[col] = min(ready, capacity)

    def release(self, col: int) -> None:
        self._check_open("release")
        self._check_col("release", col)
        for region in self._regions:
            region.truncate(col, 0)
        self._end[col] = self._low[col] = self._ready[col] = 0

    def clone(self, src: int, dst: int, n_rows: int) -> None:
        self._check_open("clone")
        self._check_clone(src, dst, n_rows, self._end)
        try:
            for region in self._regions:
                region.share(src, dst, n_rows)
        except StoreError:
            self.release(dst)
            raise
        self._end[dst] = n_rows
        for col in (src, dst):
            self._low[col] = self._ready[col] = 0

    def shrink(self, col: int, length: int) -> None:
        self._check_open("shrink")
        self._check_col("shrink", col)
        self._check_range("shrink", col, 0, length)
        for region in self._regions:
            region.truncate(col, length)
        self._end[col] = min(self._end[col], length)
        self._ready[col] = min(self._ready[col], self._backed_positions(col))

    @property
    def committed_pages(self) -> int:
        return sum(region.table.committed for region in self._regions)

    def usage(self) -> StoreUsage:
        return StoreUsage(
            self.committed_pages,
            mapped=sum(region.mapped_pages for region in self._regions),
            unmapped=sum(region.unmapped_pages for region in self._regions),
        )

    def resident_bytes(self) -> int:
        """Bytes that the operating system holds for the regions' files."""
        self._check_open("resident_bytes")
        return sum(region.resident_bytes() for region in self._regions)

    def close(self) -> None:
        """Free all memory. Tensors that are still about read zeros and must not be written.

        Their addresses stay reserved until the last of them is gone, so that a late read is
        harmless and a late write a fault instead of a write into somebody else's memory.
        """
        if not self._closed:
            self._closed = True
            self._ready = [-1] * self.geometry.cols
            for region in self._regions:
                region.close()

    def _check_limit(self, col: int, start: int, end: int) -> None:
        needed = sum(region.pages_needed({col: (start, end)}) for region in self._regions)
        if needed and self.committed_pages + needed > self.page_limit:
            raise StoreFullError(
                f"prepare_write: column {col} needs {needed} pages, {self.committed_pages} of "
                f"{self.page_limit} are in use; release a sequence or raise the limit",
                needed,
            )

    def _backed_positions(self, col: int) -> int:
        capacity = self.geometry.capacity
        return min(region.backed_positions(col, capacity) for region in self._regions)

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise StoreError(f"{call}: the store is closed; make a new one")
