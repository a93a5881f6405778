"""Columns with idle extents, and the events after which the device is done with these."""

from typing import Any

from .driver import Driver
from .region import CudaRegion

__all__ = ["RetiredColumns"]


class RetiredColumns:
    """An event for every column that has idle extents in a region, oldest first.

    An event of a column stands for all that came before it: when a column retires more, the newer
    event takes the older one's place.
    """

    def __init__(self, driver: Driver, regions: list[CudaRegion]) -> None:
        self.waits = 0
        self._driver = driver
        self._regions = regions
        self._events: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._events)

    def add(self, col: int, stream: int) -> None:
        """The column's idle extents are free once the stream's work of now is done."""
        self._forget(col)
        if self._has_idle(col):
            self._events[col] = self._driver.record(stream)

    def settle(self, col: int) -> None:
        """Forget the column if it has no idle extents any more."""
        if col in self._events and not self._has_idle(col):
            self._forget(col)

    def done(self, col: int) -> bool:
        return self._driver.done(self._events[col])

    def clear(self, col: int) -> None:
        """Unmap the column's idle extents, after waiting for its event if need be."""
        event = self._events[col]
        if not self._driver.done(event):
            self.waits += 1
            self._driver.wait(event)
        self._unmap(col)

    def collect(self, size: int | None) -> None:
        """Unmap the idle extents of columns whose event is done: those with extents of a size.

        With a size one column is enough, None means all.
        """
        for col in list(self._events):
            if (size is None or self._has_size(col, size)) and self.done(col):
                self._unmap(col)
                if size is not None:
                    return

    def collect_some(self) -> bool:
        """Unmap a few idle extents of one column whose event is done; False if there are none."""
        for col in self._events:
            if self.done(col):
                region = next(region for region in self._regions if region.idle_pages(col))
                region.unmap_idle(col, most=4)
                self.settle(col)
                return True
        return False

    def wait_for_one(self) -> bool:
        """Wait for the oldest and unmap its idle extents; False if there is none."""
        col = next(iter(self._events), None)
        if col is None:
            return False
        self.clear(col)
        return True

    def drop_all(self) -> None:
        """Forget all columns; their extents stay as they are."""
        for col in list(self._events):
            self._forget(col)

    def _has_idle(self, col: int) -> bool:
        return any(region.idle_pages(col) for region in self._regions)

    def _has_size(self, col: int, size: int) -> bool:
        return any(region.frees(col, size) for region in self._regions)

    def _unmap(self, col: int) -> None:
        for region in self._regions:
            region.unmap_idle(col)
        self._forget(col)

    def _forget(self, col: int) -> None:
        event = self._events.pop(col, None)
        if event is not None:
            self._driver.drop(event)
