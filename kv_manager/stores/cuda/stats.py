"""Counts for measuring a cuda-vmm store."""

from dataclasses import dataclass

__all__ = ["StoreStats"]


@dataclass(frozen=True)
class StoreStats:
    """Totals since the store was made.

    Pages are counted each time; ``reused_pages`` became part of a column again where they were,
    without a call to the driver. Seconds are wall time: ``caller_seconds`` in calls that found
    something to do, waiting for the keeper included, ``keeper_seconds`` in the background.
    ``waits`` counts the events that a caller had to wait for.
    """

    caller_seconds: float
    keeper_seconds: float
    mapped_pages: int
    unmapped_pages: int
    reused_pages: int
    created_pages: int
    released_pages: int
    waits: int
