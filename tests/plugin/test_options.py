"""Options of the plugin: `--additional-config '{"kv_columns": {...}}'`."""

import re
from typing import Any

import pytest

from vllm_kv_columns.plugin.options import ColumnOptions


def test_the_defaults_need_no_section() -> None:
    assert ColumnOptions.parse({}, "cpu") == ColumnOptions()
    assert ColumnOptions.parse({"another_plugin": {"page_size": 1}}, "cpu") == ColumnOptions()


def test_options_are_read_from_their_section() -> None:
    options = ColumnOptions.parse({"kv_columns": {"page_size": 65536, "store": "tiny"}}, "cpu")
    assert (options.page_size, options.store) == (65536, "tiny")


def test_a_gpu_has_a_store_and_a_kernel_of_its_own() -> None:
    options = ColumnOptions.parse({"kv_columns": {"ahead_rows": 3}}, "cuda")
    assert (options.store, options.kernel, options.ahead_rows) == ("cuda-vmm", "triton", 3)
    assert options.page_size == 2 << 20


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"pagesize": 1, "page_size": 4096},
            "Unknown option 'pagesize' in kv_columns; known options: store, kernel, page_size, "
            "ahead_rows, spare_bytes, layers_per_region, retained, "
            "retain_seconds.",
        ),
        ({"page_size": "64k"}, "kv_columns.page_size must be of type int, got '64k'."),
        ({"page_size": True}, "kv_columns.page_size must be of type int, got True."),
        ({"store": 3}, "kv_columns.store must be of type str, got 3."),
        ({"page_size": 5000}, "must be a power of two and at least 4096 bytes, got 5000."),
        ({"page_size": 2048}, "must be a power of two and at least 4096 bytes, got 2048."),
        ({"spare_bytes": -1}, "kv_columns.spare_bytes must not be negative, got -1."),
        ([1], "kv_columns must be a JSON object of options, got [1]."),
    ],
    ids=[
        "unknown",
        "text",
        "boolean",
        "store",
        "not a power of two",
        "below a page",
        "negative",
        "list",
    ],
)
def test_bad_options_are_named(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ColumnOptions.parse({"kv_columns": section}, "cpu")
