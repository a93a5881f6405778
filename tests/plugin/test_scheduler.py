"""The scheduler's side of a step whose output reports that memory was short."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kv_columns.plugin import patches, spec
from vllm_kv_columns.plugin.report import MemoryReport, attach_report
from vllm_kv_columns.plugin.scheduler import AsyncColumnScheduler

LAYER = "model.layers.0.self_attn.attn"
PAGES = 16


@pytest.fixture(scope="module")
def config(mistral_like: Path) -> Any:
    patches.install()
    return EngineArgs(
        model=str(mistral_like),
        attention_backend="SDPA_VARLEN",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=4,
        async_scheduling=True,
        enable_prefix_caching=True,
    ).create_engine_config()


@pytest.fixture
def scheduler(config: Any) -> AsyncColumnScheduler:
    stock = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        spec.register()
        (column_spec,) = spec.column_specs({LAYER: stock}, config).values()
        cache = KVCacheConfig(PAGES, [], [KVCacheGroupSpec([LAYER], column_spec)])
        config.cache_config.num_gpu_blocks = PAGES
        init_none_hash(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo))
        return AsyncColumnScheduler(
            config, cache, StructuredOutputManager(config), column_spec.block_size
        )


def request(name: str) -> Request:
    params = SamplingParams(max_tokens=8, temperature=0)
    params.update_from_generation_config({}, eos_token_id=2)
    return Request(name, list(range(ord(name), ord(name) + 20)), params, pooling_params=None)


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
