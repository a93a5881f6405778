"""The CPU kernel: batches of decodes in one fused call, other segments one at a time."""

from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

import torch

from ...kv_manager.tables import StepTables
from ..kernel import AttentionKernel, check_layer
from .batch import BatchRun
from .masks import TileMasks
from .schedule import CostModel, Segment, make_schedule, parse_segments
from .segment import SegmentRun
from .tiles import tiles_of

__all__ = ["CpuKernel", "CpuStep"]


class _Plan:
    """What the layers of one shape run in a step, masks included."""

    def __init__(
        self, step: "CpuStep", heads: int, group: int, size: int, dtype: torch.dtype
    ) -> None:
        self._rows, self._window, self._causal = step.rows, step.window, step.causal
        self._group, self._dtype = group, dtype
        schedule = make_schedule(
            step.segments, rows=step.rows, heads=heads, head_size=size, cost=step.cost
        )
        self.batches = [BatchRun(batch, heads, group, size, dtype) for batch in schedule.batches]
        self.singles = self.runs_of(schedule.singles)
        stops = [batch.first_slot + batch.num_slots for batch in schedule.batches]
        self.stop_slot = max([*stops, *(run.stop_slot for run in self.singles)], default=0)

    def runs_of(self, segments: Sequence[Segment]) -> list[SegmentRun]:
        """The segments one by one."""
        tiles = [
            tiles_of(segment, window=self._window, causal=self._causal, group=self._group)
            for segment in segments
        ]
        masks = TileMasks(
            chain.from_iterable(tiles),
            window=self._window,
            causal=self._causal,
            group=self._group,
            dtype=self._dtype,
        )
        return [
            SegmentRun(segment, self._rows, own, masks)
            for segment, own in zip(segments, tiles, strict=True)
        ]


class CpuStep:
    """A step prepared for the layers of one (rows, window), see ``CpuKernel.prepare``."""

    def __init__(
        self,
        segments: tuple[Segment, ...],
        write_rows: torch.Tensor,
        write_cols: torch.Tensor,
        *,
        rows: int,
        window: int | None,
        causal: bool,
        cost: CostModel,
    ) -> None:
        self.segments, self.cost = segments, cost
        self.rows, self.window, self.causal = rows, window, causal
        self.slots = (write_rows, write_cols)
        self.num_writes = write_rows.shape[0]
        self.num_cols = max((segment.col + 1 for segment in segments), default=0)
        self.num_queries = max((one.q_start + one.q_len for one in segments), default=0)
        self.num_attending = sum(segment.q_len for segment in segments)
        self._plans: dict[tuple[int, int, int, torch.dtype], _Plan] = {}

    def plan(self, heads: int, group: int, size: int, dtype: torch.dtype) -> _Plan:
        """The plan for layers of this shape, made when the first of them asks."""
        key = (heads, group, size, dtype)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _Plan(self, heads, group, size, dtype)
        return plan


class CpuKernel(AttentionKernel):
    """Attention by ``torch.nn.functional.scaled_dot_product_attention`` on strided views.

    Query, cache and output must have one dtype and the last dimension contiguous to be fast.
    Of the rows of a sequence, only those that its segment attends influence a result, except
    that a NaN or infinity in one may reach every query of that segment. Not differentiable.
    Holds no state.
    """

    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(self, cost: CostModel | None = None) -> None:
        self._cost = cost or CostModel()

    def prepare(
        self,
        tables: StepTables,
        *,
        rows: int,
        window: int | None,
        causal: bool,
        max_q_len: int | None = None,
    ) -> CpuStep:
        """Read the segments and the slots of the tables. Raises ValueError for bad tables."""
        check_layer(rows, window)
        return CpuStep(
            parse_segments(tables.seq_info.tolist(), window=window, causal=causal),
            tables.positions.long() % rows,
            tables.seq_cols.long(),
            rows=rows,
            window=window,
            causal=causal,
            cost=self._cost,
        )

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        step: CpuStep,
    ) -> None:
        """See AttentionKernel. Raises IndexError for a column or row that the cache lacks."""
        if key.shape[0] != step.num_writes:
            raise ValueError(
                f"key has {key.shape[0]} tokens and the step's tables {step.num_writes}; "
                f"pass the tokens that seq_cols and positions describe"
            )
        key_cache.index_put_(step.slots, key)
        value_cache.index_put_(step.slots, value)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        step: CpuStep,
        *,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """See AttentionKernel."""
        tokens, query_heads, size = query.shape
        rows, cols, heads, _ = key_cache.shape
        if query.dtype != key_cache.dtype:
            raise ValueError(
                f"query is {query.dtype} and the cache {key_cache.dtype}; "
                f"this kernel needs one dtype for both"
            )
        group = query_heads // heads
        plan = step.plan(heads, group, size, query.dtype)
        if step.num_queries > tokens or step.num_cols > cols or plan.stop_slot > rows:
            raise ValueError(
                f"the step needs {step.num_queries} query rows, {step.num_cols} columns and "
                f"{plan.stop_slot} cache rows; there are {tokens}, {cols} and {rows}"
            )
        if step.num_attending < out.shape[0]:
            out.zero_()
        for batch in plan.batches:
            if not batch.attend(query, key_cache, value_cache, scale, out):
                for run in plan.runs_of(batch.members):
                    run.attend(query, key_cache, value_cache, scale, out)
        for run in plan.singles:
            run.attend(query, key_cache, value_cache, scale, out)
