"""vLLM's schedulers, told when the memory that they promised cannot be had.

The budget is a promise: another process or torch itself may hold the memory when a sequence comes
to need it. A worker then refuses the request and says so with the step's output. The scheduler
preempts it, and promises no more than the workers can have until memory is back.
"""

import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_kv_columns.plugin.report import report_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

__all__ = ["AsyncColumnScheduler", "ColumnScheduler"]

logger = init_logger("vllm.plugins.kv_columns")


class _MemoryReports:
    """Goes in front of a vLLM scheduler class."""

    kv_cache_manager: Any
    running: list[Request]
    prev_step_scheduled_req_ids: set[str]
    requests: dict[str, Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._withheld: list[KVCacheBlock] = []

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> Any:
        report = report_of(model_runner_output)
        if report is not None:
            self._take_back(set(report.refused))
            self._withhold(report.obtainable_pages)
        # The next class in line is vLLM's scheduler, which mypy cannot know here.
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )

    def _take_back(self, refused: set[str]) -> None:
        """Preempt the refused requests; what this step and one in flight computed is dropped."""
        for request_id in refused:
            request = self.requests.get(request_id)
            if request is not None and request.status == RequestStatus.PREEMPTED:
                # By vLLM, which would still deliver what was in flight.
                request.drop_stale_output = True
        for request in reversed([one for one in self.running if one.request_id in refused]):
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
                self.prev_step_scheduled_req_ids.discard(request.request_id)
                self._preempt_request(  # type: ignore[attr-defined]
                    request, time.monotonic(), drop_stale_output=True
                )

    def _withhold(self, obtainable_pages: int) -> None:
        """Take pages out of the budget that the workers cannot have, or put them back.

        Pages that sequences hold cannot be taken out; those sequences are refused, and preempted,
        when they come to need what is not there.
        """
        pool = self.kv_cache_manager.block_pool
        budget = pool.num_gpu_blocks - 1  # one block is vLLM's null block
        missing = min(max(budget - obtainable_pages, 0), budget)
        change = missing - len(self._withheld)
        if change > 0:
            if not self._withheld:
                logger.warning(
                    "SDPA_VARLEN: %d of the %d pages of the KV cache's budget cannot be had; "
                    "other allocations hold the memory. Requests wait for it or are preempted; "
                    "lower --gpu-memory-utilization if this lasts.",
                    missing,
                    budget,
                )
            self._withheld += pool.get_new_blocks(min(change, pool.get_num_free_blocks()))
        elif change < 0:
            back, self._withheld = self._withheld[missing:], self._withheld[:missing]
            pool.free_blocks(back)
            if not self._withheld:
                logger.info("SDPA_VARLEN: the whole budget of the KV cache can be had again.")


class ColumnScheduler(_MemoryReports, Scheduler):
    """vLLM's scheduler for columns."""


class AsyncColumnScheduler(_MemoryReports, AsyncScheduler):
    """vLLM's scheduler for columns, a step ahead of the workers."""
