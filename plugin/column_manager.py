"""The scheduler's side: which request owns which column and how many pages of the budget."""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vllm_kv_columns.plugin.spec import ColumnSpec

__all__ = ["ColumnManager"]

NO_COLUMN = 1 << 60
"""Pages asked for when no column is free: more than any budget has, so the request waits."""


class FreeColumns:
    """Columns 1 .. count that no request has; handed out lowest first, or first given first."""

    def __init__(self, count: int, lowest_first: bool) -> None:
        self._lowest_first = lowest_first
        self._free = deque(range(1, count + 1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.popleft()

    def give(self, column: int) -> None:
        if self._lowest_first:
            insort(self._free, column)
        else:
            self._free.append(column)


class ColumnManager(SingleTypeKVCacheManager):
    """Hands out columns as synthetic blocks and takes the pages they need from vLLM's block pool.

    A block of the pool is one page of the byte budget and is only counted; its id means nothing.
    What the workers see as a request's one block id is its column.
    """

    kv_cache_spec: ColumnSpec

    def __init__(self, kv_cache_spec: ColumnSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self._geometry = kv_cache_spec.geometry
        self._free_columns = FreeColumns(kv_cache_spec.cache.max_seqs, kv_cache_spec.compact)
        self._pages: dict[str, list[KVCacheBlock]] = {}

    def _missing_pages(self, request_id: str, num_tokens: int) -> int:
        held = len(self._pages.get(request_id, ()))
        return max(self._geometry.pages_for(num_tokens) - held, 0)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """Pages missing for `num_tokens` tokens of the request; `NO_COLUMN` if none is free."""
        if request_id not in self._pages and not self._free_columns:
            return NO_COLUMN
        return self._missing_pages(request_id, num_tokens)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Take the missing pages; returns the column as a block at the first call, then nothing."""
        column: list[KVCacheBlock] = []
        missing = self._missing_pages(request_id, num_tokens)
        if request_id not in self._pages:
            column = [KVCacheBlock(self._free_columns.take())]
            self._pages[request_id] = []
            self.req_to_blocks[request_id] = list(column)
        self._pages[request_id].extend(self.block_pool.get_new_blocks(missing))
        return column

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request: its column is free at once, the pages are the caller's to return."""
        for column in self.req_to_blocks.pop(request_id, ()):
            self._free_columns.give(column.block_id)
        return self._pages.pop(request_id, [])

    @classmethod
    def find_longest_cache_hit(
        cls, *args: Any, kv_cache_group_ids: Sequence[int], **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """No prefix is reused."""
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0
