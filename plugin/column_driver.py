"""A worker's side: carries the scheduler's plan of a step out on the store."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_kv_columns.kv_manager.stores.base import ColumnStore

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["ColumnDriver"]


class ColumnDriver:
    """Keeps the request -> column table and makes the store ready before each step.

    Attributes:
        store: the column store; grown and released here and nowhere else.
        peak_pages: largest number of committed pages seen after a step was prepared.
    """

    def __init__(self, store: ColumnStore) -> None:
        self.store = store
        self.peak_pages = store.committed_pages
        self._column: dict[str, int] = {}

    def prepare(self, plan: "SchedulerOutput") -> None:
        """Release what ended, then back the rows that this step writes.

        Args:
            plan: the scheduler's output; also comes once with no tokens after the last request.

        Raises:
            StoreError: the operating system gives no memory.
        """
        self._release(plan.finished_req_ids)
        self._release(plan.preempted_req_ids or ())
        computed: dict[str, int] = {}
        for new in plan.scheduled_new_reqs:
            self._bind(new.req_id, new.block_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for request, blocks, done in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if blocks is not None and any(blocks):
                self._bind(request, blocks)
            computed[request] = done
        self.store.prepare_writes(
            {
                self._column[request]: (computed[request], computed[request] + tokens)
                for request, tokens in plan.num_scheduled_tokens.items()
            }
        )
        self.peak_pages = max(self.peak_pages, self.store.committed_pages)

    def _bind(self, request: str, block_ids: tuple[list[int], ...]) -> None:
        ((column,),) = block_ids
        self._release((request,))
        self._column[request] = column

    def _release(self, requests: Iterable[str]) -> None:
        for request in requests:
            column = self._column.pop(request, None)
            if column is not None:
                self.store.release(column)
