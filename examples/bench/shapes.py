"""The steps that kernels are timed on, and how much work each of them is. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .engine import MAX_SEQS, MAX_TOKENS

__all__ = ["BLOCK", "SHAPES", "Shape", "select"]

BLOCK = 16  # tokens of a block of the paged caches
ELEMENT = 2  # bytes: bfloat16
RING_TILE = 128  # ring rows are a multiple of it
K = 1024


@dataclass(frozen=True)
class Shape:
    """One step of a model whose layers are alike.

    lengths: (q_len, kv_end) of each sequence: the step computes its last q_len positions.
    heads, group: KV heads, query heads of each. window: positions that a query sees, its own
    included; None for all. layers: that share the step's schedule. Each has a cache of its own,
    and together they hold more than twice an L2 cache, so that none finds its rows there.

    kind: "step" is timed as what it adds to the other kernels of a Llama's layers, all others
    layer by layer with nothing in between.
    """

    name: str
    kind: str
    lengths: tuple[tuple[int, int], ...]
    heads: int = 8
    group: int = 4
    head_size: int = 128
    window: int | None = None
    layers: int = 8

    @property
    def query_heads(self) -> int:
        return self.heads * self.group

    @property
    def tokens(self) -> int:
        """Query rows of the step."""
        return sum(q_len for q_len, _ in self.lengths)

    @property
    def max_query(self) -> int:
        return max(q_len for q_len, _ in self.lengths)

    @property
    def reserved(self) -> tuple[int, int]:
        """Tokens and sequences for which buffers are made: of an engine's largest step, or its own.

        A kernel's launches may depend on them.
        """
        if self.kind == "step":
            return MAX_TOKENS, MAX_SEQS
        return self.tokens, len(self.lengths)

    @property
    def max_kv(self) -> int:
        return max(kv_end for _, kv_end in self.lengths)

    @property
    def rows(self) -> int:
        """Rows of a column: the longest sequence, or a ring that the step does not overrun."""
        if self.window is None:
            return self.max_kv
        ring = -(-(self.window + self.max_query - 1) // RING_TILE) * RING_TILE
        return min(self.max_kv, ring)

    @property
    def pairs(self) -> int:
        """(query, key) pairs that attend, of one head."""
        return sum(_seen(kv_end - q_len, kv_end, self.window) for q_len, kv_end in self.lengths)

    @property
    def flop(self) -> int:
        """Of one layer: two multiplications and two additions for each number of a pair."""
        return 4 * self.head_size * self.query_heads * self.pairs

    @property
    def kv_bytes(self) -> int:
        """K and V that one layer must read: each row that some query of the step attends, once."""
        keys = sum(kv_end - self.first_key(i) for i, (_, kv_end) in enumerate(self.lengths))
        return keys * 2 * self.heads * self.head_size * ELEMENT

    def first_key(self, segment: int) -> int:
        """The first position that a query of the segment attends."""
        q_len, kv_end = self.lengths[segment]
        return 0 if self.window is None else max(0, kv_end - q_len - self.window + 1)

    def blocks(self, segment: int) -> range:
        """Blocks of the sequence that a paged cache holds; it has freed those before the window."""
        return range(self.first_key(segment) // BLOCK, -(-self.lengths[segment][1] // BLOCK))

    @property
    def column_elements(self) -> int:
        """Numbers in the columns of all layers, the scratch column included."""
        row = 2 * self.heads * self.head_size * self.layers
        return (len(self.lengths) + 1) * self.rows * row

    @property
    def paged_blocks(self) -> int:
        """Blocks of one layer, the one that means no block included."""
        return 1 + sum(len(self.blocks(i)) for i in range(len(self.lengths)))

    @property
    def paged_elements(self) -> int:
        """Numbers in the blocks of all layers."""
        return self.layers * self.paged_blocks * BLOCK * 2 * self.heads * self.head_size

    @property
    def pool_elements(self) -> int:
        """Numbers of memory in which either form of the cache fits."""
        return max(self.column_elements, self.paged_elements)


def _seen(first: int, end: int, window: int | None) -> int:
    """Sum of min(p + 1, window) over the positions p from first to end - 1."""
    if window is None:
        window = end
    growing = min(max(first, window), end)  # positions below it see all that is before them
    return (first + 1 + growing) * (growing - first) // 2 + (end - growing) * window


def _decode(count: int, length: int) -> tuple[tuple[int, int], ...]:
    return ((1, length),) * count


def _prefill(count: int, length: int) -> tuple[tuple[int, int], ...]:
    return ((length, length),) * count


# Each multiple of 128 up to 16k once, in an order that is not sorted.
_SKEWED = tuple((1, 128 * (1 + 37 * i % 128)) for i in range(128))
_8B: dict[str, Any] = {"layers": 32}  # as many as an 8B Llama has, side by side in a row
_TP8: dict[str, Any] = {"heads": 1, "group": 8, "layers": 32}  # a 70B Llama on one of 8 devices

SHAPES: tuple[Shape, ...] = (
    Shape("decode-64x4k", "decode", _decode(64, 4 * K), **_8B),
    Shape("decode-256x1k", "decode", _decode(256, K), **_8B),
    Shape("decode-8x32k", "decode", _decode(8, 32 * K), **_8B),
    Shape("decode-1x128k", "decode", _decode(1, 128 * K), **_8B),
    Shape("decode-128-skewed", "decode", _SKEWED, layers=6),
    Shape("decode-64x32k-w1k", "decode", _decode(64, 32 * K), window=K, **_8B),
    Shape("verify-64x5-at-4k", "verify", ((5, 4 * K),) * 64, **_8B),
    Shape("prefill-1x8k", "prefill", _prefill(1, 8 * K)),
    Shape("prefill-4x2k", "prefill", _prefill(4, 2 * K)),
    Shape("prefill-16x512", "prefill", _prefill(16, 512)),
    Shape("chunk-2k-at-32k", "prefill", ((2 * K, 32 * K),)),
    Shape("prefill-8k-w1k", "prefill", _prefill(1, 8 * K), window=K),
    Shape("prefill-8k-d64-g8", "prefill", _prefill(1, 8 * K), group=8, head_size=64),
    Shape("prefill-4k-d256-h4-g2", "prefill", _prefill(1, 4 * K), heads=4, group=2, head_size=256),
    Shape("mixed-128x2k+2k-at-8k", "mixed", (*_decode(128, 2 * K), (2 * K, 8 * K))),
    Shape("tp8-decode-64x4k", "decode", _decode(64, 4 * K), **_TP8),
    Shape("tp8-prefill-8k", "prefill", _prefill(1, 8 * K), **_TP8),
    Shape("step-1x160", "step", _decode(1, 160), layers=16),
    Shape("step-1x1k", "step", _decode(1, K), layers=16),
    Shape("step-1x4k", "step", _decode(1, 4 * K), layers=16),
    Shape("step-1x16k", "step", _decode(1, 16 * K), layers=16),
    Shape("step-16x256", "step", _decode(16, 256), layers=16),
    Shape("step-16x2k", "step", _decode(16, 2 * K), layers=16),
    Shape("step-64x512", "step", _decode(64, 512), layers=16),
)


def select(parts: Iterable[str]) -> list[Shape]:
    """Shapes whose name has one of the parts in it, in the order of the list; all for no part.

    Raises ValueError for a part that no name has.
    """
    parts = list(parts)
    for part in parts:
        if not any(part in shape.name for shape in SHAPES):
            names = " ".join(shape.name for shape in SHAPES)
            raise ValueError(f"no shape has {part!r} in its name; the shapes are {names}")
    return [shape for shape in SHAPES if not parts or any(part in shape.name for part in parts)]
