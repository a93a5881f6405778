"""Which pages columns share, and which of them no request needs."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from vllm_kv_columns.plugin.page_pool import PagePool

__all__ = ["PageUse"]


class PageUse:
    """Of each page, how many columns have it (the page's own count) and how many of these requests.

    Attributes:
        pool: what pages come from.
        retained: pages that no request's column has.
        shared: pages that two or more columns have, counted once.
    """

    pool: "PagePool"

    def __init__(self) -> None:
        self.retained = self.shared = 0
        self._users: dict[int, int] = {}  # page -> how many requests' columns have it, if any do

    def __len__(self) -> int:
        """Pages that requests have."""
        return len(self._users)

    def take(self, count: int) -> list["KVCacheBlock"]:
        """So many new pages for a request's column."""
        new = self.pool.get_new_blocks(count)
        self._users.update((page.block_id, 1) for page in new)
        return new

    def share(self, pages: Sequence["KVCacheBlock"]) -> None:
        """One more column, a request's, has the pages."""
        self.use(pages)
        self.shared += sum(page.ref_cnt == 1 for page in pages)
        self.pool.touch(pages)

    def use(self, pages: Iterable["KVCacheBlock"]) -> None:
        """A column that has the pages becomes a request's."""
        for page in pages:
            users = self._users.get(page.block_id, 0)
            self._users[page.block_id] = users + 1
            if not users:
                self.retained -= 1

    def unuse(self, pages: Iterable["KVCacheBlock"]) -> None:
        """A column that has the pages is no request's any more."""
        for page in pages:
            self._users[page.block_id] -= 1
            if not self._users[page.block_id]:
                del self._users[page.block_id]
                self.retained += 1

    def drop(self, pages: Sequence["KVCacheBlock"]) -> None:
        """A column that is no request's gives the pages up."""
        self.retained -= sum(
            page.ref_cnt == 1 and page.block_id not in self._users for page in pages
        )
        self.shared -= sum(page.ref_cnt == 2 for page in pages)
        self.pool.free_blocks(reversed(pages))

    def count_retained(self, pages: Iterable["KVCacheBlock"]) -> int:
        """How many of the pages no request's column has."""
        return sum(page.block_id not in self._users for page in pages)
