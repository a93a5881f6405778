"""The columns' numbers, from what counts them to vLLM's loggers in the front end."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.plugin.configured import configure, made_scheduler
from vllm_kv_columns.kv_manager.stores.usage import StoreUsage
from vllm_kv_columns.plugin import metrics
from vllm_kv_columns.plugin.options import SECTION
from vllm_kv_columns.plugin.report import UsageReport, attach_usage
from vllm_kv_columns.plugin.scheduler import ColumnScheduler
from vllm_kv_columns.plugin.usage_stats import Payload

PAGE = 256 * 1024
COLUMNS = 8
"""Two for running sequences, and three retained ones for each."""


def tiny(model: Path, **arguments: Any) -> Any:
    return configure(
        model,
        served_model_name="tiny",
        max_model_len=256,
        max_num_seqs=2,
        enable_prefix_caching=True,
        additional_config={"kv_columns": {"retain_seconds": 1}},
        **arguments,
    )


@pytest.fixture(scope="module")
def config(mistral_like: Path) -> Any:
    return tiny(mistral_like)


@pytest.fixture
def scheduler(config: Any) -> ColumnScheduler:
    made: ColumnScheduler = made_scheduler(ColumnScheduler, config, 16, log_stats=True)
    return made


def request(name: str, max_tokens: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    params.update_from_generation_config({}, eos_token_id=2)
    return Request(name, list(range(20)), params, pooling_params=None)


def step(scheduler: ColumnScheduler, usage: UsageReport | None) -> Payload | None:
    """A step whose output comes with the worker's report; what the front end gets."""
    plan: SchedulerOutput = scheduler.schedule()
    names = list(plan.num_scheduled_tokens)
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[7] for _ in names],
    )
    if usage is not None:
        attach_usage(output, usage)
    (outputs,) = scheduler.update_from_output(plan, output).values()
    payload: Payload | None = outputs.scheduler_stats.kv_connector_stats
    return payload


def used(committed: int, spare: int = 0, mapped: int = 0, refused: int = 0) -> UsageReport:
    return UsageReport(StoreUsage(committed, spare, 4, mapped, mapped // 2), refused)


def test_bytes_and_columns_follow_the_requests(scheduler: ColumnScheduler) -> None:
    scheduler.add_request(request("a", max_tokens=2))
    first = step(scheduler, used(2, spare=9, mapped=4))
    assert first is not None and "emptied" not in first[SECTION]
    assert first[SECTION]["gauges"] == {
        "bytes": {"committed": 2 * PAGE, "shared": 0, "retained": 0, "spare": 9 * PAGE},
        "columns": {"running": 1, "retained": 0, "free": COLUMNS - 1},
    }
    last = step(scheduler, None)  # a worker whose numbers stay the same does not send them
    assert last is not None and "emptied" not in last[SECTION], "no worker has heard of the end"
    assert last[SECTION]["gauges"] == {
        "bytes": {"committed": 2 * PAGE, "shared": 0, "retained": PAGE, "spare": 9 * PAGE},
        "columns": {"running": 0, "retained": 1, "free": COLUMNS - 1},
    }
    last = step(scheduler, None)
    assert last is not None
    assert last[SECTION]["gauges"]["bytes"]["spare"] == 4 * PAGE
    assert last[SECTION]["emptied"] == {
        "bytes": {"committed": PAGE, "shared": 0, "retained": 0, "spare": 4 * PAGE},
        "columns": {"running": 0, "retained": 0, "free": COLUMNS},
    }


def test_counters_send_what_was_added(scheduler: ColumnScheduler) -> None:
    scheduler.add_request(request("a", max_tokens=9))
    first = step(scheduler, used(2, mapped=4))
    assert first is not None
    assert first[SECTION]["added"] == {
        "mapped_pages": 4,
        "unmapped_pages": 2,
        "clones": 0,
        "adoptions": 0,
        "evictions": 0,
        "refused_growths": 0,
    }
    scheduler.add_request(request("b"))
    second = step(scheduler, used(3, mapped=6, refused=2))
    assert second is not None
    added = second[SECTION]["added"]
    assert (added["mapped_pages"], added["clones"], added["refused_growths"]) == (2, 1, 2)
    assert second[SECTION]["gauges"]["columns"]["retained"] == 1
    third = step(scheduler, None)
    assert third is None, "nothing has changed"


def test_a_column_that_changes_hands_is_adopted_and_one_that_gives_way_evicted(
    scheduler: ColumnScheduler,
) -> None:
    scheduler.add_request(request("a"))
    step(scheduler, used(2))
    scheduler.add_request(request("b"))
    payload = step(scheduler, used(2))
    assert payload is not None
    assert payload[SECTION]["added"]["adoptions"] == 1
    assert scheduler._columns.table.evict()
    payload = step(scheduler, used(1))
    assert payload is not None and payload[SECTION]["added"]["evictions"] == 1


def test_forgetting_all_prefixes_is_no_eviction(scheduler: ColumnScheduler) -> None:
    scheduler.add_request(request("a"))
    step(scheduler, used(2))
    assert scheduler.reset_prefix_cache()
    payload = step(scheduler, used(1))
    assert payload is not None and payload[SECTION]["added"]["evictions"] == 0
    assert payload[SECTION]["gauges"]["columns"] == {"running": 0, "retained": 0, "free": COLUMNS}


def test_the_numbers_reach_the_front_end(scheduler: ColumnScheduler) -> None:
    scheduler.add_request(request("a"))
    payload = step(scheduler, used(2, mapped=4))
    sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=payload))
    got = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    assert got.scheduler_stats.kv_connector_stats == payload


# The front end.


@pytest.fixture
def prometheus() -> Iterator[Callable[[Any], PrometheusStatLogger]]:
    """Loggers of two engines; what they registered goes with the test."""
    yield lambda config: PrometheusStatLogger(config, [0, 1])
    unregister_vllm_metrics()


def numbers(committed: int, running: int, mapped: int = 0, **more: Any) -> SchedulerStats:
    gauges = {
        "bytes": {"committed": committed, "shared": 1, "retained": 2, "spare": 3},
        "columns": {"running": running, "retained": 1, "free": 5},
    }
    added = dict.fromkeys(metrics.COUNTERS, 0) | {"mapped_pages": mapped}
    return SchedulerStats(kv_connector_stats={SECTION: {"gauges": gauges, "added": added, **more}})


def shown(name: str, engine: int = 0, **labels: str) -> float | None:
    labels |= {"model_name": "tiny", "engine": str(engine)}
    return REGISTRY.get_sample_value(metrics.PREFIX + name, labels)


def test_metrics_are_shown_for_each_engine(
    config: Any, prometheus: Callable[[Any], PrometheusStatLogger]
) -> None:
    prometheus(config)
    logger = prometheus(config)  # a second front end in the process replaces the first
    assert shown("committed_bytes") is None, "nothing is known before the first step"
    assert shown("clones_total") == 0
    logger.record(numbers(700, running=2, mapped=5), None, engine_idx=0)
    logger.record(numbers(900, running=3, mapped=1), None, engine_idx=1)
    logger.record(numbers(800, running=1, mapped=2), None, engine_idx=0)
    assert (shown("committed_bytes"), shown("committed_bytes", 1)) == (800, 900)
    assert [shown(f"{name}_bytes") for name in ("shared", "retained", "spare")] == [1, 2, 3]
    assert [shown("columns", state=s) for s in ("running", "retained", "free")] == [1, 1, 5]
    assert (shown("mapped_pages_total"), shown("mapped_pages_total", 1)) == (7, 1)
    logger.record(SchedulerStats(), None, engine_idx=0)
    assert shown("committed_bytes") == 800


def test_the_emptied_columns_are_shown_when_nothing_has_run_for_a_while(
    config: Any, prometheus: Callable[[Any], PrometheusStatLogger]
) -> None:
    logger = prometheus(config)
    emptied = {
        "bytes": {"committed": 10, "shared": 0, "retained": 0, "spare": 0},
        "columns": {"running": 0, "retained": 0, "free": 6},
    }
    begin = time.monotonic()
    logger.record(numbers(700, running=0, emptied=emptied), None, engine_idx=0)
    logger.record(numbers(700, running=0, emptied=emptied), None, engine_idx=1)
    logger.record(numbers(900, running=1), None, engine_idx=1)  # goes on before that time
    assert (shown("committed_bytes"), shown("columns", state="retained")) == (700, 1)
    while shown("committed_bytes") != 10:
        assert time.monotonic() - begin < 10
        time.sleep(0.02)
    assert time.monotonic() - begin >= 1
    assert [shown("columns", state=s) for s in ("running", "retained", "free")] == [0, 0, 6]
    time.sleep(0.2)
    assert shown("committed_bytes", 1) == 900


def test_the_log_says_nothing_of_kv_transfer(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    logger = LoggingStatLogger(config)
    logger.record(numbers(700, running=2), None)
    with caplog.at_level(logging.INFO, "vllm"):
        logger.log()
    assert "transfer" not in caplog.text


def test_another_backend_shows_none(
    mistral_like: Path, prometheus: Callable[[Any], PrometheusStatLogger]
) -> None:
    logger = prometheus(tiny(mistral_like, attention_backend=None))
    logger.record(SchedulerStats(), None)
    text = generate_latest().decode()
    assert "vllm:kv_cache_usage_perc" in text
    assert metrics.PREFIX not in text
