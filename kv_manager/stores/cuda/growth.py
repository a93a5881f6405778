"""How a column gets its pages: reused where they are, or mapped anew."""

from collections.abc import Callable

from ...errors import StoreFullError
from .extents import ExtentPool
from .region import CudaRegion, Write
from .retired import RetiredColumns

__all__ = ["Growth"]


class Growth:
    """Backs the pages of a column in all regions, for the caller or for the keeper.

    Either leaves columns valid whatever happens: grown, partly grown or as they were.
    """

    def __init__(
        self,
        regions: list[CudaRegion],
        retired: RetiredColumns,
        pool: ExtentPool,
        limit: Callable[[], int],
    ) -> None:
        self._regions = regions
        self._retired = retired
        self._pool = pool
        self._limit = limit

    def write(self, col: int, write: Write, stream: int) -> None:
        """Back the pages of a write by all means and make them private, or raise StoreFullError."""
        for region in self._regions:
            region.privatize(col, write, stream)
        self.grow(col, write[1], stream)

    def clone(self, src: int, dst: int, n_rows: int, known: int, stream: int) -> None:
        """Share pages with the empty column ``dst``, back the others by all means and copy them."""
        for region in self._regions:
            leads = region.leads(src, n_rows, known)
            if leads:
                if region.idle_pages(dst):
                    self._retired.clear(dst)
                region.share(src, dst, leads)
        self.grow(dst, n_rows, stream)
        for region in self._regions:
            region.copy(src, dst, n_rows, stream)

    def grow(self, col: int, end: int, stream: int) -> None:
        """Back the pages for ``end`` tokens by all means, or raise StoreFullError."""
        try:
            for region in self._regions:
                missing = self._reuse(region, col, end, stream)
                if missing and region.idle_pages(col):
                    if self._may_waste(region, col, missing):
                        region.reuse_too_large(col, stream)
                        continue
                    self._retired.clear(col)
                if missing:
                    region.extend(col, self._pool.take_all(missing), stream)
        finally:
            self._retired.settle(col)

    def grow_a_little(self, col: int, end: int, stream: int) -> bool:
        """One extent's work of the same, if it needs no waiting; False: there is nothing to do."""
        try:
            for region in self._regions:
                missing = self._reuse(region, col, end, stream)
                if missing and region.idle_pages(col):
                    if not self._retired.done(col):
                        return False
                    self._retired.clear(col)
                if missing:
                    extent = self._pool.take_now(missing)
                    if extent is None:
                        return False
                    region.extend(col, [extent], stream)
                    return True
        except StoreFullError:
            pass  # whoever needs the rows will try again, and be told
        finally:
            self._retired.settle(col)
        return False

    def _reuse(self, region: CudaRegion, col: int, end: int, stream: int) -> int:
        """Make idle extents that fit live again; how many pages are still missing."""
        pages = region.geometry.pages_of(col, end)
        if region.live_pages(col) < pages:
            region.reuse(col, pages, stream)
        return max(0, pages - region.live_pages(col))

    def _may_waste(self, region: CudaRegion, col: int, missing: int) -> bool:
        """Whether to use an idle extent that is too large, instead of waiting for its event.

        Only where half of it is needed and, that done, an eighth of the limit is in nobody's use:
        near the limit the pages that the caller counts must be there.
        """
        size, limit = region.next_whole(col), self._limit()
        used = sum(region.committed for region in self._regions)
        if not size or size > 2 * missing or limit - used - size < limit // 8:
            return False
        return not self._retired.done(col)
