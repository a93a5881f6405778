"""Columns as plain tensors in the order [rows, cols, ...]: one long sequence lengthens them all."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from ..errors import StoreError, StoreFullError
from ..geometry import SCRATCH_COLUMN, CacheGeometry, RegionGeometry
from .base import ColumnStore

__all__ = ["DenseStore"]


class DenseStore(ColumnStore):
    """One tensor [rows, cols, 2, H, D] per layer, with rows for the longest sequence alive.

    Grows by GROWTH_ROWS rows with a copy, layer by layer, so a growing layer is there twice for a
    moment. ``layer_view`` must be taken anew after each call that changes the store. Pages are
    the tensors' bytes divided by the page size. Rows of a column beyond the end of what
    was prepared are zero. Nothing is shared: a clone copies bytes. Works on the CPU.
    """

    stable_views: ClassVar[bool] = False
    per_column: ClassVar[bool] = False
    GROWTH_ROWS: ClassVar[int] = 128

    def __init__(self, geometry: CacheGeometry) -> None:
        super().__init__(geometry)
        self._end = [0] * geometry.cols
        self._tensors: dict[str, torch.Tensor] = {}
        self._resize(1)
        self._end[SCRATCH_COLUMN] = 1

    def layer_view(self, layer: str) -> torch.Tensor:
        self._check_open("layer_view")
        self.geometry.region_of(layer)
        return self._tensors[layer]

    def pages_needed(self, wants: Mapping[int, tuple[int, int]]) -> int:
        self._check_open("pages_needed")
        longest = max(self._end)
        for col, (start, end) in wants.items():
            self._check_range("pages_needed", col, start, end)
            longest = max(longest, end)
        return max(0, self._pages_of(longest) - self.committed_pages)

    def prepare_write(self, col: int, start: int, end: int) -> None:
        self._check_open("prepare_write")
        self._check_range("prepare_write", col, start, end)
        if end > self._end[col]:
            if end > max(self._end):
                self._resize(end)
            self._end[col] = end

    def prepare_writes(self, wants: Mapping[int, tuple[int, int]]) -> None:
        for col, (start, end) in wants.items():
            self._check_range("prepare_write", col, start, end)
        longest = max(wants, key=lambda col: wants[col][1], default=SCRATCH_COLUMN)
        for col in sorted(wants, key=lambda col: col != longest):  # so that it grows only once
            self.prepare_write(col, *wants[col])

    def release(self, col: int) -> None:
        self._check_open("release")
        self._check_col("release", col)
        self._clear(col, 0)
        self._end[col] = 0
        self._resize(max(self._end))

    def clone(self, src: int, dst: int, n_rows: int) -> None:
        self._check_open("clone")
        self._check_clone(src, dst, n_rows, self._end)
        for region in self.geometry.regions:
            for layer in region.layers:
                rows = self._tensors[layer][: min(n_rows, region.rows)]
                rows[:, dst] = rows[:, src]
        self._end[dst] = n_rows

    def shrink(self, col: int, length: int) -> None:
        self._check_open("shrink")
        self._check_col("shrink", col)
        self._check_range("shrink", col, 0, length)
        if length < self._end[col]:
            self._clear(col, length)
            self._end[col] = length
            self._resize(max(self._end))

    @property
    def committed_pages(self) -> int:
        return self._whole_pages(sum(tensor.nbytes for tensor in self._tensors.values()))

    def resident_bytes(self) -> int:
        """Bytes of the tensors' storages."""
        self._check_open("resident_bytes")
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors.values())

    def close(self) -> None:
        """Drop the tensors. A view that is still about keeps its own tensor alive."""
        self._tensors = {}

    def _rows(self, region: RegionGeometry, longest: int) -> int:
        if longest <= 1:
            return 1  # the scratch column's
        step = -(-self.GROWTH_ROWS // region.growth_rows) * region.growth_rows
        return min(-(-longest // step) * step, region.rows)

    def _pages_of(self, longest: int) -> int:
        row_bytes = (r.row_bytes * r.cols * self._rows(r, longest) for r in self.geometry.regions)
        return self._whole_pages(sum(row_bytes))

    def _whole_pages(self, nbytes: int) -> int:
        return -(-nbytes // self.geometry.page_size)

    def _resize(self, longest: int) -> None:
        """Give every layer the rows that a longest sequence of so many tokens needs."""
        for region in self.geometry.regions:
            rows = self._rows(region, longest)
            for layer in region.layers:
                old = self._tensors.get(layer)
                if old is None or old.shape[0] != rows:
                    self._tensors[layer] = self._copy(region, old, rows)

    def _copy(self, region: RegionGeometry, old: torch.Tensor | None, rows: int) -> torch.Tensor:
        shape = (rows, *region.shape[1:])
        dtype: torch.dtype = getattr(torch, region.dtype)
        try:
            with torch.inference_mode(False):  # so that it can be written in and out of that mode
                new = torch.zeros(shape, dtype=dtype)
        except RuntimeError as error:
            raise StoreFullError(
                f"no memory for {rows} rows of {region.cols} columns of region {region.name!r}: "
                f"{str(error).splitlines()[0]}; lower the byte budget or max_seqs",
                self._whole_pages(rows * region.cols * region.layer_stride * region.itemsize),
            ) from error
        if old is not None:
            kept = min(rows, old.shape[0])
            new[:kept] = old[:kept]
        return new

    def _clear(self, col: int, length: int) -> None:
        """Zero the rows that hold no position below ``length``."""
        for region in self.geometry.regions:
            for layer in region.layers:
                self._tensors[layer][length : min(self._end[col], region.rows), col] = 0

    def _check_open(self, call: str) -> None:
        if not self._tensors:
            raise StoreError(f"{call}: the store is closed; make a new one")
