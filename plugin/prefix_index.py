"""Which columns begin with a prompt's blocks of tokens.

A block's hash covers everything before it, so whoever has a block has all blocks above it, and the
number of a prompt's blocks that some column has is found by bisection.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """Hash of a block -> the columns that have it, in the order in which they got it."""

    def __init__(self) -> None:
        self._columns: dict[bytes, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._columns)

    def add(self, column: int, hashes: Iterable[bytes]) -> None:
        """The column has these blocks as well."""
        for one in hashes:
            self._columns.setdefault(one, {})[column] = None

    def __contains__(self, block: bytes) -> bool:
        """Whether some column has the block."""
        return block in self._columns

    def remove(self, column: int, hashes: Iterable[bytes]) -> None:
        """The column has these blocks no longer."""
        for one in hashes:
            columns = self._columns[one]
            del columns[column]
            if not columns:
                del self._columns[one]

    def columns(self, block: bytes) -> dict[int, None]:
        """Columns that have the block, in the order in which they got it."""
        return self._columns.get(block, {})

    def longest(
        self, hashes: Sequence[bytes], most: int, also: Callable[[bytes], bool] | None = None
    ) -> int:
        """How many of the first `most` blocks some column begins with.

        Args:
            also: blocks that count, too, though no column of the index has them.
        """

        def lacks(i: int) -> bool:
            one = hashes[i]
            return one not in self._columns and (also is None or not also(one))

        return bisect_left(range(min(most, len(hashes))), True, key=lacks)
