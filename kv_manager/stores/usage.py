"""What a store holds and has done, in pages."""

from dataclasses import dataclass

__all__ = ["StoreUsage"]


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Pages of one store, scratch included.

    Attributes:
        committed: physical pages in use by columns, shared ones once.
        spare: physical pages that the store holds beside them, for reuse or until the device is
            done with them.
        spare_limit: most spare pages that are left once the store has settled.
        mapped: put under columns since the store was made, a shared page once for each column.
        unmapped: taken from under columns again, counted in the same way.
    """

    committed: int
    spare: int = 0
    spare_limit: int = 0
    mapped: int = 0
    unmapped: int = 0
