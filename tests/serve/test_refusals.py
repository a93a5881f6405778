"""What cannot be served ends the server at its start, with one sentence that says why."""

from pathlib import Path

import pytest

from vllm_kv_columns.bench.server import ServerStartError, serving

REFUSED = {
    "quantized cache": (
        ["--kv-cache-dtype", "fp8"],
        "SDPA_VARLEN does not support --kv-cache-dtype fp8: columns store K and V in the model's "
        "dtype; use --kv-cache-dtype auto.",
    ),
    "unknown option": (
        ["--additional-config", '{"kv_columns": {"pagesize": 1}}'],
        "Unknown option 'pagesize' in kv_columns; known options: store, kernel, page_size, "
        "ahead_rows, spare_bytes, layers_per_region, retained, retain_seconds.",
    ),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.values(), ids=REFUSED)
def test_the_server_does_not_start(smollm2: Path, arguments: list[str], sentence: str) -> None:
    backend = ["--attention-backend", "SDPA_VARLEN"]
    with (
        pytest.raises(ServerStartError, match="The server ended with status 1:") as refusal,
        serving(smollm2, *backend, *arguments),
    ):
        pass
    assert sum(sentence in line for line in refusal.value.log) == 1
