"""A batch of sequences in columns: who owns which column, how long, and the three-call step."""

import heapq
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from .config import CacheConfig
from .errors import (
    CacheFullError,
    ConfigError,
    RewindError,
    StepError,
    StepOrderError,
    UnknownColumnError,
)
from .geometry import CacheGeometry
from .pages import PageBudget
from .planner import StepPlan, pad_step, plan_step

if TYPE_CHECKING:  # the store brings torch, planning does without
    from .stores.base import ColumnStore

__all__ = ["BatchedSequenceCache"]


class _State(Enum):
    IDLE = "no step is declared"
    DECLARED = "a step is declared but not prepared"
    PREPARED = "a step is prepared but not committed"
    COMMITTED = "the last step is committed"


_NEXT = {
    _State.IDLE: "call declare_step first",
    _State.DECLARED: "call prepare_step next, or abandon_step",
    _State.PREPARED: "call commit_step next, or abandon_step",
    _State.COMMITTED: "call declare_step first",
}


class BatchedSequenceCache:
    """Up to ``max_seqs`` sequences, each in a column of its own.

    A step is declare_step (validates, admits), prepare_step (backs the rows; then the model runs),
    commit_step (the lengths advance). A call that raises leaves lengths, columns and the step as
    they were. Not thread-safe.
    """

    def __init__(self, config: CacheConfig, store: "ColumnStore") -> None:
        """Raises ConfigError when the store was made for another configuration or is too big."""
        self.config = config
        self.geometry = CacheGeometry.of(config)
        self.store = store
        if store.geometry != self.geometry:
            raise ConfigError(
                "the store was made for another configuration; "
                "make it with CacheGeometry.of(config) of the same config"
            )
        if store.committed_pages > self.geometry.budget_pages:
            raise ConfigError(
                f"{type(store).__name__} takes {store.committed_pages} pages at start and "
                f"budget_bytes allows {self.geometry.budget_pages}; raise budget_bytes"
            )
        self._budget = PageBudget(self.geometry.budget_pages, store.committed_pages)
        self._length: dict[int, int] = {}
        self._high: dict[int, int] = {}  # largest length ever written, see RingPolicy.floor
        self._free = list(range(1, self.geometry.cols))
        self._state = _State.IDLE
        self._plan: StepPlan | None = None

    @property
    def max_seqs(self) -> int:
        return self.geometry.max_seqs

    @property
    def live_columns(self) -> tuple[int, ...]:
        """Columns that a sequence owns, ascending."""
        return tuple(sorted(self._length))

    @property
    def free_columns(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        """Pages of the budget in use, the scratch column's included."""
        return self._budget.used

    @property
    def free_pages(self) -> int:
        return self._budget.free

    def pos(self, col: int) -> int:
        """Length of the column's sequence: the position that its next token takes."""
        self._check_live(col)
        return self._length[col]

    def floor(self, col: int) -> int:
        """Shortest length to which the sequence can be rewound or cloned."""
        self._check_live(col)
        return self.geometry.floor(self._high[col])

    def seq_new(self) -> int:
        """Take a column for an empty sequence; CacheFullError when none is free."""
        self._check_no_step("seq_new")
        col = self._take_column("a new sequence")
        self._length[col] = self._high[col] = 0
        return col

    def seq_clone(self, src: int, n_rows: int | None = None) -> int:
        """Take a column for a sequence that begins with the first ``n_rows`` tokens of ``src``.

        None: all of them. Where the store shares pages it costs none, or those that will be
        written next; writing to shared pages does. Raises RewindError for fewer rows than
        ``floor(src)`` or more than ``pos(src)``,
        CacheFullError when no column is free, StoreFullError when there is no page for a copy.
        """
        self._check_no_step("seq_clone")
        self._check_live(src)
        n_rows = self._length[src] if n_rows is None else n_rows
        self._check_reach("seq_clone", src, n_rows)
        col = self._take_column(f"a clone of column {src}")
        try:
            self._in_store(lambda: self.store.clone(src, col, n_rows))
        except BaseException:
            heapq.heappush(self._free, col)
            raise
        self._length[col] = n_rows
        self._high[col] = self.geometry.high_after_rewind(self._high[src], n_rows)
        return col

    def seq_rm(self, col: int) -> None:
        """End the sequence; its memory goes back at once and its column is free."""
        self._check_no_step("seq_rm")
        self._check_live(col)
        self._in_store(lambda: self.store.release(col))
        del self._length[col], self._high[col]
        heapq.heappush(self._free, col)

    def rewind(self, col: int, n: int) -> None:
        """Shorten the sequence to its first ``n`` tokens.

        Raises RewindError when n is above ``pos(col)`` or below ``floor(col)``.
        """
        self._check_no_step("rewind")
        self._check_live(col)
        self._check_reach("rewind", col, n)
        self._shorten(col, n)

    def declare_step(self, seq_cols: Sequence[int], *, causal: bool = True) -> StepPlan:
        """Say which sequence each token of the packed batch belongs to; returns the bare plan.

        Equal neighbours form a segment, a sequence with several goes on across them. With
        causal=False (draft block) each sequence must be one run. Raises UnknownColumnError,
        StepError, CacheFullError (capacity, pages); admission is decided here, for good.
        """
        self._check_no_step("declare_step")
        plan = plan_step(seq_cols, self._length, self.geometry, causal=causal)
        self._budget.check(self.store.pages_needed(plan.wants), "the step")
        self._plan, self._state = plan, _State.DECLARED
        return plan

    def prepare_step(self, width: int | None = None) -> StepPlan:
        """Back the step's rows, and pad its tables to ``width`` tokens with the scratch column.

        A repeated call returns the same plan. Raises StepError for a width below the number of
        tokens or other than the prepared one, StoreError when the system has no memory (the step
        stays declared: try again or abandon it).
        """
        if self._state is _State.PREPARED and self._plan is not None:
            if width not in (None, self._plan.width):
                raise StepError(
                    f"width is {width}, but the step is prepared with width {self._plan.width}; "
                    f"repeat the call with that width or None"
                )
            return self._plan
        if self._state is not _State.DECLARED or self._plan is None:
            raise self._out_of_order("prepare_step")
        plan, wants = pad_step(self._plan, width), self._plan.wants
        self._in_store(lambda: self.store.prepare_writes(wants))
        for write in plan.writes:
            self._high[write.col] = max(self._high[write.col], write.end)
        self._plan, self._state = plan, _State.PREPARED
        return plan

    def commit_step(self) -> None:
        """Advance the lengths by what the step wrote. A repeated call does nothing."""
        if self._state is _State.COMMITTED:
            return
        if self._state is not _State.PREPARED or self._plan is None:
            raise self._out_of_order("commit_step")
        for write in self._plan.writes:
            self._length[write.col] = write.end
        self._plan, self._state = None, _State.COMMITTED

    def abandon_step(self) -> None:
        """Drop a declared or prepared step.

        Rows of a prepared step count as written: a ring may have lost the rows in their slots.
        """
        if self._plan is None:
            raise self._out_of_order("abandon_step")
        for write in self._plan.writes:
            self._shorten(write.col, write.start)
        self._plan, self._state = None, _State.IDLE

    def _shorten(self, col: int, n: int) -> None:
        self._in_store(lambda: self.store.shrink(col, n))
        self._length[col] = n
        self._high[col] = self.geometry.high_after_rewind(self._high[col], n)

    def _in_store(self, call: Callable[[], None]) -> None:
        """Let the store work, and count the pages that it took or gave, also when it fails."""
        try:
            call()
        finally:
            change = self.store.committed_pages - self._budget.used
            if change > 0:
                self._budget.take(change)
            else:
                self._budget.give(-change)

    def _take_column(self, what: str) -> int:
        if not self._free:
            raise CacheFullError(
                what,
                1,
                0,
                "columns",
                f"end one of the {self.max_seqs} sequences, or raise max_seqs",
            )
        return heapq.heappop(self._free)

    def _check_live(self, col: int) -> None:
        if col not in self._length:
            raise UnknownColumnError(col, self.live_columns)

    def _check_reach(self, call: str, col: int, n: int) -> None:
        length, floor = self._length[col], self.geometry.floor(self._high[col])
        if n < 0:
            raise RewindError(f"{call}: length is {n}; it must not be negative")
        if n > length:
            raise RewindError(
                f"{call}: length is {n}, but column {col} holds {length} tokens; "
                f"give a length of at most {length}"
            )
        if n < floor:
            raise RewindError(
                f"{call}: length is {n}, but rings of column {col} have overwritten rows that it "
                f"needs; the floor is {floor}: give a length of at least that, or start a new "
                f"sequence"
            )

    def _check_no_step(self, call: str) -> None:
        if self._plan is not None:
            raise self._out_of_order(call)

    def _out_of_order(self, call: str) -> StepOrderError:
        return StepOrderError(call, self._state.value, _NEXT[self._state])
