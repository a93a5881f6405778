"""How many pages of the budget are taken."""

from .errors import CacheFullError, KVCacheError

__all__ = ["PageBudget"]


class PageBudget:
    """A count of pages, at most ``budget_pages``."""

    def __init__(self, budget_pages: int, used: int = 0) -> None:
        self.budget_pages = budget_pages
        self.used = 0
        self.take(used)

    @property
    def free(self) -> int:
        return self.budget_pages - self.used

    def can_take(self, count: int) -> bool:
        return count <= self.free

    def check(self, count: int, what: str = "the request") -> None:
        """Raise CacheFullError, naming needed and free, when ``count`` pages do not fit."""
        if not self.can_take(count):
            raise CacheFullError(
                what,
                count,
                self.free,
                "pages",
                f"{self.used} of {self.budget_pages} are in use: "
                f"release or rewind a sequence, shorten the step or raise budget_bytes",
            )

    def take(self, count: int) -> None:
        """Count pages as used; CacheFullError when they do not fit."""
        self._check_count("take", count)
        self.check(count)
        self.used += count

    def give(self, count: int) -> None:
        """Count pages as free again; KVCacheError when fewer are in use."""
        self._check_count("give", count)
        if count > self.used:
            raise KVCacheError(f"give of {count} pages, but {self.used} are in use")
        self.used -= count

    def _check_count(self, call: str, count: int) -> None:
        if count < 0:
            raise KVCacheError(f"{call} of {count} pages; the count must not be negative")
