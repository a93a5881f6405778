"""What a column store promises. Kernels take its strided views and nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import ClassVar, Self

import torch

from ..errors import StoreError
from ..geometry import SCRATCH_COLUMN, CacheGeometry
from .usage import StoreUsage

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

    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    """Values of ``torch.device.type`` on which the views lie."""
    cut_pages: ClassVar[int] = 0
    """Most whole pages on either side of a cut through a column that stay together with it: so many
    of those below are copied and not shared by a clone, so many of those above stay after a rewind.
    A clone itself can be cut where it was made without that."""

    geometry: CacheGeometry
    spare_bytes: int = 0
    """Idle memory that the store may keep for reuse; may be changed at any time. A store that
    gives everything back at once keeps none, whatever is set."""
    limit_pages: int | None
    """Most physical pages that the store may hold from the system or driver, everything included.

    None: ``geometry.budget_pages``. May be changed at any time; pages that are in use stay.
    """

    def __init__(self, geometry: CacheGeometry) -> None:
        self.geometry = geometry
        self.limit_pages = None

    @property
    def page_limit(self) -> int:
        """``limit_pages``, or the geometry's budget where that is None."""
        return self.geometry.budget_pages if self.limit_pages is None else self.limit_pages

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
        StoreFullError when memory cannot be had now: the column is unchanged or partly grown,
        valid either way, and the call may be repeated.
        """

    def prepare_writes(self, wants: Mapping[int, tuple[int, int]]) -> None:
        """``prepare_write`` of each column. The columns before a failing one stay prepared."""
        for col, (start, end) in wants.items():
            self.prepare_write(col, start, end)

    def writable(self) -> Sequence[int]:
        """For each column an end: new positions below it can be written as things are.

        Whoever writes them may make the call of ``prepare_write`` late, to say how far the column
        is used. What lies beyond needs the call first, by default everything.
        """
        return [0] * self.geometry.cols

    def prepare_ahead(self, ends: Mapping[int, int]) -> None:  # noqa: B027 - a hint may be ignored
        """A hint: each column will soon be written up to its position ``end`` (exclusive).

        A store may back ``pages_for(end)`` pages in the background. It never raises for want of
        memory: ``prepare_write`` does, when the rows are needed. By default nothing happens.
        """

    def settle(self, timeout: float) -> bool:
        """Wait until nothing is left that the store does in the background.

        ``timeout`` in seconds; returns False when it passed first. By default nothing is done.
        """
        return True

    def obtainable_pages(self) -> int:
        """Pages that columns could hold in all if everything that can be had now were taken.

        What live columns hold is included, pages that no column can use are not.
        """
        return max(self.page_limit, self.committed_pages)

    @abstractmethod
    def release(self, col: int) -> None:
        """Give the column's memory back. The column can be used anew and reads as zeros then.

        Until it is prepared again it must not be read or written: a store may take its pages
        away as soon as the work is done that the device had before this call.
        """

    def release_all(self, cols: Sequence[int]) -> None:
        """``release`` of each column."""
        for col in cols:
            self.release(col)

    @abstractmethod
    def clone(self, src: int, dst: int, n_rows: int) -> None:
        """Give the empty column ``dst`` the positions [0, n_rows) of ``src``.

        Of a ring that wrapped these are the ones that its rows still hold. Raises StoreError when
        ``dst`` is in use or ``src`` was not prepared that far, StoreFullError (with ``dst`` empty)
        when memory cannot be had now.
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

    def usage(self) -> StoreUsage:
        """For metrics, after every step; a store that counts more than what is committed says so.

        May be called while the store works in the background, and is then a moment old.
        """
        return StoreUsage(self.committed_pages)

    def statistics(self) -> dict[str, float]:
        """Totals for measuring, by name; each store has its own, by default none."""
        return {}

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
