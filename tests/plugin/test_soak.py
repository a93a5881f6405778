"""A while of everything at once: no error, no wrong token, and every page accounted for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.conftest import Job, Result

SECONDS = float(os.environ.get("KV_COLUMNS_SOAK_SECONDS", "10"))
"""Of traffic; set it to 1200 for the soak that a release has."""
TIE = 1e-4
"""Log-probabilities this close in float32 may change places when a sum has another order."""
GIB = 1 << 30


def soaked(job: Job, folder: Path) -> Result:
    path = folder / "soak.json"
    path.write_text(json.dumps(job))
    log = path.with_suffix(".log")
    with log.open("w") as out:
        code = subprocess.run(
            [sys.executable, "-m", "tests.plugin.soak", str(path)], stdout=out, stderr=out
        ).returncode
    assert code == 0, f"the soak failed:\n{log.read_text()[-6000:]}"
    result: Result = json.loads(path.with_suffix(".out.json").read_text())
    return result


def check(result: Result, spare_bytes: int) -> None:
    counts, pages, store = result["counts"], result["pages"], result["store"]
    asked_again = len(result["answers"])
    assert counts["finished"] + counts["aborted"] == counts["requests"] - asked_again
    assert min(counts.values()) > 0 and result["preemptions"] > 0 and result["prefix_hits"] > 0
    assert pages["free"] == pages["unused"] == pages["budget"] and pages["withheld"] == 0
    assert pages["free_columns"] == pages["columns"] and pages["users"] == 0
    scratch = pages["scratch_pages"]
    assert store["committed_pages"] == scratch
    assert store["resident_bytes"] <= scratch * pages["page_size"] + spare_bytes
    assert result["answers"]
    for answer in result["answers"]:
        same_but_for_a_tie(answer)


def same_but_for_a_tie(answer: dict[str, Any]) -> None:
    tokens, again = answer["tokens"], answer["again"]
    if tokens != again:
        at = next(i for i, pair in enumerate(zip(tokens, again, strict=True)) if len({*pair}) > 1)
        likely = answer["likely"][at]
        gap = likely[str(again[at])] - likely.get(str(tokens[at]), float("-inf"))
        assert gap < TIE, (at, tokens[at], likely)


def test_on_the_cpu(gemma3_like: Path, tmp_path: Path) -> None:
    job = {
        "llm": {
            "model": str(gemma3_like),
            "load_format": "dummy",
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "attention_backend": "SDPA_VARLEN",
            "enable_prefix_caching": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "kv_cache_memory_bytes": 80 * 256 * 1024,
        },
        "weights": "random",
        "seconds": SECONDS,
        "seed": 5,
        "vocabulary": 500,
        "longest": 250,
        "neighbour": 0,
    }
    check(soaked(job, tmp_path), spare_bytes=0)


@pytest.mark.gpu
def test_on_a_gpu(smollm2: Path, tmp_path: Path) -> None:
    """Beside a neighbour that takes 60 GiB and gives them back, again and again."""
    job = {
        "llm": {
            "model": str(smollm2),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "attention_backend": "SDPA_VARLEN",
            "enable_prefix_caching": True,
            "max_model_len": 2048,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 4096,
            "gpu_memory_utilization": 0.3,
            "kv_cache_memory_bytes": 6 * GIB,
        },
        "seconds": SECONDS,
        "seed": 5,
        "vocabulary": 40_000,
        "longest": 2000,
        "neighbour": 60 * GIB,
    }
    check(soaked(job, tmp_path), spare_bytes=256 << 20)
