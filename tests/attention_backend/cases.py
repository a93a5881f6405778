"""Steps over columns for the tests: what is drawn, the tensors made from it, the tolerance."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SPARE = 2  # layers beside the one under test, so that no stride is what a dense tensor has


@dataclass(frozen=True)
class Case:
    """A step of one layer. ``segments`` are rows of seq_info; ``filler`` is in all unread rows."""

    segments: tuple[tuple[int, int, int, int], ...]
    tokens: int
    rows: int
    cols: int
    heads: int = 2
    group: int = 3
    head_size: int = 32
    dtype: torch.dtype = torch.float32
    window: int | None = None
    causal: bool = True
    order: str = "column"  # or "seed": how the cache lies in memory
    filler: float | None = None  # None: random numbers
    seed: int = 0


@dataclass(frozen=True)
class Tensors:
    query: torch.Tensor  # [T, Hq, D], not contiguous
    key_cache: torch.Tensor  # [rows, cols, H, D], not contiguous
    value_cache: torch.Tensor
    seq_info: torch.Tensor
    scale: float


def first_key(segment: tuple[int, int, int, int], window: int | None) -> int:
    """The oldest position that a query of the segment attends."""
    _, q_len, _, kv_end = segment
    return 0 if window is None else max(0, kv_end - q_len - window + 1)


def empty_cache(case: Case, fill: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [rows, cols, H, D] of a layer, strided as the stores stride them."""
    sizes = (case.rows, case.cols, 2, case.heads, case.head_size)
    if case.order == "seed":
        cache = torch.full((SPARE + 1, *sizes), fill, dtype=case.dtype)[1]
    else:
        raw = torch.full((case.cols, case.rows, SPARE + 1, *sizes[2:]), fill, dtype=case.dtype)
        cache = raw[:, :, 1].transpose(0, 1)
    return cache[:, :, 0], cache[:, :, 1]


def build(case: Case) -> Tensors:
    generator = torch.Generator().manual_seed(case.seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    caches = empty_cache(case)
    for cache in caches:
        cache.copy_(randn(*cache.shape))
        if case.filler is not None:
            read = torch.zeros(cache.shape[:2], dtype=torch.bool)
            for segment in case.segments:
                if segment[1] and segment[3]:
                    slots = torch.arange(first_key(segment, case.window), segment[3]) % case.rows
                    read[slots, segment[2]] = True
            cache[~read] = case.filler
    query_heads = case.heads * case.group
    packed = randn(case.tokens, query_heads + 2 * case.heads, case.head_size)
    return Tensors(
        query=packed[:, :query_heads],
        key_cache=caches[0],
        value_cache=caches[1],
        seq_info=torch.tensor(case.segments, dtype=torch.int32).reshape(-1, 4),
        scale=case.head_size**-0.5,
    )


def tolerance(tensors: Tensors) -> float:
    """Largest difference that rounding explains.

    float16, bfloat16: the fused kernel rounds each weight to the dtype before it meets V, and the
    result is rounded once more, each by eps/2 of at most max |V|; twice that. float32: nothing is
    rounded between, but sums of up to 256 products in another order shift a score by a few dozen
    eps, and the weight by as much of itself.
    """
    dtype = tensors.query.dtype
    largest = tensors.value_cache.float().nan_to_num(0, 0, 0).abs().max().item()
    return (100 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps * max(1.0, largest)


@st.composite
def cases(draw: st.DrawFn, max_segments: int = 8, max_q_len: int = 21) -> Case:
    """Mixed batches: empty, decode and longer segments, idle columns, gaps, flat and ring."""
    q_lens = draw(
        st.lists(
            st.one_of(st.just(1), st.sampled_from((0, 1, 2, 3, 7)), st.integers(1, max_q_len)),
            min_size=1,
            max_size=max_segments,
        )
    )
    longest = max(1, *q_lens)
    window = draw(st.none() | st.just(1) | st.integers(1, 40))
    causal = draw(st.booleans())
    ring = window is not None and draw(st.booleans())
    slack = draw(st.integers(0, 3))
    rows = window + longest - 1 + slack if ring and window is not None else 96
    cols = len(q_lens) + draw(st.integers(1, 4))
    free = draw(st.permutations(range(1, cols)))
    segments = []
    tokens = 0
    for q_len, col in zip(q_lens, free, strict=False):
        tokens += draw(st.sampled_from((0, 0, 0, 1, 2)))
        longest_kv = 4 * rows if ring else rows
        kinds = [st.integers(q_len, longest_kv), st.just(q_len)]
        if ring:  # wrapped
            kinds.append(st.integers(max(q_len, rows + 1), longest_kv))
        if window is not None:  # lengths at the edge of the window
            kinds += [st.just(max(q_len, window + delta)) for delta in (-1, 0, 1)]
        kv_end = draw(st.one_of(*kinds))
        if draw(st.integers(0, 9)) == 0:
            kv_end = 0
        segments.append((tokens, q_len, col, kv_end))
        tokens += q_len
    return Case(
        segments=tuple(segments),
        tokens=max(1, tokens + draw(st.integers(0, 2))),
        rows=rows,
        cols=cols,
        heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        head_size=draw(st.sampled_from(HEAD_SIZES) | st.integers(32, 256)),
        dtype=draw(st.sampled_from(DTYPES)),
        window=window,
        causal=causal,
        order=draw(st.sampled_from(("column", "seed"))),
        filler=draw(st.sampled_from((None, float("nan"), float("inf"), 0.0))),
        seed=draw(st.integers(0, 2**16)),
    )
