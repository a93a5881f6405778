"""The scheduler's side, as vLLM sees it: which request has which column, and what that costs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vllm_kv_columns.plugin.block_events import BlockEvents
from vllm_kv_columns.plugin.column_table import ColumnTable
from vllm_kv_columns.plugin.columns import Column, Hit
from vllm_kv_columns.plugin.page_pool import PagePool
from vllm_kv_columns.plugin.spec import ColumnSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["ColumnManager"]

NO_COLUMN = 1 << 60
"""Pages asked for when no column is free: more than any budget has, so the request waits."""


class ColumnBlock(KVCacheBlock):
    """What stands for a request's column where vLLM expects its blocks."""

    def __init__(self, column: Column, block_tokens: int) -> None:
        super().__init__(column.number)
        self._column, self._block_tokens = column, block_tokens

    @property
    def block_hash_num_tokens(self) -> int:
        """Tokens that later requests can find here; vLLM reports them."""
        return len(self._column.hashes) * self._block_tokens


class HitBlock(KVCacheBlock):
    """What stands for a prefix that is there already, on its way through vLLM's scheduler."""

    def __init__(self, hit: Hit) -> None:
        super().__init__(0 if hit.source is None else hit.source.number)
        self.hit = hit


NO_HIT = Hit(None, 0, 0)


class ColumnManager(SingleTypeKVCacheManager):
    """Hands out columns as synthetic blocks and takes the pages they need from vLLM's block pool.

    A block of the pool is one page of the byte budget and is only counted; its id means nothing.
    What the workers see as a request's one block id is its column.

    A prompt whose beginning comes to be in a column with the step that is being planned waits for
    the next one, once, and finds it there: samples of one prompt, many users of one system prompt.
    """

    kv_cache_spec: ColumnSpec

    def __init__(self, kv_cache_spec: ColumnSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.table = ColumnTable(
            kv_cache_spec.geometry,
            kv_cache_spec.block_tokens,
            kv_cache_spec.compact,
            kv_cache_spec.cut_pages,
        )
        self.table.pages.pool = PagePool.take_over(self.block_pool, self.table)
        if self.block_pool.enable_kv_cache_events:
            self.table.lenders.events = BlockEvents(
                self.block_pool, self.table.block_tokens, self.kv_cache_group_id
            )
        self._has_waited: set[str] = set()

    def find_longest_cache_hit(  # a class method of vLLM's managers, called on the object
        self, block_hashes: Sequence[bytes], max_length: int, *args: Any, **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest prefix that is there; what is found goes into the next two calls."""
        hit = self.table.lenders.find(block_hashes, max_length)
        if hit.source is None and not hit.coming:
            return ([],), 0
        return ([HitBlock(hit)],), hit.blocks * self.table.block_tokens

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Pages missing for `num_tokens` tokens of the request; `NO_COLUMN` if it must wait."""
        column = self.table.of(request_id)
        if column is not None:
            return self.table.pages_missing(column, num_tokens)
        hit = _hit_of(new_computed_blocks)
        if hit.coming > hit.blocks and request_id not in self._has_waited:
            self._has_waited.add(request_id)
            return NO_COLUMN
        return self.table.cost(hit, num_tokens) if self.table.can_take() else NO_COLUMN

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Give the request a column that holds what was hit."""
        assert num_external_computed_tokens == 0
        self._begin(request_id, _hit_of(new_computed_blocks))

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Take the missing pages; returns the column as a block if it is new, then nothing."""
        column, new = self.table.of(request_id), []
        if column is None:
            column = self._begin(request_id, NO_HIT)
            new = list(self.req_to_blocks[request_id])
        self.table.grow(column, num_tokens)
        return new

    def _begin(self, request_id: str, hit: Hit) -> Column:
        self._has_waited.discard(request_id)
        column = self.table.begin(request_id, hit)
        self.req_to_blocks[request_id] = [ColumnBlock(column, self.table.block_tokens)]
        return column

    def cache_blocks(self, request: "Request", num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """With the step that is being planned the request's column comes to hold these tokens."""
        column = self.table.of(request.request_id)
        assert column is not None
        self.table.lenders.will_hold(column, request, num_tokens)

    def new_step_starts(self) -> None:
        self.table.lenders.next_step()

    def free(self, request_id: str) -> None:
        """The request is done; its column is retained for what it holds."""
        self._has_waited.discard(request_id)
        self.req_to_blocks.pop(request_id, None)
        self.table.end(request_id, retain=self.enable_caching)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """The same; the pages stay with the column, and none are the caller's to return."""
        self.free(request_id)
        return []

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0


def _hit_of(blocks: Sequence[KVCacheBlock]) -> Hit:
    if not blocks:
        return NO_HIT
    (block,) = blocks
    assert isinstance(block, HitBlock)
    return block.hit
