"""The scheduler's side of a step whose output reports that memory was short."""

import time
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.plugin.configured import configure, made_scheduler
from vllm_kv_columns.plugin.report import MemoryReport, attach_report
from vllm_kv_columns.plugin.scheduler import AsyncColumnScheduler

PAGES, PAGE_ROWS, ROW_BYTES = 16, 16, 256


@pytest.fixture(scope="module")
def config(mistral_like: Path) -> Any:
    return configure(
        mistral_like,
        max_model_len=256,
        max_num_seqs=4,
        async_scheduling=True,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        long_prefill_token_threshold=48,
        additional_config={"kv_columns": {"page_size": PAGE_ROWS * ROW_BYTES}},
    )


@pytest.fixture
def scheduler(config: Any) -> AsyncColumnScheduler:
    made: AsyncColumnScheduler = made_scheduler(AsyncColumnScheduler, config, PAGES)
    return made


def request(name: str, tokens: int = 20, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=8, temperature=0)
    params.update_from_generation_config({}, eos_token_id=2)
    prompt = list(range(ord(name), ord(name) + tokens))
    return Request(name, prompt, params, pooling_params=None, priority=priority)


def output(plan: SchedulerOutput, *refused: str, lost: tuple[int, ...] = ()) -> ModelRunnerOutput:
    """Token 7 for every request of the step."""
    names = list(plan.num_scheduled_tokens)
    made = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[7] for _ in names],
    )
    if refused:
        attach_report(made, MemoryReport(refused, PAGES - 1, lost))
    return made


def column(scheduler: AsyncColumnScheduler, name: str) -> int:
    held = scheduler._columns.table.of(name)
    assert held is not None
    number: int = held.number
    return number


@pytest.mark.parametrize("refused", [False, True])
def test_a_refused_step_counts_for_nothing_though_vllm_preempted_the_request_meanwhile(
    scheduler: AsyncColumnScheduler, refused: bool
) -> None:
    a, b = request("a"), request("b")
    for one in (a, b):
        scheduler.add_request(one)
    plan = scheduler.schedule()
    assert set(plan.num_scheduled_tokens) == {"a", "b"}
    lost = column(scheduler, "b")
    # What vLLM does while that step runs, if the next one finds no page.
    scheduler.running.remove(b)
    scheduler._preempt_request(b, time.monotonic())
    assert b.status == RequestStatus.PREEMPTED
    scheduler.schedule()
    reported = output(plan, "b", lost=(lost,)) if refused else output(plan)
    scheduler.update_from_output(plan, reported)
    assert list(a.output_token_ids) == [7]
    assert list(b.output_token_ids) == ([] if refused else [7])
    again = scheduler.schedule()
    # Not refused, it finds the block of 16 tokens that it left.
    assert again.num_scheduled_tokens["b"] == (20 if refused else 21 - 16)
    scheduler.update_from_output(again, output(again))
    assert list(b.output_token_ids) == [7] * (1 if refused else 2)


def test_a_refused_request_drops_the_step_and_the_one_in_flight(
    scheduler: AsyncColumnScheduler,
) -> None:
    b = request("b")
    scheduler.add_request(b)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"b": 1}
    scheduler.update_from_output(first, output(first, "b", lost=(column(scheduler, "b"),)))
    assert b.status == RequestStatus.PREEMPTED
    scheduler.update_from_output(second, output(second))
    assert list(b.output_token_ids) == []
    third = scheduler.schedule()
    scheduler.update_from_output(third, output(third))
    assert third.num_scheduled_tokens == {"b": 20} and list(b.output_token_ids) == [7]


def test_what_a_request_preempted_by_priority_was_to_write_is_not_lent(
    scheduler: AsyncColumnScheduler,
) -> None:
    """`a` is in the plan when `b`, which goes before it, finds no pages; both give way."""
    a, b, pool = request("a", 14, 5), request("b", 200, 3), scheduler.kv_cache_manager.block_pool
    held = []
    scheduler.add_request(a)
    for free, scheduled in ((15, {"a": 14}), (15, {"a": 1, "b": 48}), (1, {})):
        if scheduled == {"a": 1, "b": 48}:
            scheduler.add_request(b)
        if free == 1:
            held = pool.get_new_blocks(pool.get_num_free_blocks() - free)
        plan = scheduler.schedule()
        assert plan.num_scheduled_tokens == scheduled
        made = output(plan)
        made.sampled_token_ids = [[7] if name == "a" else [] for name in made.req_ids]
        scheduler.update_from_output(plan, made)
    assert {a.status, b.status} == {RequestStatus.PREEMPTED}
    pool.free_blocks(held)
    c = request("c", 20)
    c._all_token_ids[:16] = c.prompt_token_ids[:16] = a.all_token_ids
    scheduler.add_request(c)
    assert scheduler.schedule().num_scheduled_tokens["c"] == 20
