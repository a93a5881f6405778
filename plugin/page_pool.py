"""vLLM's block pool, where a block is a page of the budget and only counted."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_kv_columns.plugin.column_table import ColumnTable

__all__ = ["PagePool"]

logger = init_logger("vllm.plugins.kv_columns")


class PagePool(BlockPool):
    """Pages that only retained columns have count as free and are taken when they are needed.

    vLLM makes the pool and gives it to the manager, which turns it into one of these.

    Attributes:
        table: the columns.
        withheld: pages of the budget that the workers cannot have at present.
    """

    table: "ColumnTable"
    withheld: list[KVCacheBlock]

    @classmethod
    def take_over(cls, pool: BlockPool, table: "ColumnTable") -> "PagePool":
        pool.__class__ = cls
        assert isinstance(pool, cls)
        pool.table, pool.withheld = table, []
        return pool

    def get_num_free_blocks(self) -> int:
        """Pages that nobody has, and those that only retained columns have."""
        return self.unused_pages + self.table.pages.retained

    @property
    def unused_pages(self) -> int:
        """Pages that nobody has."""
        return self.free_block_queue.num_free_blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take pages; retained columns give way, the one that was used longest ago first."""
        while self.unused_pages < num_blocks and self.table.evict():
            pass
        return super().get_new_blocks(num_blocks)

    def bound(self, pages: int, preempt_last: Callable[[], bool]) -> None:
        """Hand out so many pages in all from now on: what the workers can have.

        Retained columns give way first. Pages that requests hold cannot be withheld, so requests
        are preempted if there is no other way.

        Args:
            pages: more than the budget raise it.
            preempt_last: preempts the running request that came last; False if there is none.
        """
        budget = self.num_gpu_blocks - 1  # one block is vLLM's null block
        if pages > budget:
            self._extend(pages - budget)
            budget = pages
        missing = min(budget - max(pages, 0), budget)
        change = missing - len(self.withheld)
        if change > 0:
            if not self.withheld:
                logger.warning(
                    "SDPA_VARLEN: %d of the %d pages of the KV cache's budget cannot be had; "
                    "other allocations hold the memory, or the limit was lowered. Requests wait "
                    "for it or are preempted; lower --gpu-memory-utilization if this lasts.",
                    missing,
                    budget,
                )
            while change > self.get_num_free_blocks() and preempt_last():
                pass
            self.withheld += self.get_new_blocks(min(change, self.get_num_free_blocks()))
        elif change < 0:
            back, self.withheld = self.withheld[missing:], self.withheld[:missing]
            self.free_blocks(back)
            if not self.withheld:
                logger.info("SDPA_VARLEN: the whole budget of the KV cache can be had again.")

    def _extend(self, pages: int) -> None:
        for number in range(self.num_gpu_blocks, self.num_gpu_blocks + pages):
            block = KVCacheBlock(number, pool=self)
            self.blocks.append(block)
            self.free_block_queue.append(block)
        self.num_gpu_blocks += pages

    def reset_prefix_cache(self) -> bool:
        """Forget what retained columns hold; refused while a request has pages, as by vLLM."""
        held_back = len(self.withheld)
        self.free_blocks(self.withheld)  # vLLM would take them for a request's
        done = super().reset_prefix_cache()
        self.withheld = super().get_new_blocks(held_back)
        if not done:
            return False
        told = len(self.kv_event_queue)  # that all blocks are gone, last of all
        while self.table.forget():
            pass
        del self.kv_event_queue[told:]
        return True

    def emit_cached_block_events(self, request: "Request", *args: Any, **kwargs: Any) -> None:
        """Tell again of what was found for the request, which asked for that.

        vLLM counts the blocks that stand for what was found, of a column's length.
        """
        table = self.table
        found = table.lenders.find(request.block_hashes, request.num_tokens - 1)
        assert table.lenders.events is not None
        table.lenders.events.stored(request, range(found.blocks))
