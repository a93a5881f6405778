"""Every column on the scheduler's side: whose it is, what it holds, which pages are under it.

A column is a request's, or retained for what it holds, or free. The pages mirror what the workers'
stores do: a clone shares whole pages of flat layers and has all others for itself.
"""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kv_columns.kv_manager.geometry import CacheGeometry, RegionGeometry
from vllm_kv_columns.plugin.commands import Clone, Command, Release, Rewind
from vllm_kv_columns.plugin.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from vllm_kv_columns.plugin.page_pool import PagePool

__all__ = ["Column", "ColumnTable", "FreeColumns", "Hit"]


class FreeColumns:
    """Columns 1 .. count that hold nothing; handed out lowest first, or first given first."""

    def __init__(self, count: int, lowest_first: bool) -> None:
        self._lowest_first = lowest_first
        self._free = deque(range(1, count + 1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.popleft()

    def give(self, column: int) -> None:
        if self._lowest_first:
            insort(self._free, column)
        else:
            self._free.append(column)


@dataclass(eq=False)
class Column:
    """A column that holds something, or is about to.

    Attributes:
        number: as workers know it, from 1.
        pages: of each region in order, the pages under its rows.
        hashes: of the blocks of tokens that it holds since an earlier step.
        cuts: of each region, numbers of pages below which a store can tell pages apart.
        high: positions 0 .. high-1 may have been written.
        floor: what `geometry.floor(high)` is, if it is known.
        request: whose it is; None: retained.
    """

    number: int
    pages: list[list[KVCacheBlock]]
    cuts: list[set[int]]
    hashes: list[bytes] = field(default_factory=list)
    high: int = 0
    floor: int | None = None
    request: str | None = None


@dataclass(frozen=True)
class Hit:
    """What of a prompt is there already.

    Attributes:
        source: the column that holds it; None if nothing is there.
        blocks: of tokens, that `source` holds and every layer can go on from.
        coming: blocks that columns will hold after the step that is being planned.
    """

    source: Column | None
    blocks: int
    coming: int


class ColumnTable:
    """Columns of requests, retained columns, and the pages under both.

    Args:
        geometry: of the cache.
        block_tokens: tokens of a hashed block.
        lowest_first: see `FreeColumns`.
        cut_pages: most pages below a cut through a column that a store cannot tell from those
            above it, so that a clone has a copy of them and a rewind keeps as many above.

    Attributes:
        commands: for the workers, since they were last taken.
        retained_pages: pages that no request's column has.
        shared_pages: pages that two or more columns have, counted once.
        clones: columns that began as a clone, so far.
        adoptions: retained columns that a request took over, so far.
        evictions: retained columns that gave way to something else, so far.
    """

    pool: "PagePool"

    def __init__(
        self,
        geometry: CacheGeometry,
        block_tokens: int,
        lowest_first: bool,
        cut_pages: int = 0,
    ) -> None:
        self.geometry = geometry
        self._cut_pages = cut_pages
        self.block_tokens = block_tokens
        self.commands: list[Command] = []
        self.retained_pages = self.shared_pages = 0
        self.clones = self.adoptions = self.evictions = 0
        self._free = FreeColumns(geometry.max_seqs, lowest_first)
        self._by_request: dict[str, Column] = {}
        self._retained: OrderedDict[int, Column] = OrderedDict()  # least recently used first
        self._columns: dict[int, Column] = {}
        self._index = PrefixIndex()
        self._ends = PrefixIndex()  # of retained columns the last block alone
        # Of the step that is being planned: blocks that its columns come to hold.
        self._coming: dict[Column, list[bytes]] = {}
        self._coming_hashes: set[bytes] = set()
        self._users: dict[int, int] = {}  # page -> how many requests' columns have it, if any do

    def of(self, request: str) -> Column | None:
        return self._by_request.get(request)

    def can_take(self) -> bool:
        """Whether a column can be had for one more request."""
        return bool(self._free) or bool(self._retained)

    def count_columns(self) -> dict[str, int]:
        """How many columns are a request's (running), retained, and free."""
        return {
            "running": len(self._by_request),
            "retained": len(self._retained),
            "free": len(self._free),
        }

    def take_commands(self) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands

    # What a prompt finds.

    def find(self, hashes: Sequence[bytes], max_tokens: int) -> Hit:
        """The longest prefix of a prompt, of at most `max_tokens`, that a column can lend.

        A ring holds what the next token looks back at only down to its floor, so that of columns
        with rings a shorter prefix may be all that serves.
        """
        most = min(len(hashes), max_tokens // self.block_tokens)
        coming = self._index.longest(hashes, most, self._coming_hashes.__contains__)
        seen: set[int] = set()
        for blocks in range(self._index.longest(hashes, most), 0, -1):
            source = self._lender(hashes[blocks - 1], blocks * self.block_tokens, seen)
            if source is not None:
                return Hit(source, blocks, coming)
        return Hit(None, 0, coming)

    def _lender(self, block: bytes, tokens: int, seen: set[int]) -> Column | None:
        """A column that ends with the block and is retained, at best, else the latest that has it.

        The latest may be a clone, and then its memory is cut where the prefix ends.

        Args:
            seen: columns that could not lend more tokens, and so not these; more are added.
        """
        holders = self._index.columns(block)
        if len(holders) == len(seen):
            return None
        for number in (*reversed(self._ends.columns(block)), *reversed(holders)):
            if number not in seen:
                column = self._columns[number]
                if self._floor(column) <= tokens:
                    return column
                seen.add(number)
        return None

    def _floor(self, column: Column) -> int:
        """Fewest tokens that the column can lend."""
        if column.floor is None:
            column.floor = self.geometry.floor(column.high)
        return column.floor

    # What a request costs.

    def pages_missing(self, column: Column, tokens: int) -> int:
        """Pages that the column lacks for so many tokens."""
        return sum(
            max(region.pages_for(tokens) - len(pages), 0)
            for region, pages in zip(self.geometry.regions, column.pages, strict=True)
        )

    def cost(self, hit: Hit, tokens: int) -> int:
        """Pages that a new request of so many tokens takes from those that count as free."""
        if hit.source is None:
            return self.geometry.pages_for(tokens)
        kept = self._kept(hit) if self._goes_on(hit) else self._shared(hit)
        missing = sum(
            max(region.pages_for(tokens) - len(pages), 0)
            for region, pages in zip(self.geometry.regions, kept, strict=True)
        )
        return missing + sum(page.block_id not in self._users for pages in kept for page in pages)

    def _goes_on(self, hit: Hit) -> bool:
        """Whether the request takes the column over, and not a clone of it.

        It does where nothing is lost by it, and where there is no other column.
        """
        source = hit.source
        assert source is not None
        if source.request is not None:
            return False
        others = bool(self._free) or len(self._retained) > 1
        return len(source.hashes) == hit.blocks or not others

    def _kept(self, hit: Hit) -> list[list[KVCacheBlock]]:
        """Pages that stay when the column goes back to the hit's end, for each region.

        A page that will be written is not among them if another column has it as well: that one
        keeps it, and this one gets a copy.
        """
        assert hit.source is not None
        tokens = hit.blocks * self.block_tokens
        kept = []
        for region, pages, cuts in zip(
            self.geometry.regions, hit.source.pages, hit.source.cuts, strict=True
        ):
            below = self._pages_below(region, tokens, cuts)
            stay = pages[: region.pages_of_rows(tokens) + self._cut_pages]
            kept.append(stay[:below] + [page for page in stay[below:] if page.ref_cnt == 1])
        return kept

    def _shared(self, hit: Hit) -> list[list[KVCacheBlock]]:
        """Pages that a clone has in common with its source, for each region."""
        assert hit.source is not None
        tokens = hit.blocks * self.block_tokens
        shared = []
        for region, pages, cuts in zip(
            self.geometry.regions, hit.source.pages, hit.source.cuts, strict=True
        ):
            shared.append(pages[: self._pages_below(region, tokens, cuts)])
        return shared

    def _pages_below(self, region: RegionGeometry, tokens: int, cuts: set[int]) -> int:
        """Pages that can be told apart from what is written beyond so many tokens."""
        whole = self._whole_pages(region, tokens)
        return whole if whole in cuts else max(whole - self._cut_pages, 0)

    @staticmethod
    def _whole_pages(region: RegionGeometry, tokens: int) -> int:
        """Pages that lie wholly below a flat column's length; rings are written everywhere."""
        if region.policy.window is not None:
            return 0
        return tokens * region.row_bytes // region.page_size

    # What happens to columns.

    def begin(self, request: str, hit: Hit) -> Column:
        """Give the request a column that holds what was hit; pages for the rest come later."""
        assert request not in self._by_request
        if hit.source is None:
            column = self._new()
        elif self._goes_on(hit):
            column = self._go_on(hit)
        else:
            column = self._clone(hit)
        column.request = request
        self._by_request[request] = column
        return column

    def _new(self) -> Column:
        if not self._free:
            self.evict()
        regions = self.geometry.regions
        column = Column(self._free.take(), [[] for _ in regions], [set() for _ in regions])
        self._columns[column.number] = column
        return column

    def _go_on(self, hit: Hit) -> Column:
        column = hit.source
        assert column is not None
        tokens = hit.blocks * self.block_tokens
        self.adoptions += 1
        self._stop_retaining(column)
        self._forget_blocks(column, hit.blocks)
        kept = self._kept(hit)
        self._use(page for pages in kept for page in pages)
        dropped = []
        for pages, stay in zip(column.pages, kept, strict=True):
            staying = {page.block_id for page in stay}
            dropped += [page for page in pages if page.block_id not in staying]
        self._drop(dropped)
        column.pages = kept
        for cuts, stay in zip(column.cuts, kept, strict=True):
            cuts.intersection_update(range(len(stay) + 1))
        column.high, column.floor = self.geometry.high_after_rewind(column.high, tokens), None
        self.commands.append(Rewind(column.number, tokens))
        return column

    def _clone(self, hit: Hit) -> Column:
        source = hit.source
        assert source is not None
        tokens = hit.blocks * self.block_tokens
        if source.request is None:
            self._retained.move_to_end(source.number)  # used just now
        shared = self._shared(hit)
        self._use(page for pages in shared for page in pages)
        self.clones += 1
        for pages in shared:
            self.shared_pages += sum(page.ref_cnt == 1 for page in pages)
            self.pool.touch(pages)
        column = self._new()
        column.pages = shared
        for region, cuts, known in zip(
            self.geometry.regions, column.cuts, source.cuts, strict=True
        ):
            whole = self._whole_pages(region, tokens)
            cuts.update(cut for cut in known if cut < whole)
            cuts.add(whole)
        column.hashes = source.hashes[: hit.blocks]
        self._index.add(column.number, column.hashes)
        column.high, column.floor = self.geometry.high_after_rewind(source.high, tokens), None
        self.commands.append(Clone(source.number, column.number, tokens))
        return column

    def grow(self, column: Column, tokens: int) -> None:
        """Put pages under a request's column for so many tokens."""
        for region, pages in zip(self.geometry.regions, column.pages, strict=True):
            missing = region.pages_for(tokens) - len(pages)
            if missing > 0:
                new = self.pool.get_new_blocks(missing)
                self._users.update((page.block_id, 1) for page in new)
                pages += new
        column.high, column.floor = max(column.high, tokens), None

    def will_hold(self, column: Column, hashes: Sequence[bytes], tokens: int) -> None:
        """After the step that is being planned the column holds these tokens of its request."""
        coming = self._coming.get(column)
        known = len(column.hashes) + (len(coming) if coming else 0)
        blocks = min(tokens // self.block_tokens, len(hashes))
        if blocks > known:
            new = hashes[known:blocks]
            self._coming.setdefault(column, []).extend(new)
            self._coming_hashes.update(new)

    def next_step(self) -> None:
        """The step that was planned is on its way, and what it writes can be lent."""
        for column, hashes in self._coming.items():
            retained = column.request is None
            if retained:
                self._ends.remove(column.number, column.hashes[-1:])
            self._index.add(column.number, hashes)
            column.hashes += hashes
            if retained:
                self._ends.add(column.number, column.hashes[-1:])
        self._coming.clear()
        self._coming_hashes.clear()

    def end(self, request: str, retain: bool) -> None:
        """The request is done with its column."""
        column = self._by_request.pop(request, None)
        if column is None:
            return
        column.request = None
        self._unuse(page for pages in column.pages for page in pages)
        if retain and (column.hashes or column in self._coming):
            self._retained[column.number] = column
            self._ends.add(column.number, column.hashes[-1:])
        else:
            self._release(column)

    def lose(self, request: str) -> None:
        """What the request's column holds is gone; nothing may be lent from it any more."""
        column = self._by_request.get(request)
        if column is not None:
            self._forget_blocks(column, 0)
            self._coming.pop(column, None)

    def empty(self, number: int) -> None:
        """What the column holds is gone: free it if it is retained."""
        column = self._columns.get(number)
        if column is None:
            return
        if column.request is None:
            self._stop_retaining(column)
            self._release(column)
        else:
            self.lose(column.request)

    def evict(self) -> bool:
        """Free the retained column that was used longest ago for what needs it or its pages.

        False if there is none.
        """
        found = self.forget()
        self.evictions += found
        return found

    def forget(self) -> bool:
        """Free the retained column that was used longest ago; False if there is none."""
        if not self._retained:
            return False
        column = next(iter(self._retained.values()))
        self._stop_retaining(column)
        self._release(column)
        return True

    def _stop_retaining(self, column: Column) -> None:
        del self._retained[column.number]
        self._ends.remove(column.number, column.hashes[-1:])

    def _release(self, column: Column) -> None:
        self._coming.pop(column, None)
        self._forget_blocks(column, 0)
        self._drop([page for pages in column.pages for page in pages])
        del self._columns[column.number]
        self._free.give(column.number)
        self.commands.append(Release(column.number))

    def _forget_blocks(self, column: Column, keep: int) -> None:
        self._index.remove(column.number, column.hashes[keep:])
        del column.hashes[keep:]

    # Which pages requests have.

    def _use(self, pages: Iterable[KVCacheBlock]) -> None:
        """One more request's column has the pages, that some column had already."""
        for page in pages:
            users = self._users.get(page.block_id, 0)
            self._users[page.block_id] = users + 1
            if not users:
                self.retained_pages -= 1

    def _unuse(self, pages: Iterable[KVCacheBlock]) -> None:
        """One request's column less has the pages."""
        for page in pages:
            self._users[page.block_id] -= 1
            if not self._users[page.block_id]:
                del self._users[page.block_id]
                self.retained_pages += 1

    def _drop(self, pages: Sequence[KVCacheBlock]) -> None:
        """A column that is no request's gives the pages up."""
        self.retained_pages -= sum(
            page.ref_cnt == 1 and page.block_id not in self._users for page in pages
        )
        self.shared_pages -= sum(page.ref_cnt == 2 for page in pages)
        self.pool.free_blocks(reversed(pages))
