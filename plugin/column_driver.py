"""A worker's side: carries the scheduler's plan of a step out on the store."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm_kv_columns.kv_manager.errors import ConfigError, StoreFullError
from vllm_kv_columns.kv_manager.stores.base import ColumnStore
from vllm_kv_columns.plugin.commands import Command, Release, Rewind, commands_of
from vllm_kv_columns.plugin.idle_timer import IdleTimer
from vllm_kv_columns.plugin.report import MemoryReport, UsageReport
from vllm_kv_columns.plugin.shortage import Agree, Shortage
from vllm_kv_columns.plugin.step_times import StepTimes

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["ColumnDriver"]


class ColumnDriver:
    """Keeps the request -> column table and makes the store ready before each step.

    A request whose rows cannot be backed is refused: it loses its column, the step runs without
    it (its tokens go to the scratch column), and the report with the step's output tells the
    scheduler, which preempts it. It stays refused until the plan says that it was preempted or
    ended; steps that were planned before the scheduler knew may still name it.

    Columns that no request has are retained for what they hold, until the plan has them released,
    or until no request was running for a while: then all of them are emptied.

    Args:
        retain_seconds: how long.

    Attributes:
        store: the column store; grown and released here and nowhere else.
        peak_pages: largest number of committed pages seen after a step was prepared.
        refused: requests without a column, at present.
        refused_growths: requests that got no memory so far.
        report: of the last step; None unless memory is short.
        times: how long steps waited for this.
    """

    def __init__(
        self, store: ColumnStore, agree: Agree | None = None, retain_seconds: float = 60.0
    ) -> None:
        self.store = store
        self.peak_pages = store.committed_pages
        self.refused: set[str] = set()
        self.refused_growths = 0
        self.report: MemoryReport | None = None
        self.times = StepTimes()
        self._agree = agree
        self._column: dict[str, int] = {}
        self._wants: dict[int, tuple[int, int]] = {}  # of the last step
        self._running: list[str] | None = None  # requests of the last step; None: others too
        self._slack = 0  # tokens that each column of the last step can take as things are
        self._later: SchedulerOutput | None = None  # a step whose wants are not made out yet
        self._void: set[int] = set()  # columns that do not hold what the scheduler thinks
        self._held: set[int] = set()  # columns that hold anything
        self._shortage = Shortage(store, agree)
        self._told: UsageReport | None = None
        self._lock = threading.Lock()
        self._idle = IdleTimer(retain_seconds, self._empty_retained)

    def prepare(self, plan: "SchedulerOutput") -> None:
        """Carry out what the plan says about columns, then back the rows that the step writes.

        Args:
            plan: the scheduler's output; also comes once with no tokens after the last request.

        Raises:
            StoreError: what the store can never serve, or a driver that failed otherwise than
                by lack of memory.
        """
        begin = time.perf_counter()
        with self._lock:
            decodes = self._prepare(plan)
        self.times.add(begin, time.perf_counter(), decodes)

    def _prepare(self, plan: "SchedulerOutput") -> bool:
        """What `prepare` does; whether all that the step has are decodes."""
        self._idle.stop()
        ended = self._unbind(plan.finished_req_ids)
        ended += self._unbind(plan.preempted_req_ids or ())
        commands = commands_of(plan)
        if commands is None:
            # A step of vLLM's own, to warm up: nobody will have its columns released.
            commands = [Release(column) for column in ended]
        if commands:
            self._carry_out(commands)
        decodes = plan.total_num_scheduled_tokens == len(plan.num_scheduled_tokens) > 0
        goes_on = decodes and not commands and self._goes_on(plan)
        self._later, self._slack = plan if goes_on else None, 0
        missing = {} if goes_on else self._missing(plan)
        failed = self._back(plan.num_scheduled_tokens, missing)
        self.peak_pages = max(self.peak_pages, self.store.committed_pages)
        self.report = self._shortage.report(failed)
        others = plan.scheduled_new_reqs or self.refused
        self._running = None if others else plan.scheduled_cached_reqs.req_ids
        if self._held and not self._column:
            self._idle.start()
        return decodes

    def grow_ahead(self) -> None:
        """Beside the running step: tell the store what it writes, let it back what is next."""
        with self._lock:
            self._grow_ahead()

    def take_usage(self) -> UsageReport | None:
        """For the metrics, at the end of a step; None if it is what was taken last."""
        usage = UsageReport(self.store.usage(), self.refused_growths)
        if usage == self._told:
            return None
        self._told = usage
        return usage

    def set_limit(self, nbytes: int, longest: int) -> None:
        """Bound the memory of the columns anew, while requests run; the scheduler hears of it.

        Args:
            nbytes: of all columns, the scratch column included.
            longest: tokens of the longest sequence that is served.

        Raises:
            ConfigError: less than one such sequence may need.
        """
        geometry = self.store.geometry
        pages = nbytes // geometry.page_size
        least = geometry.scratch_pages + geometry.pages_for(longest)
        if pages < least:
            raise ConfigError(
                f"a limit of {nbytes} bytes is {pages} pages of {geometry.page_size}; one sequence "
                f"of {longest} tokens may need {least}: set at least "
                f"{least * geometry.page_size} bytes"
            )
        with self._lock:
            self.store.limit_pages = pages
            self._shortage.limit_changed()

    def give_back(self) -> None:
        """Hold nothing but the scratch column, spare memory included, until the next step.

        The device must be done with all columns. A request that is to go on from one is refused.
        """
        self._idle.stop()
        with self._lock:
            self._empty()
            spare, self.store.spare_bytes = self.store.spare_bytes, 0
            try:
                self.store.trim()
            finally:
                self.store.spare_bytes = spare

    def close(self) -> None:
        """Give all memory back."""
        self._idle.stop()
        with self._lock:
            self.store.close()

    def _empty_retained(self) -> None:
        """Nobody has asked for anything for a while: hold nothing."""
        with self._lock:
            if not self._column and self._held:
                self._empty()

    def _empty(self) -> None:
        self.store.release_all(sorted(self._held))
        self._void |= self._held
        self._shortage.lost |= self._held
        self._held.clear()
        self._wants, self._later, self._slack = {}, None, 0

    def _grow_ahead(self) -> None:
        if self._later is not None:
            later, self._later = self._later, None
            self._missing(later)
        self.store.prepare_writes(self._wants)
        self.store.prepare_ahead({column: end for column, (_, end) in self._wants.items()})
        ready = self.store.writable()
        self._slack = min((ready[col] - end for col, (_, end) in self._wants.items()), default=0)

    def _goes_on(self, plan: "SchedulerOutput") -> bool:
        """Whether a step of decodes is for the requests of the last one, and all have their row.

        Then the launch need not wait until each request was looked at.
        """
        cached = plan.scheduled_cached_reqs
        return (
            self._slack > 0
            and not plan.scheduled_new_reqs
            and cached.req_ids == self._running
            and not any(cached.new_block_ids)
        )

    def _missing(self, plan: "SchedulerOutput") -> dict[int, tuple[int, int]]:
        """Bind columns; column -> positions [start, end) for those that need the store's work.

        Most decode steps find their rows there; the launch is not to wait for more than that.
        """
        scheduled, column_of = plan.num_scheduled_tokens, self._column
        ready = self.store.writable()
        wants: dict[int, tuple[int, int]] = {}
        missing: dict[int, tuple[int, int]] = {}
        for new in plan.scheduled_new_reqs:
            self._bind(new.req_id, new.block_ids)
            start = new.num_computed_tokens
            column = column_of[new.req_id]
            wants[column] = missing[column] = (start, start + scheduled[new.req_id])
        cached = plan.scheduled_cached_reqs
        for request, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if blocks is not None and any(blocks):
                self._bind(request, blocks)
            elif request in self.refused:
                continue
            column, end = column_of[request], start + scheduled[request]
            wants[column] = (start, end)
            if end > ready[column]:
                missing[column] = (start, end)
        self._wants = wants
        return missing

    def _back(self, scheduled: dict[str, int], missing: dict[int, tuple[int, int]]) -> list[str]:
        """Back what is missing; the requests that were refused."""
        failed = self._refuse_void(missing) if self._void else []
        try:
            self.store.prepare_writes(missing)
        except StoreFullError:
            failed += self._back_one_by_one(missing)
        refused_here = bool(failed)
        if self._agree is not None and scheduled:
            votes = self._agree([request in failed for request in scheduled])
            for request, vote in zip(scheduled, votes, strict=True):
                if vote and request not in self.refused:
                    failed.append(request)
                    self.refused_growths += 1
                    self._refuse(request)
        if failed and not refused_here:
            self._shortage.look()
        return failed

    def _refuse_void(self, missing: dict[int, tuple[int, int]]) -> list[str]:
        """Refuse requests that were to go on from what is not there, and forget their wants."""
        failed = [request for request, column in self._column.items() if column in self._void]
        for request in failed:
            missing.pop(self._column[request], None)
            self._refuse(request)
        if failed:
            self._shortage.look()
        return failed

    def _back_one_by_one(self, missing: dict[int, tuple[int, int]]) -> list[str]:
        """Back what can be backed; those whose rows cannot are refused."""
        owner = {column: request for request, column in self._column.items()}
        failed: list[str] = []
        for column, (start, end) in missing.items():
            try:
                self.store.prepare_write(column, start, end)
            except StoreFullError as error:
                if not failed:
                    self._shortage.look(error)
                failed.append(owner[column])
                self.refused_growths += 1
                self._refuse(owner[column])
        return failed

    def _refuse(self, request: str) -> None:
        column = self._column.pop(request)
        self._wants.pop(column, None)
        self._void.add(column)
        self._shortage.lost.add(column)
        self._held.discard(column)
        self.store.release(column)
        self.refused.add(request)

    def _bind(self, request: str, block_ids: tuple[list[int], ...]) -> None:
        ((column,),) = block_ids
        self._column[request] = column  # a streamed prompt goes on in its column
        self._held.add(column)

    def _unbind(self, requests: Iterable[str]) -> list[int]:
        """Forget whose the columns are, and return them."""
        columns = []
        for request in requests:
            self.refused.discard(request)
            if request in self._column:
                columns.append(self._column.pop(request))
        return columns

    def _carry_out(self, commands: Sequence[Command]) -> None:
        """Release, rewind and clone columns, in order.

        A source that has lost what it held, or a clone that gets no memory, makes a void column:
        the request that is to go on from it is refused.
        """
        released: list[int] = []
        for command in commands:
            if isinstance(command, Release):
                released.append(command.column)
                for columns in (self._void, self._held, self._shortage.lost):
                    columns.discard(command.column)
                continue
            if released:
                self.store.release_all(released)
                released = []
            if isinstance(command, Rewind):
                if command.column not in self._void:
                    self.store.shrink(command.column, command.tokens)
            elif command.source in self._void:
                self._void.add(command.column)
            else:
                try:
                    self.store.clone(command.source, command.column, command.tokens)
                except StoreFullError:
                    self._void.add(command.column)
                    self.refused_growths += 1
        if released:
            self.store.release_all(released)
