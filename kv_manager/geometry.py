"""Sizes that follow from a CacheConfig: rows, strides, pages. Scheduler and worker share these.

A region is one reserved stretch of addresses, ordered [col][row][layer][2][H][D]. One token of all
its layers is contiguous (``row_bytes``), and a column is rounded up to whole pages.
"""

from dataclasses import dataclass
from functools import cached_property

from .config import ITEM_SIZES, CacheConfig, LayerGroup, LayerPolicy
from .errors import ConfigError

__all__ = ["SCRATCH_COLUMN", "CacheGeometry", "RegionGeometry"]

SCRATCH_COLUMN = 0  # padded tokens write here, at position 0; nothing reads it


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


@dataclass(frozen=True)
class RegionGeometry:
    """Shape of one region. Counts are rows, columns, pages; ``*_bytes`` bytes; strides elements."""

    name: str
    layers: tuple[str, ...]
    policy: LayerPolicy
    rows: int
    cols: int
    num_kv_heads: int
    head_size: int
    dtype: str
    page_size: int
    growth_rows: int
    ahead_rows: int = 0

    @cached_property
    def itemsize(self) -> int:
        return ITEM_SIZES[self.dtype]

    @cached_property
    def layer_stride(self) -> int:
        """Elements of one layer in one row: K and V of all heads."""
        return 2 * self.num_kv_heads * self.head_size

    @cached_property
    def row_stride(self) -> int:
        return len(self.layers) * self.layer_stride

    @cached_property
    def row_bytes(self) -> int:
        return self.row_stride * self.itemsize

    @cached_property
    def pages_per_column(self) -> int:
        return _ceil_div(self.rows * self.row_bytes, self.page_size)

    @cached_property
    def col_bytes(self) -> int:
        return self.pages_per_column * self.page_size

    @cached_property
    def col_stride(self) -> int:
        return self.col_bytes // self.itemsize

    @cached_property
    def nbytes(self) -> int:
        """Address space of the region, not memory."""
        return self.cols * self.col_bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[rows, cols, 2, H, D] of one layer's view."""
        return (self.rows, self.cols, 2, self.num_kv_heads, self.head_size)

    @property
    def strides(self) -> tuple[int, int, int, int, int]:
        """Elements, for ``shape``."""
        head = self.head_size
        return (self.row_stride, self.col_stride, self.num_kv_heads * head, head, 1)

    def layer_offset(self, layer: str) -> int:
        """Elements from the start of the region to the layer's first element."""
        return self.layers.index(layer) * self.layer_stride

    def pages_for(self, n: int) -> int:
        """Pages that a column may hold while its sequence has n tokens (0 for 0).

        These are the pages of n + ahead_rows rows: what the scheduler counts, and what a store
        backs at most, whether it is told in time or ahead of time.
        """
        return self.pages_of_rows(n + self.ahead_rows) if n > 0 else 0

    def pages_of_rows(self, n: int) -> int:
        """Pages of the first n rows, rounded up by growth_rows and at most the column's."""
        backed = min(_ceil_div(n, self.growth_rows) * self.growth_rows, self.rows)
        return _ceil_div(backed * self.row_bytes, self.page_size)

    def pages_of(self, col: int, n: int) -> int:
        """``pages_for``, but nothing ahead for the scratch column."""
        return self.pages_of_rows(n) if col == SCRATCH_COLUMN else self.pages_for(n)

    def tokens_within(self, pages: int) -> int | None:
        """Largest n with ``pages_for(n) <= pages``; None: any number, all rows are backed."""
        if pages >= self.pages_per_column:
            return None
        rows = self.rows_within(pages) // self.growth_rows * self.growth_rows
        return max(0, rows - self.ahead_rows)

    def rows_within(self, pages: int) -> int:
        """Rows that lie wholly inside the first pages of a column."""
        return min(self.rows, pages * self.page_size // self.row_bytes)

    def slot_runs(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Slots of positions [start, end) as at most two half-open runs."""
        if end - start >= self.rows:
            return ((0, self.rows),)
        first = start % self.rows
        last = first + end - start
        if last <= self.rows:
            return ((first, last),) if first < last else ()
        return ((first, self.rows), (0, last - self.rows))

    def written_pages(self, start: int, end: int) -> list[int]:
        """Page numbers within the column that hold a byte of positions [start, end), ascending."""
        pages: set[int] = set()
        for first, last in self.slot_runs(start, end):
            pages.update(
                range(
                    first * self.row_bytes // self.page_size,
                    _ceil_div(last * self.row_bytes, self.page_size),
                )
            )
        return sorted(pages)

    def end_within_page(self, end: int) -> int:
        """Largest end' >= end so that positions [end-1, end') touch no page after end-1's last."""
        slot = (end - 1) % self.rows
        page = ((slot + 1) * self.row_bytes - 1) // self.page_size
        return end - 1 + self.rows_within(page + 1) - slot


@dataclass(frozen=True)
class CacheGeometry:
    """All regions of a cache and its page budget."""

    regions: tuple[RegionGeometry, ...]
    max_seqs: int
    capacity: int
    max_write: int
    page_size: int
    budget_pages: int

    @classmethod
    def of(cls, config: CacheConfig) -> "CacheGeometry":
        """Lay out a configuration.

        Raises ConfigError when the budget cannot hold the scratch column and one token.
        """
        geometry = cls(
            regions=tuple(
                region for group in config.groups for region in _regions_of(group, config)
            ),
            max_seqs=config.max_seqs,
            capacity=config.capacity,
            max_write=config.max_write,
            page_size=config.page_size,
            budget_pages=config.budget_bytes // config.page_size,
        )
        least = geometry.scratch_pages + geometry.pages_for(1)
        if geometry.budget_pages < least:
            raise ConfigError(
                f"budget_bytes is {config.budget_bytes}, that is {geometry.budget_pages} pages of "
                f"{config.page_size}; the scratch column and one token need {least} pages, "
                f"{least * config.page_size} bytes: raise budget_bytes or lower page_size"
            )
        return geometry

    @property
    def cols(self) -> int:
        """Columns of every region: the scratch column and one per sequence."""
        return self.max_seqs + 1

    @property
    def max_segments(self) -> int:
        """Most segments of one step."""
        return 2 * self.max_seqs

    @cached_property
    def scratch_pages(self) -> int:
        """Pages of the scratch column; it only ever holds position 0."""
        return sum(region.pages_of_rows(1) for region in self.regions)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        return tuple(layer for region in self.regions for layer in region.layers)

    @cached_property
    def _region_of(self) -> dict[str, RegionGeometry]:
        return {layer: region for region in self.regions for layer in region.layers}

    @cached_property
    def _least_rows(self) -> int:
        return min(region.rows for region in self.regions)

    def region_of(self, layer: str) -> RegionGeometry:
        """The region that holds a layer; ConfigError for an unknown name."""
        region = self._region_of.get(layer)
        if region is None:
            known = ", ".join(self.layers[:4]) + (", ..." if len(self.layers) > 4 else "")
            raise ConfigError(
                f"layer {layer!r} is not in the cache; its {len(self.layers)} layers are: {known}"
            )
        return region

    def pages_for(self, n: int) -> int:
        """Pages of one sequence of n tokens, nothing shared, rows ahead of need included."""
        return sum(region.pages_for(n) for region in self.regions)

    def floor(self, high: int) -> int:
        """Shortest length to go back to once positions 0 .. high-1 were written."""
        return max(region.policy.floor(high, region.rows) for region in self.regions)

    def high_after_rewind(self, high: int, length: int) -> int:
        """High-water mark after going back to ``length``.

        Once a ring wrapped the mark stays, since the rows that it overwrote are gone for good.
        """
        return length if high <= self._least_rows else high


def _regions_of(group: LayerGroup, config: CacheConfig) -> list[RegionGeometry]:
    step = group.layers_per_region or len(group.layers)
    rows = group.policy.rows(config.capacity, config.max_write)
    if group.policy.window is not None:
        rows = _ceil_div(rows, config.ring_tile) * config.ring_tile
    chunks = [group.layers[i : i + step] for i in range(0, len(group.layers), step)]
    return [
        RegionGeometry(
            name=group.name if len(chunks) == 1 else f"{group.name}.{i}",
            layers=chunk,
            policy=group.policy,
            rows=rows,
            cols=config.max_seqs + 1,
            num_kv_heads=group.num_kv_heads,
            head_size=group.head_size,
            dtype=group.dtype,
            page_size=config.page_size,
            growth_rows=config.growth_rows,
            ahead_rows=config.ahead_rows,
        )
        for i, chunk in enumerate(chunks)
    ]
