"""The leading part of an extent, as it is mapped in a column."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import StoreError, StoreFullError
from .driver import Driver
from .extents import Extent

__all__ = ["Piece", "map_pieces", "whole"]


@dataclass(eq=False, slots=True)
class Piece:
    """The first ``pages`` pages of an extent: the driver maps an allocation from its start only."""

    extent: Extent
    pages: int


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
