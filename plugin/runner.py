"""What every model runner with columns shares, whatever the device."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs

from vllm_kv_columns.kv_manager import ColumnStore, hooks
from vllm_kv_columns.kv_manager.geometry import SCRATCH_COLUMN, CacheGeometry
from vllm_kv_columns.plugin.column_driver import ColumnDriver
from vllm_kv_columns.plugin.options import ColumnOptions
from vllm_kv_columns.plugin.spec import ColumnSpec, column_specs
from vllm_kv_columns.plugin.support import Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["SCRATCH_BLOCK", "SETTLE_SECONDS", "ColumnRunnerMixin"]

logger = init_logger("vllm.plugins.kv_columns")

SCRATCH_BLOCK = ([SCRATCH_COLUMN],)
"""Block ids of a request that has no column: what it writes is lost, and it reads nothing."""

SETTLE_SECONDS = 10.0
"""Longest wait for what a store does in the background; milliseconds are usual."""


def cache_geometry(kv_cache_config: KVCacheConfig) -> CacheGeometry:
    """Of any layer of the one KV cache group; all carry the whole configuration."""
    (group,) = kv_cache_config.kv_cache_groups
    spec: KVCacheSpec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.first_spec
    assert isinstance(spec, ColumnSpec)
    return spec.geometry


def largest_of_group(values: list[int]) -> list[int]:
    """Element by element the largest over the tensor-parallel group."""
    together = torch.tensor(values, dtype=torch.int64)
    torch.distributed.all_reduce(
        together, op=torch.distributed.ReduceOp.MAX, group=get_tp_group().cpu_group
    )
    largest: list[int] = together.tolist()
    return largest


class ColumnRunnerMixin:
    """Goes in front of a vLLM model runner class."""

    driver: ColumnDriver | None = None
    vllm_config: "VllmConfig"

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The stock specs of all layers, turned into column specs in one go."""
        # The next class in line is vLLM's runner, which mypy cannot know here.
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[misc]
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        sharing = [one for one in layers if getattr(one, "kv_sharing_target_layer_name", None)]
        if sharing:
            raise Unsupported(
                "layers that share another layer's KV cache",
                f"{len(sharing)} layers of this model do",
                "drop --attention-backend SDPA_VARLEN",
            )
        return column_specs(specs, self.vllm_config)

    def scratch_bytes(self) -> int:
        """Bytes that the scratch column takes from start to end."""
        (geometry, *_) = {spec.geometry for spec in self.get_kv_cache_spec().values()}
        return geometry.scratch_pages * geometry.page_size

    def column_views(self, kv_cache_config: KVCacheConfig) -> dict[str, torch.Tensor]:
        """View the store, layer name -> `[rows, cols, 2, H, D]`; open it at the first call.

        Nothing but the scratch column takes memory. Every call sets the store's limit to the
        budget of `kv_cache_config`.
        """
        if self.driver is None:
            tensor_parallel = self.vllm_config.parallel_config.tensor_parallel_size
            self.driver = ColumnDriver(
                self._open_store(cache_geometry(kv_cache_config)),
                agree=largest_of_group if tensor_parallel > 1 else None,
                retain_seconds=ColumnOptions.of(self.vllm_config).retain_seconds,
            )
        store = self.driver.store
        # One block of vLLM's pool is its null block; scratch was taken off the budget.
        store.limit_pages = kv_cache_config.num_blocks - 1 + store.geometry.scratch_pages
        (group,) = kv_cache_config.kv_cache_groups
        return {layer: store.layer_view(layer) for layer in group.layer_names}

    def _open_store(self, geometry: CacheGeometry) -> ColumnStore:
        options = ColumnOptions.of(self.vllm_config)
        store = hooks.store_class(options.store)(geometry)
        store.spare_bytes = options.spare_bytes
        logger.info(
            "SDPA_VARLEN: the KV cache is %d columns of up to %d tokens, store %s, kernel %s.",
            geometry.cols - 1,
            geometry.capacity,
            options.store,
            options.kernel,
        )
        return store

    def refused_in(self, plan: "SchedulerOutput") -> list[str]:
        """Requests of the step that have no column and must write to the scratch column."""
        assert self.driver is not None
        refused = self.driver.refused
        return [one for one in plan.num_scheduled_tokens if one in refused] if refused else []

    def close_columns(self) -> None:
        """Give all memory of the columns back."""
        if self.driver is not None:
            self.driver.close()

    def column_stats(self) -> dict[str, Any]:
        """Of the store `committed_pages`, `peak_pages`, `resident_bytes` and its own statistics;
        of the steps what `StepTimes.take` gives.
        """
        assert self.driver is not None
        store = self.driver.store
        return {
            "committed_pages": store.committed_pages,
            "peak_pages": self.driver.peak_pages,
            "resident_bytes": store.resident_bytes(),
            **self.driver.times.take(),
            **store.statistics(),
        }
