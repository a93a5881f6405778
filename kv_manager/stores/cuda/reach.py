"""How far each column reaches: what was asked for, and what is backed."""

from collections.abc import Sequence

from ...geometry import SCRATCH_COLUMN, CacheGeometry
from .region import CudaRegion

__all__ = ["Reach"]


class Reach:
    """Four numbers for each column.

    end: positions [0, end) were prepared. low, ready: positions [low, ready) are backed by pages
    that no other column has; ready is 0 when the positions from end on are not among them.
    quiet: the largest n whose ``pages_for(n)`` pages are backed.
    """

    def __init__(self, geometry: CacheGeometry, regions: Sequence[CudaRegion]) -> None:
        self.end = [0] * geometry.cols
        self.low = [0] * geometry.cols
        self.ready = [0] * geometry.cols
        self.quiet = [0] * geometry.cols
        self._capacity = geometry.capacity
        self._regions = regions

    def covers(self, col: int, start: int, end: int) -> bool:
        """Whether the positions can be written as things are; true for most decode steps."""
        return 0 <= col < len(self.ready) and self.low[col] <= start <= end <= self.ready[col]

    def publish(self, col: int) -> None:
        """Say how far the column can be written without any work; last, when zeroing is queued."""
        low, ready = 0, 1 if col == SCRATCH_COLUMN else self._capacity
        quiet = ready
        for region in self._regions:
            pages = region.live_pages(col)
            if pages < region.geometry.pages_per_column:
                ready = min(ready, region.geometry.rows_within(pages))
                quiet = min(quiet, region.geometry.tokens_within(pages) or 0)
            shared = region.shared_end(col)
            if shared:
                low = max(low, -(-shared * region.geometry.page_size // region.geometry.row_bytes))
                ready = min(ready, region.geometry.rows)
        self.low[col] = low
        self.ready[col], self.quiet[col] = ready if low <= self.end[col] else 0, quiet

    def close(self) -> None:
        """Nothing is covered any more."""
        self.ready = [-1] * len(self.ready)
