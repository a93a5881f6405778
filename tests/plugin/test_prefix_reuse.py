"""Prefix reuse under vLLM: the same tokens as without it, and hits as stock vLLM has them."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.conftest import GREEDY, Job, Result, tokens

RunEngine = Callable[..., Result]
COLUMNS: Job = {"attention_backend": "SDPA_VARLEN", "enable_prefix_caching": True}
PAGE = 256 * 1024
STARTED, LOWERED, RAISED = 60, 30, 200  # pages of the cache
PARAMS = {**GREEDY, "max_tokens": 12}


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(50, 500) for _ in range(count)]


def traces() -> dict[str, Job]:
    rng = random.Random(1)
    system, root = drawn(rng, 100), drawn(rng, 70)
    one = root + drawn(rng, 60)
    two = one + drawn(rng, 50)
    agent = [root, one, two, one + drawn(rng, 30), root + drawn(rng, 20), two + drawn(rng, 10)]
    examples = drawn(rng, 150)
    return {
        "users of a system prompt": {
            "prompts": [system + drawn(rng, rng.randrange(5, 40)) for _ in range(12)]
        },
        "chats": {
            "chats": [[drawn(rng, rng.randrange(20, 60)) for _ in range(4)] for _ in range(5)]
        },
        "an agent that goes back": {"prompts": agent, "one_by_one": True},
        "branches at once": {"prompts": agent},
        "few-shot batch": {"prompts": [examples + drawn(rng, 7) for _ in range(6)]},
        "samples of a prompt": {"prompts": [drawn(rng, 90)] * 4},
        "an abort": {"prompts": [system + drawn(rng, 20) for _ in range(6)], "abort_after": 5},
    }


TRACES = traces()
SYSTEM_PROMPT = TRACES["users of a system prompt"]
RUNS = [{**trace, "params": PARAMS} for trace in TRACES.values()]


def llm(model: Path, **changes: Any) -> Job:
    return {
        "model": str(model),
        "load_format": "dummy",
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 28,
        "enable_prefix_caching": False,
        **changes,
    }


def run(run_engine: RunEngine, job: Job, **more: Any) -> Result:
    return run_engine(job, RUNS, weights="random", **more)


def all_tokens(result: Result) -> dict[str, Any]:
    return {name: tokens(result, i) for i, name in enumerate(TRACES)}


CHANGES: dict[str, Job] = {
    "defaults": {},
    "few columns, little memory and small chunks": {
        "max_num_seqs": 5,
        "additional_config": {"kv_columns": {"retained": 1}},
        "kv_cache_memory_bytes": 60 * PAGE,
        "max_num_batched_tokens": 48,
    },
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_tokens_are_those_of_stock_without_reuse(
    run_engine: RunEngine, gemma3_like: Path, changes: Job
) -> None:
    stock = run(run_engine, llm(gemma3_like), plugin=False)
    assert stock["prefix_hits"] == 0
    result = run(run_engine, llm(gemma3_like, **{**COLUMNS, **changes}), events=True)
    assert result["prefix_hits"] > 0.5 * result["prefix_queries"]
    assert result["kv_cache_usage"] == 0
    assert all_tokens(result) == all_tokens(stock)


def test_tokens_are_those_when_memory_is_taken_away(
    run_engine: RunEngine, gemma3_like: Path
) -> None:
    stock = run(run_engine, llm(gemma3_like), plugin=False)
    result = run(run_engine, llm(gemma3_like, **COLUMNS), fault="memory taken away for a while")
    assert result["preemptions"] > 0
    assert all_tokens(result) == all_tokens(stock)


def test_what_is_retained_goes_back_when_nothing_runs(
    run_engine: RunEngine, gemma3_like: Path
) -> None:
    """And whoever asks then finds nothing, and is served as ever."""
    chats, again = ({**TRACES["chats"], "params": PARAMS} for _ in range(2))
    job = llm(gemma3_like, **COLUMNS, additional_config={"kv_columns": {"retain_seconds": 1}})
    result = run_engine(
        job, [chats, {**again, "pause": 2.5}, {**again, "pause": 0.1}], weights="random"
    )
    groups, scratch = 2, PAGE
    emptied, retained = result["held_after_pauses"]
    assert emptied == groups * scratch < retained
    assert tokens(result, 1) == tokens(result, 0) == tokens(result, 2)


def test_the_limit_can_be_changed_while_requests_run(
    run_engine: RunEngine, gemma3_like: Path
) -> None:
    """Lowered below what is in use, then raised above what the server started with."""
    rng = random.Random(2)
    first = {"prompts": [drawn(rng, 200) for _ in range(8)], "params": GREEDY}
    then = {"prompts": [drawn(rng, 200) for _ in range(24)], "params": GREEDY}
    small: Job = {"max_model_len": 256, "max_num_seqs": 24}
    stock = run_engine(llm(gemma3_like, **small), [first, then], weights="random", plugin=False)
    limits = {10: LOWERED * PAGE, 60: RAISED * PAGE}
    job = llm(gemma3_like, **COLUMNS, **small, kv_cache_memory_bytes=STARTED * PAGE)
    result = run_engine(job, [{**first, "limits": limits}, then], weights="random")
    assert [tokens(result, i) for i in (0, 1)] == [tokens(stock, i) for i in (0, 1)]
    held = [step["resident_bytes"] / PAGE for step in result["log"]]
    assert result["preemptions"] > 0
    assert max(held[:10]) > LOWERED >= max(held[14:60])
    assert STARTED < max(held[60:]) <= RAISED


@pytest.fixture
def without_windows(run_engine: RunEngine, mistral_like: Path) -> tuple[Result, Result]:
    """Columns and stock vLLM, blocks of one size, events on, and at last an emptied cache."""
    job = {**COLUMNS, "block_size": 32, "hf_overrides": {"sliding_window": None}}
    runs = [*RUNS, {"prompts": SYSTEM_PROMPT["prompts"][:2], "params": PARAMS, "reset": True}]
    ours, stock = (
        run_engine(
            llm(mistral_like, **{**job, **more}), runs, weights="random", events=True, plugin=plugin
        )
        for more, plugin in (({}, True), ({"attention_backend": None}, False))
    )
    return ours, stock


def test_hits_are_those_of_stock(without_windows: tuple[Result, Result]) -> None:
    ours, stock = without_windows
    assert all_tokens(ours) == all_tokens(stock)
    assert ours["prefix_queries"] == stock["prefix_queries"]
    assert ours["prefix_hits"] == stock["prefix_hits"]


Block = tuple[int | None, tuple[int, ...], dict[str, Any]]


def stored_blocks(event: dict[str, Any]) -> Iterator[tuple[int, Block]]:
    """Hash of each block -> the one before it, its tokens, and what else the event says of it."""
    hashes, size = event["block_hashes"], event["block_size"]
    before = [event["parent_block_hash"], *hashes[:-1]]
    keys = event["extra_keys"]
    apart = ("block_hashes", "parent_block_hash", "token_ids", "extra_keys")
    rest = {name: value for name, value in event.items() if name not in apart}
    for i, (one, parent) in enumerate(zip(hashes, before, strict=True)):
        tokens = tuple(event["token_ids"][i * size : (i + 1) * size])
        yield one, (parent, tokens, {**rest, "extra_keys": keys[i]})


def check_events(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Each block is stored once after those before it, and removed once. How many of both."""
    stored: set[int] = set()
    count = removed = 0
    for event in events:
        if event["type"] == "BlockStored":
            for one, (parent, tokens, _) in stored_blocks(event):
                assert one not in stored and (parent is None or parent in stored)
                assert len(tokens) == event["block_size"]
                stored.add(one)
                count += 1
        elif event["type"] == "BlockRemoved":
            for one in event["block_hashes"]:
                stored.remove(one)
                removed += 1
        else:
            stored.clear()
    return count, removed


def test_events_are_those_of_stock(without_windows: tuple[Result, Result]) -> None:
    """The same blocks, described alike, before the cache is emptied and after."""
    for result in without_windows:
        assert sum(event["type"] == "AllBlocksCleared" for event in result["events"]) == 1
    ours, stock = (
        [
            dict(block for event in part if "token_ids" in event for block in stored_blocks(event))
            for part in parts(result["events"])
        ]
        for result in without_windows
    )
    assert ours == stock
    check_events(without_windows[0]["events"])
    assert len(ours[0]) > 50 and ours[1]


def parts(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Before and after all blocks were cleared."""
    (at,) = (i for i, event in enumerate(events) if event["type"] == "AllBlocksCleared")
    return events[:at], events[at + 1 :]


def test_events_of_columns_that_give_way(run_engine: RunEngine, gemma3_like: Path) -> None:
    """With layers that have a window, too, all of them are of one group."""
    changes = CHANGES["few columns, little memory and small chunks"]
    result = run(run_engine, llm(gemma3_like, **{**COLUMNS, **changes}), events=True)
    stored, removed = check_events(result["events"])
    assert stored > removed > 0
    kinds = {event.get("kv_cache_spec_kind") for event in result["events"]}
    assert kinds == {"full_attention", None}  # None: of those that are removed
