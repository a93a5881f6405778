"""Addresses at which new pages are filled before they take the place of shared ones."""

from collections.abc import Sequence

from .driver import Driver
from .extents import SIZES, Extent
from .mapped import map_extents

__all__ = ["Window"]


class Window:
    """Room for the largest extent, outside every column; its addresses are taken when first needed.

    The pages of a column cannot be exchanged while the device may be reading them. So a copy is
    made here, behind all queued work, and waited for.
    """

    def __init__(self, driver: Driver, page_size: int) -> None:
        self.waits = 0
        self._driver = driver
        self._page_size = page_size
        self._nbytes = SIZES[0] * page_size
        self._base: int | None = None

    def fill(self, extents: Sequence[Extent], source: int, copied: int, stream: int) -> None:
        """Copy ``copied`` pages from an address, zero the rest; the stream is idle on return.

        The extents are mapped nowhere then. Raises StoreError.
        """
        driver, size = self._driver, self._page_size
        if self._base is None:
            self._base = driver.reserve(self._nbytes, size)
        base, pages = self._base, sum(extent.pages for extent in extents)
        map_extents(driver, base, extents, size)
        try:
            if copied:
                driver.copy(base, source, copied * size, stream)
            if copied < pages:
                driver.zero(base + copied * size, (pages - copied) * size, stream)
        finally:
            self._wait(stream)
            driver.unmap(base, pages * size)

    def close(self) -> None:
        """Give the addresses back."""
        if self._base is not None:
            self._driver.free(self._base, self._nbytes)
            self._base = None

    def _wait(self, stream: int) -> None:
        event = self._driver.record(stream)
        self.waits += 1
        self._driver.wait(event)
        self._driver.drop(event)
