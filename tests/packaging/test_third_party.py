"""A store that comes from another distribution, found by its entry point and used by its name."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.packaging.conftest import run

SOURCE = Path(__file__).with_name("third_party")

CODE = """
import json
from vllm_kv_columns.kv_manager import (
    BatchedSequenceCache, CacheConfig, CacheGeometry, FlatPolicy, LayerGroup, store_class
)

group = LayerGroup("all", ("layer",), FlatPolicy(), 1, 64, "float32")
config = CacheConfig(
    max_seqs=2, capacity=64, max_write=8, groups=(group,), page_size=4096, budget_bytes=1 << 20
)
store = store_class("tiny")(CacheGeometry.of(config))
cache = BatchedSequenceCache(config, store)
col = cache.seq_new()
cache.declare_step([col] * 5)
cache.prepare_step()
view = store.layer_view("layer")
view[:5, col] = 7
cache.commit_step()
print(json.dumps({
    "module": type(store).__module__,
    "known": [store_class(name).__name__ for name in ("host", "dense")],
    "asked": store.asked[-1],
    "rows": view[:6, col, 0, 0, 0].tolist(),
    "column": col,
    "length": cache.pos(col),
}))
store.close()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the other distribution in it, installed by pip."""
    source, target = tmp_path_factory.mktemp("source") / "tiny", tmp_path_factory.mktemp("target")
    shutil.copytree(SOURCE, source)
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "--target", target]
    run(sys.executable, "-m", "pip", "install", *options, source)
    return target


def test_a_store_of_another_distribution_serves_a_cache(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    result = json.loads(run(sys.executable, "-c", CODE, env=env, cwd=tmp_path).stdout)
    assert result["module"] == "tiny_columns"
    assert result["known"] == ["HostStore", "DenseStore"]
    assert result["asked"] == [result["column"], 0, 5]
    assert result["rows"] == [7, 7, 7, 7, 7, 0]
    assert result["length"] == 5


def test_without_it_the_name_is_unknown(tmp_path: Path) -> None:
    code = (
        "from vllm_kv_columns.kv_manager import ConfigError, store_class\n"
        "try: store_class('tiny')\n"
        "except ConfigError as error: print(error)"
    )
    message = run(sys.executable, "-c", code, cwd=tmp_path).stdout
    assert message.strip() == "unknown store 'tiny'; known are: cuda-vmm, dense, host"
