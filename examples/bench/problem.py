"""The data of one step, the same for every backend."""

from collections.abc import Sequence

import torch

from .shapes import Shape

__all__ = ["Problem", "make_pool"]

FILL = 1 << 28  # numbers that are drawn at once


def make_pool(
    shapes: Sequence[Shape], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Memory, full of random numbers, in which the caches of the largest shape fit.

    Every backend lays its cache over this same memory. A step overwrites some of it with more
    random numbers and never with anything that is not finite, so it is filled once a run.
    """
    pool = torch.empty(max(shape.pool_elements for shape in shapes), dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for part in pool.split(FILL):
        part.normal_(generator=generator)
    return pool


class Problem:
    """Queries, keys and values of a step, where they belong, and memory for the cache.

    query: [T, Hq, D]; key, value: [T, H, D]; q_starts: [S + 1] on the host; segments, positions:
    int64 [T] on the device, the sequence and the position of each token. All layers of the step
    get the same queries, keys and values.
    """

    def __init__(self, shape: Shape, pool: torch.Tensor, seed: int = 1) -> None:
        self.shape, self.pool, self.device, self.dtype = shape, pool, pool.device, pool.dtype
        generator = torch.Generator(self.device).manual_seed(seed)

        def draw(heads: int) -> torch.Tensor:
            size = (shape.tokens, heads, shape.head_size)
            return torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)

        self.query, self.key, self.value = (
            draw(heads) for heads in (shape.query_heads, shape.heads, shape.heads)
        )
        self.scale = shape.head_size**-0.5
        self.q_starts = [0]
        for q_len, _ in shape.lengths:
            self.q_starts.append(self.q_starts[-1] + q_len)
        lengths = torch.tensor(shape.lengths)
        self.segments = torch.repeat_interleave(torch.arange(len(shape.lengths)), lengths[:, 0]).to(
            self.device
        )
        self.positions = torch.cat(
            [torch.arange(kv_end - q_len, kv_end) for q_len, kv_end in shape.lengths]
        ).to(self.device)

    def numbers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        """int32 on the device."""
        return torch.tensor(values, dtype=torch.int32).to(self.device)
