"""Anchor: vLLM's own Triton kernel, as its TRITON_ATTN calls it."""

import torch

from .backend import Backend, Step
from .paged import PagedStep, vllm_version
from .problem import Problem

__all__ = ["UnifiedAttention", "split_threshold"]

MIN_GRID = 128  # vLLM's MIN_LAUNCH_GRID_SIZE_2D
SEGMENTS = 16  # its NUM_PAR_SOFTMAX_SEGMENTS
MAX_SPLIT_QUERY = 8  # its MAX_3D_QUERY_LEN
CAPTURED: tuple[int, ...] = (
    1,
    2,
    4,
    *range(8, 256, 8),
    *range(256, 513, 16),
)  # its default cudagraph_capture_sizes


def split_threshold(heads: int) -> int:
    """Most query blocks of a step whose keys are split: the captured size next to 128 / heads."""
    wanted = MIN_GRID // heads
    _, size = min((abs(size - wanted), size) for size in CAPTURED)
    return size


class UnifiedAttention(Backend):
    name = "triton"

    def __init__(self) -> None:
        self.title = f"unified_attention (Triton) of vLLM {vllm_version()}"

    def obstacle(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it needs a CUDA device, not {device.type}"
        try:
            from vllm.v1.attention.ops import triton_unified_attention as _  # noqa: F401 tried, not used
        except Exception as error:  # a missing library raises what it likes
            return f"vllm.v1.attention.ops.triton_unified_attention cannot be imported ({error})"
        return None

    def step(self, problem: Problem) -> Step:
        return UnifiedStep(problem)


class UnifiedStep(PagedStep):
    """The call of TritonAttentionImpl.forward, after the write op that FLASH_ATTN has too.

    Its buffers for keys split over programs are of the size that TritonAttentionMetadataBuilder
    gives them; steps that verify a draft have a server with that draft's length.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        shape = problem.shape
        self._threshold = split_threshold(shape.heads)
        drafted = shape.max_query if shape.kind == "verify" else 1
        rows = self._threshold * min(drafted, MAX_SPLIT_QUERY)
        dims = 1 << (shape.head_size - 1).bit_length()

        def buffer(*rest: int) -> torch.Tensor:
            size = (rows, shape.query_heads, SEGMENTS, *rest)
            return torch.empty(size, dtype=torch.float32, device=problem.device)

        self._sums, self._largest, self._weights = buffer(dims), buffer(), buffer()

    def begin(self) -> None:
        """Nothing: it has no schedule."""

    def layer(self, index: int) -> None:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        self.write(index)
        unified_attention(
            **self.arguments(index),
            window_size=self.window,
            q_descale=None,
            seq_threshold_3D=self._threshold,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=self._sums,
            softmax_segm_max=self._largest,
            softmax_segm_expsum=self._weights,
        )
