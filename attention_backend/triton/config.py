"""The choice of tiles, warps and stages: one pure function of shapes and the device."""

import math
from dataclasses import dataclass

__all__ = ["HOPPER", "Cut", "HopperTiles", "Tiles", "choose_hopper", "choose_tiles", "power_of_two"]

HOPPER = 9, 0  # compute capability


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Cut:
    """What the schedule of a step depends on besides the lengths; the same for all dtypes.

    heads, group: KV heads, query heads of each. short_rows: a segment of at most so many rows
    (queries times group) is short; with at most small_rows it is a decode or nearly one.
    short_keys: keys of a tile of short segments, long_rows: rows of a query tile of long ones.
    programs: that share the short segments, at least min_tiles tiles each; draft_programs: the
    same in a step where short segments may have more than small_rows.
    """

    heads: int
    group: int
    small_rows: int
    short_rows: int
    short_keys: int
    long_rows: int
    programs: int
    draft_programs: int
    min_tiles: int

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

    As many programs as the cut has must fit on the device at once.
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
    hopper: bool = False,
) -> Tiles:
    """Tiles for layers of a shape on a device of so many multiprocessors.

    hopper: its compute capability is HOPPER; see ``choose_hopper``.

    Short segments are bound by memory: several programs a multiprocessor, each with two tiles of
    K and V (16 KiB each at 2 bytes an element) on their way while it computes on a third. Long
    ones are bound by the tensor cores: tiles as large as registers allow, fewer keys with a
    window, of whose edges a wide tile hides more. At 4 bytes an element there are no tensor cores,
    as products are not rounded to TF32, and operands stay in registers: small tiles.
    """
    dims = max(16, power_of_two(head_size))
    wide = dims > 128
    small_rows = max(16, power_of_two(group))
    cut = Cut(
        heads=heads,
        group=group,
        small_rows=small_rows,
        short_rows=max(64, small_rows),
        short_keys=min(128, max(32, 8192 // dims)),
        long_rows=192 if hopper and head_size == 64 else 128,
        programs=(2 if wide else 3) * processors,
        draft_programs=(1 if wide else 2) * processors,
        min_tiles=4 if dims >= 128 else 2,
    )
    if element_size == 4:
        short = ShortTiles(16, 4, 2, None)
        return Tiles(cut, dims, 16, cut.short_keys, 4, 2, short, short)
    long_keys = 64 if wide or windowed else 128
    return Tiles(
        cut=cut,
        dims=dims,
        long_rows=math.gcd(128, cut.long_rows),
        long_keys=long_keys,
        long_warps=8,
        long_stages=3 if windowed and not wide else 2,
        decode=ShortTiles(small_rows, 4, 3, None if wide else 168),
        draft=ShortTiles(max(64, small_rows), 4, 3, None),
    )


@dataclass(frozen=True)
class HopperTiles:
    """Launch parameters of the long segments' kernel for Hopper.

    keys: of a tile; stages: places for tiles of K, and as many for V. consumers: warpgroups with
    64 rows of a query tile each, registers: of a thread of theirs. turns: whether they take turns
    to ask for products. query_places: places for query tiles, if the copy engine brings these.
    direct: results go to memory from registers, and not through the place of the query tile.
    by_hand: a quarter of the powers of two come from other units than those of the others.
    counted: programs take query tiles as they get free, and not by number. heads_first: they go
    through all query tiles of a head before the next head, and not the other way round. joined:
    the scores of the next query tile are begun before the result of this one is stored, which
    needs query_places = 2 or direct.
    """

    keys: int
    stages: int
    consumers: int
    registers: int
    turns: bool
    query_places: int
    direct: bool = False
    by_hand: bool = False
    counted: bool = True
    heads_first: bool = False
    joined: bool = False


def choose_hopper(
    capability: tuple[int, int],
    cut: Cut,
    head_size: int,
    element_size: int,
    windowed: bool,
    negate: bool,
) -> HopperTiles | None:
    """Tiles for layers of a shape on a device of that compute capability; None: not for these.

    A consumer's scores, weights and result must fit its registers, and K and V shared memory.
    With a head size of 64 a softmax takes as long as the products of its scores, and of three
    consumers there is more often one that multiplies.
    """
    if capability != HOPPER or element_size != 2 or negate or head_size not in (64, 128, 256):
        return None
    consumers = cut.long_rows // 64
    wide = head_size == 256
    keys = 64 if wide else 128
    return HopperTiles(
        keys=keys,
        stages=min(4, 2 * 128 * 128 // (keys * head_size)),
        consumers=consumers,
        registers=160 if consumers == 3 else 240,
        turns=not wide,
        query_places=1 if wide else 2,
    )
