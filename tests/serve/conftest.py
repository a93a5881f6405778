"""A server on columns in vLLM's default multi-process mode, started once for the tests of a module.

On the CPU that mode is spawn: vLLM's platform sets VLLM_WORKER_MULTIPROC_METHOD itself and leaves
no other choice.
"""

import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from vllm_kv_columns.bench.server import Server, serving

MODEL = "smollm2"
ARGUMENTS = [
    *("--attention-backend", "SDPA_VARLEN"),
    *("--served-model-name", MODEL),
    *("--dtype", "float32"),  # texts do not depend on which requests share a step
    *("--max-model-len", "1024"),
    *("--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", str(512 << 20)),
    # What ended sequences computed is kept as long as something runs, and no longer.
    *("--additional-config", '{"kv_columns": {"retain_seconds": 0}}'),
    "--enforce-eager",  # saves half a minute at start; torch.compile is tested with the plugin
]


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    with serving(smollm2, *ARGUMENTS) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client


@pytest.fixture(scope="module")
def floor(client: OpenAI, server: Server) -> int:
    """Resident bytes of the idle store, after a first request has warmed everything up."""
    client.completions.create(model=MODEL, prompt="Hello", max_tokens=4)
    return settled(server.kv_resident_bytes)


def metric(server: Server, name: str, label: str = "") -> float:
    """The value of one metric, summed over its labels, or over those with one as in `state="free"`.

    Raises:
        AssertionError: there is none.
    """
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
        text = answer.read().decode()
    sample = rf"^{re.escape(name)}(?:{{.*{re.escape(label)}.*}})? (\S+)$"
    values = re.findall(sample, text, re.MULTILINE)
    assert values, f"/metrics has no {name}"
    return sum(map(float, values))


def settled(read: Callable[[], int], quiet: float = 1.0) -> int:
    """A reading once it has not changed for `quiet` seconds."""
    last, since = read(), time.monotonic()
    while time.monotonic() - since < quiet:
        time.sleep(0.05)
        if (now := read()) != last:
            last, since = now, time.monotonic()
    return last


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
