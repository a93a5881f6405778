"""Engines in processes of their own, and the prompts that they share."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plugin import tiny_models
from tests.plugin.forks import Forks

ENGINE = ["-m", "tests.plugin.engine"]
Job = dict[str, Any]
Result = dict[str, Any]

LENGTHS = [5, 63, 111, 242, 17, 130, 200, 90, 64, 65, 1, 33, 180, 77, 150, 240]
"""Sixteen uneven prompts, up to almost four windows of the tiny models long."""

GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


def logprob_gaps(ours: Result, stock: Result, run: int = 0, stock_run: int = 0) -> list[float]:
    """|ours - stock| of every token that both list as likely, of all prompts of a run."""
    return [
        abs(mine[token] - theirs[token])
        for a, b in zip(ours["runs"][run], stock["runs"][stock_run], strict=True)
        for mine, theirs in zip(a[0]["logprobs"], b[0]["logprobs"], strict=True)
        for token in mine.keys() & theirs.keys()
    ]


def tokens(result: Result, run: int = 0) -> list[list[list[int]]]:
    """Token ids of every completion of every prompt of a run."""
    return [[completion["tokens"] for completion in request] for request in result["runs"][run]]


TIE = 1e-4
"""Log-probabilities this close in float32 may change places when a sum has another order."""


def same_but_for_a_tie(answer: list[int], other: list[int], likely: list[dict[str, float]]) -> bool:
    """Whether two answers have the same tokens; if not, assert that they part at a tie.

    Args:
        likely: at each step of `other`, log-probabilities of its likeliest tokens.
    """
    if answer == other:
        return True
    at = next(i for i, pair in enumerate(zip(answer, other, strict=True)) if len({*pair}) > 1)
    gap = likely[at][str(other[at])] - likely[at].get(str(answer[at]), float("-inf"))
    assert gap < TIE, (at, answer[at], likely[at])
    return False


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    made = Forks(tmp_path_factory.mktemp("forks") / "forks.log")
    yield made
    made.close()


@pytest.fixture(scope="session")
def run_engine(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[..., Result]:
    """Run one job; an equal job is run once per session. May be called from several threads.

    On the CPU the engine is a fork of a process that has imported vLLM. On a GPU, whose driver may
    not be forked, it is a process that imports vLLM itself.
    """
    folder = tmp_path_factory.mktemp("engines")
    done: dict[str, Result] = {}
    locks: dict[str, threading.Lock] = {}

    def run(
        llm: Job,
        runs: list[Job],
        *,
        fault: str | None = None,
        plugin: bool = True,
        weights: str | None = None,
        env: dict[str, str] | None = None,
        events: bool = False,
    ) -> Result:
        job = {"llm": llm, "runs": runs, "fault": fault, "weights": weights, "events": events}
        text = json.dumps(job, sort_keys=True)
        key = f"{plugin}{env}{text}"
        with locks.setdefault(key, threading.Lock()):
            if key not in done:
                path = folder / f"{list(locks).index(key)}.json"
                path.write_text(text)
                variables = {**({} if plugin else {"VLLM_PLUGINS": "none"}), **(env or {})}
                if torch.cuda.is_available():
                    done[key] = run_process(ENGINE, path, variables)
                else:
                    forks: Forks = request.getfixturevalue("forks")
                    done[key] = result_of(path, forks.run(path, variables))
        return done[key]

    return run


def run_process(program: list[str], path: Path, env: dict[str, str] | None = None) -> Result:
    """What Python's program makes of the job in the file, from FILE.out.json beside it."""
    environment = {**os.environ, **(env or {})}
    with path.with_suffix(".log").open("w") as out:
        code = subprocess.run(
            [sys.executable, *program, str(path)], stdout=out, stderr=out, env=environment
        ).returncode
    return result_of(path, code)


def result_of(path: Path, code: int) -> Result:
    """What the engine of the job in the file has left beside it, if its status says that it did."""
    assert code == 0, f"the engine failed:\n{path.with_suffix('.log').read_text()[-6000:]}"
    result: Result = json.loads(path.with_suffix(".out.json").read_text())
    return result


@pytest.fixture(scope="session")
def gemma3_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.gemma3_like(tmp_path_factory.mktemp("gemma3_like"))


@pytest.fixture(scope="session")
def mistral_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.mistral_like(tmp_path_factory.mktemp("mistral_like"))


@pytest.fixture(scope="session")
def smollm2_prompts(smollm2: Path) -> list[list[int]]:
    """Sixteen pieces of running text, of `LENGTHS` tokens."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(smollm2)(topics["class"] + topics["try"])["input_ids"]
    return [ids[37 * i : 37 * i + n] for i, n in enumerate(LENGTHS)]
