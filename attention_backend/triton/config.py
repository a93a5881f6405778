"""The choice of tiles, warps and stages: one pure function of shapes and the device."""

from dataclasses import dataclass, replace

__all__ = [
    "Cut",
    "HopperLong",
    "HopperShort",
    "Tiles",
    "choose_hopper_long",
    "choose_hopper_short",
    "choose_tiles",
    "power_of_two",
]

HOPPER = (9, 0)  # compute capability
SHORT_WORKERS, SHORT_ROWS = 2, 64
"""Of the short segments' kernel for Hopper: workers of a program, which has a multiprocessor to
itself, and most rows of a segment."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Cut:
    """What the schedule of a step depends on besides the lengths; the same for all dtypes.

    heads, group: KV heads, query heads of each. short_rows: a segment of at most so many rows
    (queries times group) is short; with at most small_rows it is a decode or nearly one.
    short_keys: keys of a tile of short segments. long_rows: rows of a query tile of long segments.
    runs: among which the key tiles of short segments are shared, at least min_tiles each; segments
    of at most twice min_tiles, on average, are not cut. draft_runs: the same in a step where they
    may have more than small_rows. A run has a program or a worker for each KV head.
    """

    heads: int
    group: int
    small_rows: int
    short_rows: int
    short_keys: int
    long_rows: int
    runs: int
    draft_runs: int
    min_tiles: int

    @property
    def most_runs(self) -> int:
        """Runs of any step, for which there must be room."""
        return max(self.runs, self.draft_runs)

    @property
    def second_runs(self) -> int:
        """Runs of a cut for drafts alone; 0 where that for decodes serves them, too."""
        return 0 if self.draft_runs == self.runs else self.draft_runs

    def has_drafts(self, tokens: int, max_q_len: int | None) -> bool:
        """Whether a step of so many query rows may have segments of more than small_rows."""
        longest = tokens if max_q_len is None else min(max_q_len, tokens)
        return longest * self.group > self.small_rows

    def max_long_tiles(self, tokens: int, segments: int, max_q_len: int | None = None) -> int:
        """Query tiles that long segments can have in a step of so many query rows; 0 if none fit.

        Each ends in at most one tile that is not full. max_q_len: most queries of a segment.
        """
        if max_q_len is not None and max_q_len * self.group <= self.short_rows:
            return 0
        shortest_long = self.short_rows // self.group + 1
        most = min(segments, tokens // shortest_long)
        return tokens * self.group // self.long_rows + most if most else 0


@dataclass(frozen=True)
class ShortTiles:
    """Launch parameters for short segments: rows of a tile; registers: most of a thread.

    The programs of as many runs as the cut has should fit on the device at once.
    """

    rows: int
    warps: int
    stages: int
    registers: int | None


@dataclass(frozen=True)
class Tiles:
    """Launch parameters of the two attention kernels.

    dims: the head size in registers. long_rows, a divisor of the cut's, and long_keys: the tile
    of one program for long segments. decode: for short ones, draft: for short ones in a step that
    may have drafts.
    """

    cut: Cut
    dims: int
    long_rows: int
    long_keys: int
    long_warps: int
    long_stages: int
    decode: ShortTiles
    draft: ShortTiles


def choose_tiles(
    heads: int,
    group: int,
    head_size: int,
    element_size: int,
    processors: int,
    windowed: bool = False,
    capability: tuple[int, int] = (0, 0),
) -> Tiles:
    """Tiles for layers of a shape on a device of so many multiprocessors.

    Short segments are bound by memory: several programs a multiprocessor, each with two tiles of
    K and V (16 KiB each at 2 bytes an element) on their way while it computes on a third. Where
    they have a kernel for Hopper, their runs are cut for that. Long segments are bound by the
    tensor cores: tiles as large as registers allow, fewer keys with a window, of whose edges a
    wide tile hides more. At 4 bytes an element there are no tensor cores, as products are not
    rounded to TF32, and operands stay in registers: small tiles.
    """
    dims = max(16, power_of_two(head_size))
    wide = dims > 128
    small_rows = max(16, power_of_two(group))
    keys = min(128, max(32, 8192 // dims))
    cut = Cut(
        heads=heads,
        group=group,
        small_rows=small_rows,
        short_rows=max(64, small_rows),
        short_keys=keys,
        long_rows=128,
        runs=max(1, (2 if wide else 3) * processors // heads),
        draft_runs=max(1, (1 if wide else 2) * processors // heads),
        min_tiles=4 if dims >= 128 else 2,
    )
    if _streams(capability, head_size, small_rows):
        runs = _short_runs(processors, heads)
        # The finer, the more even; what boxes share comes from the L2 cache.
        cut = replace(cut, runs=runs, draft_runs=runs, short_keys=16, min_tiles=8)
    if element_size == 4:
        short = ShortTiles(16, 4, 2, None)
        return Tiles(cut, dims, 16, keys, 4, 2, short, short)
    long_keys = 64 if wide or windowed else 128
    return Tiles(
        cut=cut,
        dims=dims,
        long_rows=128,
        long_keys=long_keys,
        long_warps=8,
        long_stages=3 if windowed and not wide else 2,
        decode=ShortTiles(small_rows, 4, 3, None if wide else 168),
        draft=ShortTiles(max(64, small_rows), 4, 3, None),
    )


@dataclass(frozen=True)
class HopperLong:
    """Launch parameters of the long segments' kernel for Hopper.

    keys: of a tile; stages: places for tiles of K, and as many for V. turns: whether the two
    consumers take turns to ask for products. query_places: places for query tiles, if the copy
    engine brings these. direct: results go to memory from registers, and not through the place of
    the query tile. heads_first: programs go through all query tiles of a head before the next
    head, and not the other way round.
    """

    keys: int
    stages: int
    turns: bool
    query_places: int
    direct: bool
    heads_first: bool


def choose_hopper_long(
    capability: tuple[int, int],
    cut: Cut,
    head_size: int,
    element_size: int,
    windowed: bool,
    negate: bool,
) -> HopperLong | None:
    """Tiles for layers of a shape on a device of that compute capability; None: not for these.

    A consumer's scores, weights and result must fit its registers, and K and V shared memory.
    """
    if capability != HOPPER or element_size != 2 or negate or head_size not in (64, 128, 256):
        return None
    wide = head_size == 256
    keys = 64 if wide else 128
    return HopperLong(
        keys=keys,
        stages=min(4, 2 * 128 * 128 // (keys * head_size)),
        turns=not wide,
        query_places=1 if wide else 2,
        direct=wide,
        heads_first=windowed and not wide,
    )


@dataclass(frozen=True)
class HopperShort:
    """Launch parameters of the short segments' kernel for Hopper.

    keys: of a box; stages: a worker's places for boxes.
    """

    keys: int
    stages: int


def _streams(capability: tuple[int, int], head_size: int, small_rows: int) -> bool:
    return capability == HOPPER and head_size in (64, 128, 256) and small_rows <= SHORT_ROWS


def _short_runs(programs: int, heads: int) -> int:
    """As many as those programs have workers for, a worker for each head; none is left over."""
    step = SHORT_WORKERS if heads % SHORT_WORKERS else 1
    return max(1, SHORT_WORKERS * programs // (heads * step)) * step


def choose_hopper_short(
    capability: tuple[int, int], cut: Cut, head_size: int, element_size: int, negate: bool
) -> HopperShort | None:
    """The short segments' kernel for layers of a shape on a device; None: not for these.

    Boxes of 16 KiB, of which each worker has as many as fit beside a query tile: at 4.4 TB/s a
    multiprocessor needs 27 KiB on their way to hide 0.8 us, and more while a segment ends.
    """
    if element_size != 2 or negate:
        return None
    if not _streams(capability, head_size, cut.small_rows):
        return None
    return HopperShort(keys=8192 // head_size, stages=5 if head_size == 256 else 6)
