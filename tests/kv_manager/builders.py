"""Small, odd configurations and plain helpers that the tests of this folder share."""

from typing import Any, ClassVar

import torch

from vllm_kv_columns.kv_manager import (
    BatchedSequenceCache,
    CacheConfig,
    CacheGeometry,
    ColumnStore,
    CudaVmmStore,
    DenseStore,
    FlatPolicy,
    HostStore,
    LayerGroup,
    RingPolicy,
)

from .fake_driver import FakeDriver

PAGE = 4096


class SmallDenseStore(DenseStore):
    """Grows often enough for small tests to see it."""

    GROWTH_ROWS: ClassVar[int] = 3


class FakeCudaStore(CudaVmmStore):
    """Over a device that has always finished its work; takes released pages away at once."""

    def __init__(self, geometry: CacheGeometry) -> None:
        super().__init__(geometry, driver=FakeDriver(), spare_bytes=0)

    def release(self, col: int) -> None:
        super().release(col)
        self.trim()

    def shrink(self, col: int, length: int) -> None:
        super().shrink(col, length)
        self.trim()

    def clone(self, src: int, dst: int, n_rows: int) -> None:
        try:
            super().clone(src, dst, n_rows)
        except BaseException:  # of what was shared by then nothing may be read
            self.trim()
            raise

    def close(self) -> None:
        super().close()
        assert isinstance(self._driver, FakeDriver)
        assert self._driver.held == 0


STORES: dict[str, type[ColumnStore]] = {
    "host": HostStore,
    "dense": SmallDenseStore,
    "cuda-vmm": FakeCudaStore,
}


def flat_group(**changes: Any) -> LayerGroup:
    """960 bytes a row, so that rows straddle pages of 4096."""
    return LayerGroup(
        **{
            "name": "flat",
            "layers": ("flat.0", "flat.1"),
            "policy": FlatPolicy(),
            "num_kv_heads": 3,
            "head_size": 20,
            "dtype": "float32",
            **changes,
        }
    )


def ring_group(window: int, **changes: Any) -> LayerGroup:
    """2400 bytes a row, one layer."""
    return LayerGroup(
        **{
            "name": f"ring{window}",
            "layers": (f"ring{window}.0",),
            "policy": RingPolicy(window),
            "num_kv_heads": 3,
            "head_size": 100,
            "dtype": "float32",
            **changes,
        }
    )


def config(*groups: LayerGroup, **changes: Any) -> CacheConfig:
    return CacheConfig(
        **{
            "max_seqs": 4,
            "capacity": 41,
            "max_write": 4,
            "groups": groups or (flat_group(), ring_group(5), ring_group(11)),
            "page_size": PAGE,
            "budget_bytes": 400 * PAGE,
            **changes,
        }
    )


def make_cache(
    store: type[ColumnStore] = HostStore, cfg: CacheConfig | None = None
) -> BatchedSequenceCache:
    cfg = cfg or config()
    return BatchedSequenceCache(cfg, store(CacheGeometry.of(cfg)))


def step(cache: BatchedSequenceCache, *cols: int, times: int = 1) -> None:
    """Append ``times`` tokens to each column, in steps of one token each."""
    for _ in range(times):
        cache.declare_step(cols)
        cache.prepare_step()
        cache.commit_step()


def write(store: ColumnStore, col: int, position: int, value: float) -> None:
    """Put K = value + layer number and V = its negative at a position of every layer."""
    for number, layer in enumerate(store.geometry.layers):
        rows = store.geometry.region_of(layer).rows
        view = store.layer_view(layer)
        view[position % rows, col, 0] = value + number
        view[position % rows, col, 1] = -(value + number)


def read(store: ColumnStore, layer: str, col: int, position: int) -> torch.Tensor:
    """[2, H, D] at a position."""
    return store.layer_view(layer)[position % store.geometry.region_of(layer).rows, col]


def holds(store: ColumnStore, col: int, position: int, value: float) -> bool:
    """Whether every layer still has what ``write`` put there."""
    for number, layer in enumerate(store.geometry.layers):
        key, val = read(store, layer, col, position)
        if not (bool((key == value + number).all()) and bool((val == -(value + number)).all())):
            return False
    return True


def is_zero(store: ColumnStore, col: int) -> bool:
    return not any(bool(store.layer_view(x)[:, col].any()) for x in store.geometry.layers)
