"""The wheel, built once from a copy of the sources, and environments that hold it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = {  # folder of each part of the package
    "plugin": "plugin",
    "attention_backend": "attention_backend",
    "kv_manager": "kv_manager",
    "bench": "examples/bench",
}


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command; its output is part of the failure when it fails."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sources as they are. Built in a copy: setuptools leaves its work behind."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for folder in PARTS.values():
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=without)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source)
    (built,) = out.glob("*.whl")
    return built
