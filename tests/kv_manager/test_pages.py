"""The page budget and the table of shared pages."""

import pickle
from collections import Counter

import pytest

from vllm_kv_columns.kv_manager import CacheFullError, KVCacheError, PageBudget
from vllm_kv_columns.kv_manager.stores.page_table import PageTable, runs


def test_budget_counts_what_is_taken_and_given() -> None:
    budget = PageBudget(7, used=2)
    budget.take(4)
    assert (budget.used, budget.free) == (6, 1)
    assert budget.can_take(1) and not budget.can_take(2)
    budget.give(3)
    assert (budget.used, budget.free) == (3, 4)


def test_budget_error_names_needed_and_free_and_changes_nothing() -> None:
    budget = PageBudget(7, used=5)
    with pytest.raises(CacheFullError, match=r"needs 3 pages, 2 free; 5 of 7 are in use") as caught:
        budget.take(3)
    assert (caught.value.needed, caught.value.free, caught.value.unit) == (3, 2, "pages")
    assert budget.used == 5


def test_budget_refuses_to_give_more_than_is_in_use() -> None:
    budget = PageBudget(7, used=1)
    with pytest.raises(KVCacheError, match="give of 2 pages, but 1 are in use"):
        budget.give(2)
    with pytest.raises(KVCacheError, match="take of -1 pages"):
        budget.take(-1)


def test_errors_survive_a_pickle() -> None:
    error = CacheFullError("the step", 1, 0, "pages", "wait")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "the step needs 1 page, 0 free; wait"
    assert (copy.needed, copy.unit) == (1, "pages")


def test_runs_of_consecutive_numbers() -> None:
    assert runs([3, 4, 5, 9, 11, 12]) == [(3, 3), (9, 1), (11, 2)]
    assert runs([]) == []


def grown(table: PageTable, col: int, count: int) -> None:
    table.append(col, table.fresh(col, len(table.pages[col])), count)


def test_a_column_that_grows_in_peace_is_one_run_in_the_file() -> None:
    table = PageTable(cols=3, pages_per_column=5)
    for col in (1, 2, 1, 2, 1):
        grown(table, col, 1)
    assert runs(table.pages[1]) == [(0, 3)]
    assert runs(table.pages[2]) == [(5, 2)]
    assert table.committed == 5


def test_a_released_column_gets_other_file_pages_the_next_time() -> None:
    table = PageTable(cols=3, pages_per_column=5)
    grown(table, 1, 2)
    assert table.truncate(1, 0) == [0, 1]
    grown(table, 1, 1)
    assert table.pages[1] == [5]
    assert table.committed == 1


def test_shared_pages_are_freed_by_their_last_holder_only() -> None:
    table = PageTable(cols=4, pages_per_column=5)
    grown(table, 1, 3)
    table.share(1, 2, 2)
    table.share(1, 3, 3)
    assert table.committed == 3
    assert table.truncate(1, 0) == []
    assert table.truncate(3, 0) == [2]
    assert table.truncate(2, 0) == [0, 1]
    assert table.committed == 0
    assert not table.any_shared


def test_source_and_clone_never_get_a_page_of_the_other() -> None:
    table = PageTable(cols=3, pages_per_column=5)
    grown(table, 1, 2)
    table.share(1, 2, 2)
    for col in (1, 2):
        grown(table, col, 1)
    table.truncate(1, 0)
    grown(table, 1, 4)
    assert not set(table.pages[1]) & set(table.pages[2])


def test_the_last_writer_of_a_shared_page_needs_no_copy() -> None:
    table = PageTable(cols=4, pages_per_column=5)
    grown(table, 1, 2)
    table.share(1, 2, 2)
    table.share(1, 3, 1)
    assert table.copies_needed(Counter({0: 1})) == 1
    assert table.copies_needed(Counter({0: 3})) == 2
    assert table.copies_needed(Counter({0: 2, 1: 2})) == 3
    table.truncate(2, 0)
    assert table.copies_needed(Counter({1: 1})) == 0
