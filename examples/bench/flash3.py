"""Anchor: FlashAttention-3 as vLLM 0.33's FLASH_ATTN calls it on Hopper."""

import torch

from .backend import Backend, Step
from .paged import PagedStep, vllm_version
from .problem import Problem
from .shapes import BLOCK

__all__ = ["FlashAttention3"]

MAX_GRAPH_TOKENS = 512  # vLLM's default max_cudagraph_capture_size
MAX_SPLITS = 32  # its flash_attn_max_num_splits_for_cuda_graph


class FlashAttention3(Backend):
    name = "fa3"

    def __init__(self) -> None:
        self.title = f"FlashAttention-3 of vLLM {vllm_version()}"

    def obstacle(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it needs a CUDA device, not {device.type}"
        try:
            from vllm import vllm_flash_attn
        except Exception as error:  # a missing library raises what it likes
            return f"vllm.vllm_flash_attn cannot be imported ({error})"
        if vllm_flash_attn.is_fa_version_supported(3):
            return None
        return str(vllm_flash_attn.fa_version_unsupported_reason(3))

    def step(self, problem: Problem) -> Step:
        return Flash3Step(problem)


class Flash3Step(PagedStep):
    """The calls of FlashAttentionMetadataBuilder.build and FlashAttentionImpl.forward.

    The scheduler's metadata is made once a step, copied to a buffer that does not move and shared
    by the layers. Steps that fit into vLLM's full CUDA graphs may split up to 32 ways, others leave
    it to FlashAttention. The longest length is the true one, where vLLM captures with the model's.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        shape = problem.shape
        self._splits = MAX_SPLITS if shape.tokens <= MAX_GRAPH_TOKENS else 0
        most = max(len(shape.lengths), MAX_GRAPH_TOKENS)
        self._metadata = torch.zeros(
            1 + -(-most // 4) * 4 * 4, dtype=torch.int32, device=problem.device
        )
        self._length = 0

    def begin(self) -> None:
        from vllm.vllm_flash_attn import get_scheduler_metadata

        shape = self.problem.shape
        metadata = get_scheduler_metadata(
            batch_size=len(shape.lengths),
            max_seqlen_q=shape.max_query,
            max_seqlen_k=shape.max_kv,
            num_heads_q=shape.query_heads,
            num_heads_kv=shape.heads,
            headdim=shape.head_size,
            cache_seqlens=self.seq_lens,
            qkv_dtype=self.problem.dtype,
            cu_seqlens_q=self.query_start_loc,
            page_size=BLOCK,
            causal=True,
            window_size=self.window,
            num_splits=self._splits,
        )
        self._length = metadata.shape[0]
        self._metadata[: self._length] = metadata
        self._metadata[self._length :] = 0

    def layer(self, index: int) -> None:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        self.write(index)
        flash_attn_varlen_func(
            **self.arguments(index),
            window_size=list(self.window),
            scheduler_metadata=self._metadata[: self._length],
            fa_version=3,
            q_descale=self.descale,
            num_splits=self._splits,
        )
