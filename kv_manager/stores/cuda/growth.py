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
            if region.shared_end(col):
                exchanges = region.exchanges(col, write)
                if exchanges and region.idle_pages(col):
                    self._retired.clear(col)
                region.privatize(col, exchanges, write[2], stream)
        self.grow(col, write[1], stream)

    def clone(self, src: int, dst: int, n_rows: int, known: int, stream: int) -> None:
        """Share extents with the empty column ``dst``, back the other pages and copy them.

        Where the pages cannot be had nothing is changed; what else fails may leave regions done.
        """
        if any(region.idle_pages(dst) for region in self._regions):
            self._retired.clear(dst)
        parts = [region.clone_parts(src, dst, n_rows, known) for region in self._regions]
        new = self._pool.take_all([pages for _, counts in parts for pages in counts])
        try:
            for region, (shared, _) in zip(self._regions, parts, strict=True):
                region.clone(src, dst, n_rows, shared, new.pop(0) + new.pop(0), stream)
        except BaseException:
            for extents in new:
                self._pool.give(extents)
            raise

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
                    (extents,) = self._pool.take_all([missing])
                    region.extend(col, extents, stream)
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
        size, limit = region.next_reusable(col), self._limit()
        used = sum(region.committed for region in self._regions)
        if not size or size > 2 * missing or limit - used - size < limit // 8:
            return False
        return not self._retired.done(col)
