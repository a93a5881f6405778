"""Planning runs where neither torch nor vLLM is imported."""

import subprocess
import sys

import pytest

PLANNING = ("config", "errors", "geometry", "planner", "pages", "cache", "hooks")


def loaded_by(code: str) -> set[str]:
    """Names of the given two that a fresh interpreter has loaded after ``code``."""
    code += "\nimport sys; print(*sorted({'torch', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_planning_modules_bring_neither_torch_nor_vllm() -> None:
    package = "vllm_kv_columns.kv_manager"
    lines = [f"import {package}", *(f"import {package}.{name}" for name in PLANNING)]
    assert loaded_by("\n".join(lines)) == set()


def test_stores_bring_torch_and_not_vllm() -> None:
    assert loaded_by("from vllm_kv_columns.kv_manager import HostStore, StepTables") == {"torch"}


def test_every_public_name_is_there_and_others_are_not() -> None:
    from vllm_kv_columns import kv_manager

    for name in kv_manager.__all__:
        assert getattr(kv_manager, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'HipStore'"):
        _ = kv_manager.HipStore
