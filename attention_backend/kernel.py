"""What an attention kernel promises."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..kv_manager.tables import StepTables

__all__ = ["AttentionKernel", "StepBounds", "check_layer"]


@dataclass(frozen=True)
class StepBounds:
    """What no step of a model exceeds; a kernel sizes the buffers that outlive a step by it.

    max_tokens: rows of query (T), padding included. max_segments: rows of seq_info (S).
    query_heads, kv_heads, head_size: of the layers that the kernel object serves.
    """

    max_tokens: int
    max_segments: int
    query_heads: int
    kv_heads: int
    head_size: int


class AttentionKernel(ABC):
    """Slot write and attention over columns, for the device types that it names.

    Caches are K and V of one layer, [rows, cols, H, D] with any strides; position p of a sequence
    is in row p % rows of its column. Queries are [T, Hq, D] with Hq = H * G; query head h*G + g
    belongs to KV head h. What ``prepare`` returns is the kernel's own and holds for every layer
    of the step that has the same rows and window; the caller only passes it on.
    """

    device_types: ClassVar[tuple[str, ...]]
    """Values of ``torch.device.type`` that the kernel runs on."""

    def reserve(self, bounds: StepBounds, device: torch.device) -> None:  # noqa: B027 optional
        """Make the buffers that steps within ``bounds`` need, before the first of them.

        A captured CUDA graph holds their addresses, so they stay until the kernel object goes.
        Without this call, or beyond the bounds, buffers are made when a step first needs them.
        A kernel that needs none does nothing.
        """

    @abstractmethod
    def prepare(
        self,
        tables: StepTables,
        *,
        rows: int,
        window: int | None,
        causal: bool,
        max_q_len: int | None = None,
    ) -> Any:
        """Work on the step's tables that layers of the same rows and window share.

        rows: rows of the layers' caches, the modulus of slots. window: number of positions that
        a query sees, its own included; None for all. causal: False lets every query of a segment
        see all of the segment. max_q_len: what the caller knows of the longest segment's number
        of queries, which no replay of a captured graph may exceed; None if it does not know.
        Mutates nothing. Raises ValueError for tables that make no sense.
        """

    @abstractmethod
    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        step: Any,
    ) -> None:
        """Store token i of key and value [T, H, D] in slot positions[i] % rows of its column.

        T is the length of the tables' seq_cols. Mutates both caches. Of tokens that share a slot
        (padding in the scratch column) any one stays. Raises ValueError for another T.
        """

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        step: Any,
        *,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """softmax(scale * q k^T) v for every segment, what ``sdpa_varlen_reference`` computes.

        query, out: [T, Hq, D], the same dtype as the caches. Mutates ``out`` alone, all of it:
        rows that no segment covers become zero. Raises ValueError for segments that lie outside
        the query or the cache.
        """


def check_layer(rows: int, window: int | None) -> None:
    """What every kernel asks of ``prepare``. Raises ValueError for less than one of either."""
    if rows < 1:
        raise ValueError(f"rows is {rows}; a cache has at least one row")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1, or None for no window")
