"""What all tests share: the small real model, and the rule for tests that need a GPU."""

import gc
from pathlib import Path

import pytest

import smollm2 as converter


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))


def pytest_collection_finish() -> None:
    """What imports made lives on: tests that collect their own garbage need not go through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, converted on first use and shared with the examples."""
    return converter.convert()
