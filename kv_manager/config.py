"""What a cache is to hold: layers in groups, limits, page size and byte budget. Plain data."""

from dataclasses import dataclass

from .errors import ConfigError

__all__ = ["ITEM_SIZES", "CacheConfig", "FlatPolicy", "LayerGroup", "LayerPolicy", "RingPolicy"]

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
OS_PAGE = 4096
MAX_POSITION = 2**31 - 1  # positions travel in int32 tables


def _at_least(owner: str, name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{owner}: {name} is {value!r}; it must be an integer of at least {least}"
        )


@dataclass(frozen=True)
class FlatPolicy:
    """Full attention: every position keeps its own row."""

    @property
    def window(self) -> None:
        """No bound on how far back a query looks."""
        return None

    def rows(self, capacity: int, max_write: int) -> int:
        """Rows of a column: one for each position."""
        return capacity

    def floor(self, high: int, rows: int) -> int:
        """Shortest length to which a sequence can go back: nothing is ever overwritten."""
        return 0


@dataclass(frozen=True)
class RingPolicy:
    """Sliding window: a query at position p attends p - window + 1 .. p; old rows are reused."""

    window: int

    def __post_init__(self) -> None:
        _at_least("RingPolicy", "window", self.window, 1)

    def rows(self, capacity: int, max_write: int) -> int:
        """Rows of a column.

        A step that writes max_write positions from n on overwrites positions up to
        n + max_write - 1 - rows, and its first query still reads n - window + 1; the first must
        be below the second, hence rows = window + max_write - 1 (never more than capacity).
        """
        return min(capacity, self.window + max_write - 1)

    def floor(self, high: int, rows: int) -> int:
        """Shortest length to which a sequence can go back, when positions 0 .. high-1 were written.

        The rows hold positions high - rows .. high - 1. With length n the next query is at n and
        reads from n - window + 1 on, so n >= high - rows + window - 1. While high <= rows nothing
        was overwritten and the floor is 0. ``high`` is the largest length ever written, not the
        current one: rows that a rewound write took are lost.
        """
        return high - (rows - self.window + 1) if high > rows else 0


LayerPolicy = FlatPolicy | RingPolicy


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share policy, head count, head size and dtype.

    ``layers_per_region`` splits the group over several regions of at most that many layers
    (None: one region): a region is what one reservation holds, and the waste of a sequence is
    at most one page per region.
    """

    name: str
    layers: tuple[str, ...]
    policy: LayerPolicy
    num_kv_heads: int
    head_size: int
    dtype: str
    layers_per_region: int | None = None

    def __post_init__(self) -> None:
        owner = f"layer group {self.name!r}"
        if not self.layers or isinstance(self.layers, str):
            raise ConfigError(f"{owner}: layers is {self.layers!r}; give a tuple of layer names")
        object.__setattr__(self, "layers", tuple(self.layers))
        if not isinstance(self.policy, FlatPolicy | RingPolicy):
            raise ConfigError(f"{owner}: policy is {self.policy!r}; use FlatPolicy or RingPolicy")
        _at_least(owner, "num_kv_heads", self.num_kv_heads, 1)
        _at_least(owner, "head_size", self.head_size, 1)
        if self.dtype not in ITEM_SIZES:
            raise ConfigError(f"{owner}: dtype is {self.dtype!r}; use one of {sorted(ITEM_SIZES)}")
        if self.layers_per_region is not None:
            _at_least(owner, "layers_per_region", self.layers_per_region, 1)


@dataclass(frozen=True)
class CacheConfig:
    """Limits and layers of one cache.

    max_seqs: sequences that live at once. capacity: most tokens of one sequence. max_write: most
    tokens that one step writes for one sequence. page_size: bytes, a power of two and a multiple
    of 4096. budget_bytes: bound on committed memory, scratch column included. growth_rows: rows
    are backed in multiples of this. ahead_rows: rows that a column may have backed ahead of need,
    counted as its own (``RegionGeometry.pages_for``), so that a store can grow it before it waits.
    ring_tile: rings have a multiple of so many rows, for kernels whose tiles must not lap a ring.
    """

    max_seqs: int
    capacity: int
    max_write: int
    groups: tuple[LayerGroup, ...]
    page_size: int
    budget_bytes: int
    growth_rows: int = 1
    ahead_rows: int = 0
    ring_tile: int = 1

    def __post_init__(self) -> None:
        for name in ("max_seqs", "capacity", "max_write", "growth_rows", "ring_tile"):
            _at_least("CacheConfig", name, getattr(self, name), 1)
        _at_least("CacheConfig", "budget_bytes", self.budget_bytes, 0)
        _at_least("CacheConfig", "ahead_rows", self.ahead_rows, 0)
        _at_least("CacheConfig", "page_size", self.page_size, OS_PAGE)
        if self.capacity > MAX_POSITION:
            raise ConfigError(f"CacheConfig: capacity is {self.capacity}; at most {MAX_POSITION}")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(
                f"CacheConfig: page_size is {self.page_size}; "
                f"it must be a power of two and a multiple of {OS_PAGE}"
            )
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise ConfigError("CacheConfig: groups is empty; give at least one LayerGroup")
        _no_repeats("group name", [group.name for group in self.groups])
        _no_repeats("layer name", [layer for group in self.groups for layer in group.layers])


def _no_repeats(what: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"CacheConfig: {what} {name!r} appears twice; names must be unique")
        seen.add(name)
