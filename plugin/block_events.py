"""What routers hear of the blocks of tokens that columns hold: vLLM's KV cache events."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import KVCacheSpecKind

from vllm_kv_columns.kv_manager.geometry import CacheGeometry

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

__all__ = ["BlockEvents", "attention_kind"]


class BlockEvents:
    """Puts events where vLLM's scheduler takes them after each step, the queue of its block pool.

    Who calls it sees to it that a block is stored once, however many columns have it, and removed
    when none has it any longer.

    Args:
        pool: vLLM's, made with its events on.
        block_tokens: tokens of a hashed block.
        group: number of the KV cache group.
    """

    def __init__(self, pool: "BlockPool", block_tokens: int, group: int) -> None:
        self._pool, self._block_tokens, self._group = pool, block_tokens, group
        # vLLM's own function asks the environment for every single hash.
        self._numbers = bool(envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES)

    def stored(self, request: "Request", blocks: range) -> None:
        """Blocks of the request, of which no column had any, can be found."""
        if not blocks:
            return
        hashes, size, extra, feature = request.block_hashes, self._block_tokens, [], 0
        for i in blocks:
            keys, feature = generate_block_hash_extra_keys(
                request, i * size, (i + 1) * size, feature
            )
            extra.append(keys)
        lora, first = request.lora_request, blocks.start
        self._pool.kv_event_queue.append(
            BlockStored(
                block_hashes=self._published(hashes[i] for i in blocks),
                parent_block_hash=self._published([hashes[first - 1]])[0] if first else None,
                token_ids=request.all_token_ids[first * size : blocks.stop * size],
                block_size=size,
                lora_id=lora.adapter_id if lora else None,
                medium=self._pool.medium,
                lora_name=lora.name if lora else None,
                extra_keys=to_event_extra_keys(extra),
                group_idx=self._group,
                session_id=request.session_id,
            )
        )

    def removed(self, hashes: Iterable[bytes]) -> None:
        """No column has these blocks any longer."""
        gone = self._published(hashes)
        if gone:
            self._pool.kv_event_queue.append(
                BlockRemoved(block_hashes=gone, medium=self._pool.medium, group_idx=self._group)
            )

    def _published(self, hashes: Iterable[bytes]) -> list[Any]:
        """As vLLM publishes them: the last 64 bits as a number, or all of them."""
        if self._numbers:
            return [int.from_bytes(one[-8:], "big") for one in hashes]
        return list(hashes)


def attention_kind(geometry: CacheGeometry) -> tuple[str, int | None]:
    """What events say of the one KV cache group of all layers, and its window.

    As stock vLLM says it of such a model's first group: full attention if any layer has that.
    """
    windows = [region.policy.window for region in geometry.regions]
    if all(windows):
        return KVCacheSpecKind.SLIDING_WINDOW.value, max(filter(None, windows))
    return KVCacheSpecKind.FULL_ATTENTION.value, None
