"""What is mapped in a column: leading parts of extents."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import StoreError, StoreFullError
from .driver import Driver
from .extents import Extent

__all__ = ["Cut", "Piece", "Pieces", "map_pieces", "whole"]


@dataclass(eq=False, slots=True)
class Piece:
    """The first ``pages`` pages of an extent: the driver maps an allocation from its start only."""

    extent: Extent
    pages: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A piece of which all but the first ``keep`` pages become private.

    ``index``: of the piece in its column. ``first``: the page of the column at which it begins.
    """

    index: int
    first: int
    piece: Piece
    keep: int

    @property
    def copies(self) -> int:
        """Pages that are needed."""
        return self.piece.pages - self.keep


@dataclass(slots=True)
class Pieces:
    """Those of a column, from its first page on: ``live`` ones, then idle ones.

    shared_end: live pages from here on are in no other column, and zero where no row is.
    stale: live pages of one piece that may hold given-up rows, since they were shared then.
    """

    pieces: list[Piece] = field(default_factory=list)
    live: int = 0
    live_pages: int = 0
    idle_pages: int = 0
    shared_end: int = 0
    stale: tuple[int, int] | None = None


def whole(extents: Sequence[Extent]) -> list[Piece]:
    """All of each extent."""
    return [Piece(extent, extent.pages) for extent in extents]


def map_pieces(driver: Driver, address: int, pieces: Sequence[Piece], page_size: int) -> None:
    """Map pieces one behind the other and make them accessible, or raise and map nothing."""
    end = address
    try:
        for piece in pieces:
            nbytes = piece.pages * page_size
            driver.map(end, nbytes, piece.extent.handle)
            end += nbytes
        driver.allow(address, end - address)
    except StoreError as error:
        if end > address:
            driver.unmap(address, end - address)
        if isinstance(error, StoreFullError):
            raise StoreFullError(str(error), sum(x.pages for x in pieces)) from error
        raise
