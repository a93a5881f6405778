"""Engines in processes of their own, and the prompts that they share."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugin import tiny_models

ENGINE = Path(__file__).with_name("engine.py")
Job = dict[str, Any]
Result = dict[str, Any]

LENGTHS = [5, 63, 111, 242, 17, 130, 200, 90, 64, 65, 1, 33, 180, 77, 150, 240]
"""Sixteen uneven prompts, up to almost four windows of the tiny models long."""

GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Run one job; an equal job is run once per session."""
    folder = tmp_path_factory.mktemp("engines")
    done: dict[str, Result] = {}

    def run(llm: Job, runs: list[Job], *, fault: str | None = None, plugin: bool = True) -> Result:
        text = json.dumps({"llm": llm, "runs": runs, "fault": fault}, sort_keys=True)
        key = f"{plugin}{text}"
        if key not in done:
            path = folder / f"{len(done)}.json"
            path.write_text(text)
            env = {**os.environ, **({} if plugin else {"VLLM_PLUGINS": "none"})}
            log = path.with_suffix(".log")
            with log.open("w") as out:
                code = subprocess.run(
                    [sys.executable, str(ENGINE), str(path)], stdout=out, stderr=out, env=env
                ).returncode
            assert code == 0, f"the engine failed:\n{log.read_text()[-6000:]}"
            done[key] = json.loads(path.with_suffix(".out.json").read_text())
        return done[key]

    return run


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
