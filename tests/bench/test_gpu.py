"""On a device: every backend that is found there is right on small steps, and its time is sane."""

import pytest
import torch

from vllm_kv_columns.bench.kernels import BACKENDS, make_backend, run
from vllm_kv_columns.bench.machine import describe
from vllm_kv_columns.bench.shapes import Shape

pytestmark = pytest.mark.gpu

STEPS = (
    Shape("decode", "decode", ((1, 1000), (1, 77), (1, 4096)), layers=3),
    Shape("ring", "decode", ((1, 5000), (1, 301)), window=256, layers=3),
    Shape("verify", "verify", ((5, 900),) * 4, layers=3),
    Shape("prefill", "prefill", ((700, 700), (9, 9)), layers=3),
    Shape("windowed-prefill", "prefill", ((2000, 2000),), window=300, layers=3),
    Shape("mixed", "mixed", ((1, 40), (1, 1700), (600, 900)), layers=3),
    Shape("one-head", "decode", ((1, 1000), (1, 77)), heads=1, group=8, layers=3),
    Shape("in-model", "step", ((1, 160), (1, 900)), layers=8),
    Shape("d64-g8", "prefill", ((600, 600),), heads=8, group=8, head_size=64, layers=3),
    Shape("d256-g2", "prefill", ((600, 600),), heads=4, group=2, head_size=256, layers=3),
)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_right_on_the_device(name: str) -> None:
    device, backend = torch.device("cuda", 0), make_backend(name)
    reason = backend.obstacle(device)
    if reason is not None:
        assert name != "ours", reason
        pytest.skip(reason)
    results = run(STEPS, [backend], device, seconds=0.01)
    failures = {result.shape.name: result.figures[name].failure for result in results}
    assert {of: failure for of, failure in failures.items() if failure} == {}
    for result in results:
        us = result.us(name)
        assert us is not None
        assert us > 1  # microseconds: less than one launch would mean that nothing ran


def test_the_header_has_the_driver() -> None:
    assert describe(torch.device("cuda", 0))["driver"]
