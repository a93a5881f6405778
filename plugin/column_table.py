"""Every column on the scheduler's side: whose it is, what it holds, which pages are under it.

A column is a request's, or retained for what it holds, or free. The pages mirror what the workers'
stores do: a clone shares whole pages of flat layers and has all others for itself.
"""

from collections import OrderedDict

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kv_columns.kv_manager.geometry import CacheGeometry, RegionGeometry
from vllm_kv_columns.plugin.columns import Column, FreeColumns, Hit
from vllm_kv_columns.plugin.commands import Clone, Command, Release, Rewind
from vllm_kv_columns.plugin.lenders import Lenders
from vllm_kv_columns.plugin.page_use import PageUse

__all__ = ["ColumnTable"]


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
        lenders: what columns hold, and can lend.
        pages: what is under them.
        clones: columns that began as a clone, so far.
        adoptions: retained columns that a request took over, so far.
        evictions: retained columns that gave way to something else, so far.
    """

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
        self.clones = self.adoptions = self.evictions = 0
        self._free = FreeColumns(geometry.max_seqs, lowest_first)
        self._by_request: dict[str, Column] = {}
        self._retained: OrderedDict[int, Column] = OrderedDict()  # least recently used first
        self._columns: dict[int, Column] = {}
        self.lenders = Lenders(geometry, block_tokens, self._columns)
        self.pages = PageUse()

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
        return missing + self.pages.count_retained(page for pages in kept for page in pages)

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
        self.lenders.forget(column, hit.blocks)
        kept = self._kept(hit)
        self.pages.use(page for pages in kept for page in pages)
        dropped = []
        for pages, stay in zip(column.pages, kept, strict=True):
            staying = {page.block_id for page in stay}
            dropped += [page for page in pages if page.block_id not in staying]
        self.pages.drop(dropped)
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
        self.clones += 1
        for pages in shared:
            self.pages.share(pages)
        column = self._new()
        column.pages = shared
        for region, cuts, known in zip(
            self.geometry.regions, column.cuts, source.cuts, strict=True
        ):
            whole = self._whole_pages(region, tokens)
            cuts.update(cut for cut in known if cut < whole)
            cuts.add(whole)
        column.hashes = source.hashes[: hit.blocks]
        self.lenders.begin(column)
        column.high, column.floor = self.geometry.high_after_rewind(source.high, tokens), None
        self.commands.append(Clone(source.number, column.number, tokens))
        return column

    def grow(self, column: Column, tokens: int) -> None:
        """Put pages under a request's column for so many tokens."""
        for region, pages in zip(self.geometry.regions, column.pages, strict=True):
            missing = region.pages_for(tokens) - len(pages)
            if missing > 0:
                pages += self.pages.take(missing)
        column.high, column.floor = max(column.high, tokens), None

    def end(self, request: str, retain: bool) -> None:
        """The request is done with its column."""
        column = self._by_request.pop(request, None)
        if column is None:
            return
        column.request = None
        self.pages.unuse(page for pages in column.pages for page in pages)
        if retain and self.lenders.holds_any(column):
            self._retained[column.number] = column
            self.lenders.retain(column)
        else:
            self._release(column)

    def lose(self, request: str) -> None:
        """What the request's column holds is gone; nothing may be lent from it any more."""
        column = self._by_request.get(request)
        if column is not None:
            self.lenders.forget_all(column)

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
        self.lenders.stop_retaining(column)

    def _release(self, column: Column) -> None:
        self.lenders.forget_all(column)
        self.pages.drop([page for pages in column.pages for page in pages])
        del self._columns[column.number]
        self._free.give(column.number)
        self.commands.append(Release(column.number))
