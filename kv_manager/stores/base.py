"""What a column store promises. Kernels take its strided views and nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import ClassVar, Self

import torch

from ..errors import StoreError
from ..geometry import SCRATCH_COLUMN, CacheGeometry

__all__ = ["ColumnStore"]


class ColumnStore(ABC):
    """Memory of all columns. Column 0 (scratch) is backed for one row from the start.

    Lengths and ring floors belong to the caller; a store keeps of each column how far it was
    prepared. It needs not know whether a ring has wrapped: positions below a length n sit in the
    first min(n, rows) rows either way. Not thread-safe. A store is a context manager that closes
    itself.
    """

    stable_views: ClassVar[bool]
    """Whether base addresses and strides of the views never change."""
    per_column: ClassVar[bool]
    """Whether memory is charged column by column, by ``geometry.pages_for``."""

    geometry: CacheGeometry

    def __init__(self, geometry: CacheGeometry) -> None:
        self.geometry = geometry

    @abstractmethod
    def layer_view(self, layer: str) -> torch.Tensor:
        """[rows, cols, 2, H, D] of a layer, strided; 2 is K, V. Position p is in row p % rows.

        ``rows`` is ``geometry.region_of(layer).rows``; a store without stable views may return
        fewer, those that exist now, until the next call that changes the store.
        Raises ConfigError for an unknown layer, StoreError once closed.
        """

    @abstractmethod
    def pages_needed(self, wants: Mapping[int, tuple[int, int]]) -> int:
        """Pages that ``prepare_writes(wants)`` would commit, copies of shared pages included.

        ``wants`` maps a column to positions (start, end). Changes nothing.
        """

    @abstractmethod
    def prepare_write(self, col: int, start: int, end: int) -> None:
        """Back the rows of positions [0, end) and make those of [start, end) private, writable.

        Rows that become part of the column read as zeros, bytes of live rows stay. Raises
        StoreError, with the column unchanged or partly grown, when memory cannot be had.
        """

    def prepare_writes(self, wants: Mapping[int, tuple[int, int]]) -> None:
        """``prepare_write`` of each column. The columns before a failing one stay prepared."""
        for col, (start, end) in wants.items():
            self.prepare_write(col, start, end)

    @abstractmethod
    def release(self, col: int) -> None:
        """Give the column's memory back. The column reads as zeros and can be used anew."""

    @abstractmethod
    def clone(self, src: int, dst: int, n_rows: int) -> None:
        """Give the empty column ``dst`` the positions [0, n_rows) of ``src``.

        Of a ring that wrapped these are the ones that its rows still hold. Raises StoreError when
        ``dst`` is in use or ``src`` was not prepared that far.
        """

    @abstractmethod
    def shrink(self, col: int, length: int) -> None:
        """After a rewind: give back whole pages (or rows) that hold no position below ``length``.

        Rewinding a ring below its floor is for the caller to refuse.
        """

    @property
    @abstractmethod
    def committed_pages(self) -> int:
        """Physical pages in use by the store's own count; shared ones once, scratch included."""

    @abstractmethod
    def resident_bytes(self) -> int:
        """Memory in use as measured, not computed."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Later calls raise StoreError, a second close does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_col(self, call: str, col: int) -> None:
        if not SCRATCH_COLUMN < col < self.geometry.cols:
            raise StoreError(
                f"{call}: column is {col}; sequences own columns 1 to {self.geometry.max_seqs}"
            )

    def _check_clone(self, src: int, dst: int, n_rows: int, ends: Sequence[int]) -> None:
        self._check_col("clone", src)
        self._check_col("clone", dst)
        if not 0 <= n_rows <= ends[src]:
            raise StoreError(f"clone: n_rows is {n_rows}, column {src} holds at most {ends[src]}")
        if ends[dst]:
            raise StoreError(f"clone: column {dst} is in use; release it first")

    def _check_range(self, call: str, col: int, start: int, end: int) -> None:
        if not 0 <= col < self.geometry.cols:
            raise StoreError(f"{call}: column is {col}; columns are 0 to {self.geometry.max_seqs}")
        limit = 1 if col == SCRATCH_COLUMN else self.geometry.capacity
        if not 0 <= start <= end <= limit:
            raise StoreError(
                f"{call}: positions are [{start}, {end}) in column {col}; "
                f"they must lie in order within [0, {limit})"
            )
