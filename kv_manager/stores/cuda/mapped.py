"""What is mapped in a column: extents, each as a whole, one behind the other."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import StoreError, StoreFullError
from .driver import Driver
from .extents import Extent

__all__ = ["Exchange", "MappedColumn", "map_extents"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A shared extent of a column in whose place private ones of ``pages`` pages are to be mapped.

    ``index``: of the extent in its column. ``first``: the page of the column at which it begins.
    ``pages`` is less than the extent's where the column needs no more behind a rewind.
    """

    index: int
    first: int
    extent: Extent
    pages: int


@dataclass(slots=True)
class MappedColumn:
    """Extents of a column, from its first page on: ``live`` ones, then idle ones.

    shared_end: live pages from here on are in no other column, and zero where no row is.
    stale: live pages of one extent that may hold given-up rows, since they were shared then.
    """

    extents: list[Extent] = field(default_factory=list)
    live: int = 0
    live_pages: int = 0
    idle_pages: int = 0
    shared_end: int = 0
    stale: tuple[int, int] | None = None


def map_extents(driver: Driver, address: int, extents: Sequence[Extent], page_size: int) -> None:
    """Map extents one behind the other and make them accessible, or raise and map nothing."""
    end = address
    try:
        for extent in extents:
            nbytes = extent.pages * page_size
            driver.map(end, nbytes, extent.handle)
            end += nbytes
        driver.allow(address, end - address)
    except StoreError as error:
        if end > address:
            driver.unmap(address, end - address)
        if isinstance(error, StoreFullError):
            raise StoreFullError(str(error), sum(x.pages for x in extents)) from error
        raise
