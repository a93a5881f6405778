"""The wheel, alone in an environment with what it asks for, and its entry points."""

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.packaging.conftest import PARTS, ROOT, run


@pytest.fixture(scope="module")
def empty_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of a new environment into which nothing but the wheel was installed.

    The wheel takes any recent PyTorch; the release of these tests is asked for by number, since the
    newest one may be a build for GPUs of several gigabytes.
    """
    folder = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    torch = f"torch=={version('torch')}"
    run(python, "-m", "pip", "install", "--no-compile", "--progress-bar=off", wheel, torch)
    return python


def ask(python: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code away from the sources, with no path but the environment's own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return run(python, "-I", "-c", code, cwd=python.parent, env=env)


def test_it_holds_every_file_of_its_folders_and_nothing_else(wheel: Path) -> None:
    sources = {
        f"vllm_kv_columns/{part}/{path.relative_to(ROOT / folder)}"
        for part, folder in PARTS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == sources


def test_vllm_is_no_requirement_of_it(empty_environment: Path) -> None:
    code = "import importlib.util as u; print(u.find_spec('vllm'), u.find_spec('torch') is None)"
    assert ask(empty_environment, code).stdout.split() == ["None", "False"]


def test_the_stores_and_kernels_come_in_by_entry_point(empty_environment: Path) -> None:
    code = """if True:
        import json
        from importlib.metadata import entry_points
        from vllm_kv_columns.kv_manager import kernel_class, store_class
        entries = entry_points(group="vllm_kv_columns")
        found = {entry.name: entry.load().__name__ for entry in entries}
        classes = [store_class("host"), store_class("dense"), kernel_class("torch-sdpa")]
        print(json.dumps([found, [cls.__module__.rpartition(".")[0] for cls in classes]]))
    """
    found, packages = json.loads(ask(empty_environment, code).stdout)
    assert found == {
        "builtin_stores": "vllm_kv_columns.kv_manager.stores",
        "builtin_kernels": "vllm_kv_columns.attention_backend.kernels",
    }
    assert packages == [
        "vllm_kv_columns.kv_manager.stores",
        "vllm_kv_columns.kv_manager.stores",
        "vllm_kv_columns.attention_backend.cpu",
    ]


def test_without_vllm_register_changes_nothing_and_says_so(empty_environment: Path) -> None:
    code = """if True:
        import sys
        from importlib.metadata import entry_points
        (entry,) = entry_points(group="vllm.general_plugins")
        entry.load()()
        print(entry.name, entry.value, "vllm" in sys.modules)
    """
    done = ask(empty_environment, code)
    assert done.stdout.split() == ["kv_columns", "vllm_kv_columns.plugin:register", "False"]
    assert "vllm-kv-columns is inactive" in done.stderr
    assert "No module named 'vllm'" in done.stderr


def test_the_cache_works_on_its_own(empty_environment: Path) -> None:
    run(empty_environment, "-I", ROOT / "examples" / "standalone_cache.py")
