"""vLLM's schedulers, told when the memory that they promised cannot be had.

The budget is a promise: another process or torch itself may hold the memory when a sequence comes
to need it. A worker then refuses the request and says so with the step's output. The scheduler
preempts it, and promises no more than the workers can have until memory is back.
"""

import time
from typing import TYPE_CHECKING, Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_kv_columns.plugin.block_events import attention_kind
from vllm_kv_columns.plugin.column_manager import ColumnManager
from vllm_kv_columns.plugin.commands import attach_commands
from vllm_kv_columns.plugin.report import report_of, usage_of
from vllm_kv_columns.plugin.usage_stats import UsageStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput

__all__ = ["AsyncColumnScheduler", "ColumnScheduler"]


class _ColumnScheduling:
    """Goes in front of a vLLM scheduler class, which is what super() finds; mypy cannot know."""

    kv_cache_manager: Any
    hash_block_size: int
    running: list[Request]
    prev_step_scheduled_req_ids: set[str]
    requests: dict[str, Request]
    vllm_config: "VllmConfig"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (self._columns,) = self.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(self._columns, ColumnManager)
        self._usage = UsageStats(self._columns.table)
        self.kv_cache_manager.kv_cache_event_metadata = (
            attention_kind(self._columns.table.geometry),
        )
        self._idle = False  # no request is left, and the workers have heard of it
        self._planning = False
        # A block is as long as a column here, and a prefix is to be found by smaller pieces.
        self.hash_block_size = self._columns.table.block_tokens
        self._hasher = get_request_block_hasher(
            self.hash_block_size,
            get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo),
        )

    def add_request(self, request: Request) -> None:
        if self.kv_cache_manager.enable_caching and request.request_id not in self.requests:
            request._block_hasher = self._hasher
            request.block_hashes.clear()
            request.update_block_hashes()
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":
        self._planning = True
        try:
            plan: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._planning = False
        attach_commands(plan, self._columns.table.take_commands())
        return plan

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> Any:
        report = report_of(model_runner_output)
        if report is not None:
            for column in report.lost:
                self._columns.table.empty(column)
            self._take_back(set(report.refused))
            self.kv_cache_manager.block_pool.bound(report.obtainable_pages, self._preempt_last)
        self._usage.usage = usage_of(model_runner_output) or self._usage.usage
        self._idle = not self.requests and not scheduler_output.total_num_scheduled_tokens
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )

    def make_stats(self, *args: Any, **kwargs: Any) -> "SchedulerStats | None":
        """vLLM's, with what has changed of the columns' numbers; None if it keeps no statistics."""
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            assert stats.kv_connector_stats is None
            stats.kv_connector_stats = self._usage.take(self._idle)
        return stats

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """By priority, vLLM may preempt a request whose tokens the step was to write already."""
        column = self._columns.table.of(request.request_id)
        if self._planning and column is not None:
            self._columns.table.lenders.will_not_hold(column)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _take_back(self, refused: set[str]) -> None:
        """Preempt the refused requests."""
        for request_id in refused:
            request = self.requests.get(request_id)
            if request is not None and request.status == RequestStatus.PREEMPTED:
                # By vLLM, which would still deliver what was in flight.
                request.drop_stale_output = True
        for request in reversed([one for one in self.running if one.request_id in refused]):
            if request.status == RequestStatus.RUNNING:
                self._preempt(request)

    def _preempt(self, request: Request) -> None:
        """Preempt a running request; what this step and one in flight computed is dropped."""
        self.running.remove(request)
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        self._preempt_request(request, time.monotonic(), drop_stale_output=True)

    def _preempt_last(self) -> bool:
        """Preempt the running request that came last; False if there is none."""
        for request in reversed(self.running):
            if request.status == RequestStatus.RUNNING:
                self._preempt(request)
                return True
        return False


class ColumnScheduler(_ColumnScheduling, Scheduler):
    """vLLM's scheduler for columns."""


class AsyncColumnScheduler(_ColumnScheduling, AsyncScheduler):
    """vLLM's scheduler for columns, a step ahead of the workers."""
