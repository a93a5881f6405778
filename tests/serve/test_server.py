"""vLLM's API server on columns, in several processes, seen through its clients."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.serve.conftest import MODEL, metric, settled, within
from vllm_kv_columns.bench.children import load_server
from vllm_kv_columns.bench.process import ChildError
from vllm_kv_columns.bench.server import Server
from vllm_kv_columns.bench.workloads import Load

STORY = (
    "Once upon a time there was a lighthouse keeper who counted the ships that passed at night. "
    "He wrote their names into a large book, one line for each, and the weather beside them. "
)
ENDINGS = (
    "The largest planet in the solar system is",
    "The chemical symbol for water is",
    "The recipe for bread begins with",
    "The keeper's dog was called",
    "On the last night of the year he saw",
    "The first ship of the spring was",
    "The capital of Italy is the city of",
    "His favourite song was about",
)
CLIENTS = len(ENDINGS)
PROMPTS = [STORY * repeats + ending for repeats, ending in enumerate(ENDINGS)]
"""From a handful of tokens to a few hundred."""


def text(client: OpenAI, prompt: str) -> str:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0)
    return answer.choices[0].text


def streamed_text(client: OpenAI, prompt: str) -> str:
    pieces = [
        chunk.choices[0].text
        for chunk in client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=24, temperature=0, stream=True
        )
    ]
    assert len(pieces) > 2, "the answer came in one piece"
    return "".join(pieces)


@pytest.fixture(scope="module")
def sequential(client: OpenAI) -> list[str]:
    """The answers when one request runs at a time."""
    return [text(client, prompt) for prompt in PROMPTS]


@pytest.fixture
def load(client: OpenAI) -> Iterator[Callable[[], bool]]:
    """Eight requests of 64 tokens each; called, it says whether all are still running."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        running: list[Future[object]] = [
            pool.submit(
                client.completions.create,
                model=MODEL,
                prompt=prompt,
                max_tokens=64,
                extra_body={"ignore_eos": True},
            )
            for prompt in PROMPTS
        ]
        yield lambda: not any(request.done() for request in running)
        for request in running:
            request.result()


def test_the_engine_and_its_worker_run_in_spawned_processes(server: Server) -> None:
    """A new program each, not a copy of the API server: what their own environment began with."""
    method = b"VLLM_WORKER_MULTIPROC_METHOD=spawn"
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.processes()}
    engine = [pid for pid, title in titles.items() if title.startswith(b"VLLM::")]
    assert len(engine) == 2
    assert all(method in Path(f"/proc/{pid}/environ").read_bytes() for pid in engine)


@pytest.mark.parametrize("ask", [text, streamed_text], ids=["whole", "streamed"])
def test_concurrent_answers_are_those_of_one_request_at_a_time(
    client: OpenAI, sequential: list[str], ask: Callable[[OpenAI, str], str]
) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda prompt: ask(client, prompt), PROMPTS))
    assert answers == sequential
    assert len(set(answers)) == CLIENTS


def test_a_streamed_chat(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name the first three planets of the solar system."}],
        max_tokens=40,
        temperature=0,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert len(pieces) > 4
    assert "Mercury, Venus, and Earth" in "".join(pieces)


def test_usage_and_resident_memory_follow_the_load(
    server: Server, floor: int, load: Callable[[], bool]
) -> None:
    assert floor > 0, "the scratch column is backed from the start"
    usage, resident = [], []
    while load():
        usage.append(metric(server, "vllm:kv_cache_usage_perc"))
        resident.append(server.kv_resident_bytes())
        time.sleep(0.1)
    assert metric(server, "vllm:num_requests_running") <= CLIENTS
    assert 0 < max(usage) <= 1
    assert max(resident) > floor


def test_the_metrics_of_the_columns_follow_the_load_and_come_back(
    server: Server, floor: int, load: Callable[[], bool]
) -> None:
    def column_metric(name: str, label: str = "") -> float:
        return metric(server, f"vllm:kv_columns_{name}", label)

    mapped = column_metric("mapped_pages_total")
    committed, running, shared = [], [], []
    while load():
        committed.append(column_metric("committed_bytes"))
        running.append(column_metric("columns", 'state="running"'))
        shared.append(column_metric("shared_bytes"))
        time.sleep(0.1)
    assert max(committed) > floor and 1 <= max(running) <= CLIENTS
    assert column_metric("clones_total") > 0, "the prompts begin alike"
    assert 0 < max(shared) < max(committed)
    assert column_metric("mapped_pages_total") > mapped
    assert column_metric("refused_growths_total") == column_metric("evictions_total") == 0
    # Nothing has run since the last step, and what was retained is gone for all that.
    assert within(1, lambda: column_metric("committed_bytes") == floor)
    assert server.kv_resident_bytes() == floor
    assert column_metric("retained_bytes") == column_metric("shared_bytes") == 0
    assert column_metric("spare_bytes") == 0, "on the CPU everything goes back at once"
    columns = 8 + 3 * 8  # the retained ones are three for each sequence
    assert column_metric("columns", 'state="free"') == column_metric("columns") == columns


def test_memory_is_back_at_the_floor_a_second_after_the_last_request(
    server: Server, client: OpenAI, floor: int
) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda prompt: text(client, prompt), PROMPTS))
    assert within(1, lambda: server.kv_resident_bytes() == floor)
    assert metric(server, "vllm:num_requests_running") == 0
    assert metric(server, "vllm:kv_cache_usage_perc") == 0


def test_a_client_that_hangs_up_frees_its_memory(
    server: Server, client: OpenAI, floor: int
) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPTS[-1],
        max_tokens=500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _, _chunk in zip(range(5), stream, strict=False):
        pass
    assert server.kv_resident_bytes() > floor
    stream.close()
    assert within(3, lambda: server.kv_resident_bytes() == floor)
    assert metric(server, "vllm:num_requests_running") == 0


def test_a_prompt_that_is_too_long_is_refused_and_the_server_goes_on(
    server: Server, client: OpenAI, floor: int, sequential: list[str]
) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens"):
        text(client, STORY * 100)
    assert text(client, PROMPTS[0]) == sequential[0]
    assert settled(server.kv_resident_bytes) == floor


def test_the_load_of_the_benchmark_is_served(server: Server, smollm2: Path) -> None:
    loads = [Load(20, 5, 16, 4), Load(5, 3, 24, 2)]
    first, second = load_server(server.url, str(smollm2), loads, 200, lambda row: None, name=MODEL)
    assert (first["completed"], first["failed"], first["rate"]) == (5, 0, 20)
    assert 0 < first["itl_ms_mean"] <= first["itl_ms_p99"]
    assert 0 < first["ttft_ms_mean"] <= first["ttft_ms_p99"]
    assert first["output_tokens_per_s"] == pytest.approx(5 * 4 / first["seconds"])
    assert second["total_tokens_per_s"] == pytest.approx(3 * (24 + 2) / second["seconds"])


def test_a_load_that_is_refused_is_an_error(server: Server, smollm2: Path) -> None:
    with pytest.raises(ChildError, match="server: 0 of 2 requests came to an end at 9/s"):
        load_server(
            server.url, str(smollm2), [Load(9, 2, 9, 2)], 200, lambda row: None, name="nobody"
        )


def test_sigterm_in_the_middle_of_a_request_leaves_no_process(
    server: Server, client: OpenAI
) -> None:
    """The last test of a server: it ends it. vLLM then waits for its clients to hang up."""
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPTS[1],
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert len(server.processes()) >= 3, "API server, engine, worker"
    os.kill(server.process.pid, signal.SIGTERM)
    stream.close()
    assert server.process.wait(30) == 0
    assert within(5, lambda: server.processes() == [])
