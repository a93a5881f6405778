"""How much memory a worker can have, as far as the scheduler must hear of it."""

from collections.abc import Callable

from vllm_kv_columns.kv_manager.errors import StoreFullError
from vllm_kv_columns.kv_manager.stores.base import ColumnStore
from vllm_kv_columns.plugin.report import MemoryReport

__all__ = ["REPORT_STEPS", "Agree", "Shortage"]

Agree = Callable[[list[int]], list[int]]
"""Element by element the largest of what all workers of a tensor-parallel group pass."""

REPORT_STEPS = 32
"""While memory is short, every how many steps the workers look whether it came back. Steps and
not seconds, since all workers of a group must look at the same one."""


class Shortage:
    """Notes what befalls the memory in a step, and makes the report of it.

    Attributes:
        lost: columns that were emptied since the last report.
    """

    def __init__(self, store: ColumnStore, agree: Agree | None) -> None:
        self.lost: set[int] = set()
        self._store, self._agree = store, agree
        self._obtainable = 0  # pages, when a request was last refused
        self._steps: int | None = None  # since the last report; None: memory is not short
        self._new_limit = False  # since the last report

    def limit_changed(self) -> None:
        self._new_limit = True

    def look(self, error: StoreFullError | None = None) -> None:
        """A request is refused: find out how much can be had.

        Args:
            error: the store's refusal, which says how much was not to be had, whatever the
                counters of the system say.
        """
        self._obtainable = self._store.obtainable_pages()
        if error is not None:
            most = self._store.committed_pages + error.pages - 1
            self._obtainable = min(most, self._obtainable)

    def report(self, refused: list[str]) -> MemoryReport | None:
        """What the scheduler must know, and from now on whether memory came back."""
        lost, self.lost = tuple(sorted(self.lost)), set()
        if refused:
            pages = self._obtainable
        elif lost or self._new_limit:
            pages = self._store.obtainable_pages()
        elif self._steps is None:
            return None
        elif self._steps < REPORT_STEPS:
            self._steps += 1
            return None
        else:
            pages = self._store.obtainable_pages()
        self._new_limit = False
        pages = min(pages, self._store.page_limit)  # also where it holds more, after a new limit
        if self._agree is not None:
            pages = -self._agree([-pages])[0]
        self._steps = 0 if pages < self._store.page_limit else None
        # The scratch column is not part of the scheduler's budget.
        pages -= self._store.geometry.scratch_pages
        return MemoryReport(refused=tuple(refused), obtainable_pages=pages, lost=lost)
