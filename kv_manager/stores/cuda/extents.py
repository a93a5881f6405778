"""Physical memory in extents of a few sizes, and the order in which more of it is looked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import StoreFullError
from .driver import Driver

__all__ = ["SIZES", "Extent", "ExtentPool", "Reclaim"]

SIZES = (64, 32, 16, 8, 4, 2, 1)  # pages; access is granted per extent: the fewer the better


@dataclass(eq=False, slots=True)
class Extent:
    """One physical allocation of ``pages`` pages, and who has it.

    It is mapped as a whole. ``holders`` are the live columns that it is mapped in, and
    ``mappings`` counts these and the idle ones: it can be given back when there are none.
    """

    handle: Any
    pages: int
    holders: set[int] = field(default_factory=set)
    mappings: int = 0


class Reclaim(Protocol):
    """Extents that stay mapped where nobody needs them any more."""

    def collect(self, size: int | None) -> None:
        """Give those to the pool whose work is done; only if some are of that size."""

    def wait_for_one(self) -> bool:
        """Wait for the oldest and give its extents to the pool; False if there are none."""


class ExtentPool:
    """Extents that are not mapped (spare), and the count of all that the driver gave.

    ``held_pages`` never passes ``limit()`` by a creation.
    """

    def __init__(
        self, driver: Driver, page_size: int, limit: Callable[[], int], reclaim: Reclaim
    ) -> None:
        self.held_pages = 0
        self.spare_pages = 0
        self.created_pages = 0
        self.released_pages = 0
        self._driver = driver
        self._page_size = page_size
        self._limit = limit
        self._reclaim = reclaim
        self._spare: dict[int, list[Extent]] = {size: [] for size in SIZES}
        self._refused = False  # whether the last failed creation was the driver's doing

    def take_now(self, want: int) -> Extent | None:
        """An extent of at most ``want`` pages, unless it takes waiting or sacrifices."""
        size = self._size(want)
        extent = self._take_spare(size)
        if extent is None:
            self._reclaim.collect(size)
            extent = self._take_spare(size)
        return extent or self._create(size)

    def take(self, want: int) -> Extent:
        """An extent of at most ``want`` pages, by all means. Raises StoreFullError.

        After what ``take_now`` tries: memory that torch caches, spare extents of other sizes given
        back for one of this size, smaller ones, and last what the device is still at work on.
        """
        extent = self.take_now(want)
        size = self._size(want)
        if extent is None and self._refused:
            self._driver.empty_cache()
            extent = self._create(size)
        while extent is None:
            self._reclaim.collect(None)
            extent = self._trade(size)
            if extent is None and not self._reclaim.wait_for_one():
                raise self.full(want)
        return extent

    def take_all(self, counts: Sequence[int]) -> list[list[Extent]]:
        """For each count extents of so many pages in all, or StoreFullError and none."""
        taken: list[list[Extent]] = []
        try:
            for missing in counts:
                taken.append([])
                while missing:
                    taken[-1].append(self.take(missing))
                    missing -= taken[-1][-1].pages
        except BaseException as error:
            for extents in taken:
                self.give(extents)
            if isinstance(error, StoreFullError):
                raise self.full(sum(counts)) from error
            raise
        return taken

    def give(self, extents: list[Extent]) -> None:
        """Extents that are not mapped any more become spare."""
        for extent in extents:
            self._spare[extent.pages].append(extent)
            self.spare_pages += extent.pages

    def trim_one(self, keep_pages: int) -> bool:
        """Give one spare extent back to the driver if more than ``keep_pages`` are spare."""
        if self.spare_pages <= keep_pages:
            return False
        size = max(SIZES, key=lambda size: size * len(self._spare[size]))
        self._release_spare(size)
        return True

    def full(self, pages: int) -> StoreFullError:
        """The error for pages that cannot be had."""
        used = self.held_pages - self.spare_pages
        return StoreFullError(
            f"no memory for {pages} pages of {self._page_size} bytes: {self.held_pages} of "
            f"{self._limit()} pages are held, {used} of them mapped, and "
            f"{self._driver.free_bytes()} bytes of the device are free; release a sequence, "
            f"raise the limit or free device memory",
            pages,
        )

    def _size(self, want: int) -> int:
        return next(size for size in SIZES if size <= want)

    def _take_spare(self, size: int) -> Extent | None:
        if not self._spare[size]:
            return None
        self.spare_pages -= size
        return self._spare[size].pop()

    def _create(self, size: int) -> Extent | None:
        self._refused = False
        if self.held_pages + size > self._limit():
            return None
        try:
            handle = self._driver.create(size * self._page_size)
        except StoreFullError:
            self._refused = True
            return None
        self.held_pages += size
        self.created_pages += size
        return Extent(handle, size)

    def _trade(self, largest: int) -> Extent | None:
        """An extent of ``largest`` pages, or the next smaller size, at the cost of spare ones.

        Spare extents are given up only where that can make room. Smaller ones are not when it is
        the driver that refused: somebody else may take what they leave.
        """
        for size in SIZES[SIZES.index(largest) :]:
            extent = self._take_spare(size) or self._create(size)
            while extent is None:
                others = [s for s in SIZES if s != size and (s > size or not self._refused)]
                other = next((s for s in others if self._spare[s]), None)
                if other is None or not self._would_fit(size, others):
                    break
                self._release_spare(other)
                extent = self._create(size)
            if extent is not None:
                return extent
        return None

    def _would_fit(self, size: int, others: list[int]) -> bool:
        """Whether an extent could be had if all spare ones of the other sizes were given up."""
        gain = sum(other * len(self._spare[other]) for other in others)
        if self.held_pages - gain + size > self._limit():
            return False
        return self._driver.free_bytes() // self._page_size + gain >= size

    def _release_spare(self, size: int) -> None:
        extent = self._spare[size].pop()
        self.spare_pages -= size
        self.held_pages -= size
        self.released_pages += size
        self._driver.release(extent.handle)
