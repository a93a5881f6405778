"""What every model runner with columns shares, whatever the device."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs

from vllm_kv_columns.kv_manager import hooks
from vllm_kv_columns.plugin.column_driver import ColumnDriver
from vllm_kv_columns.plugin.options import ColumnOptions
from vllm_kv_columns.plugin.spec import ColumnSpec, column_specs
from vllm_kv_columns.plugin.support import Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["ColumnRunnerMixin", "open_driver"]


def cache_spec(kv_cache_config: KVCacheConfig) -> ColumnSpec:
    """The spec of any layer of the one KV cache group; all carry the whole configuration."""
    (group,) = kv_cache_config.kv_cache_groups
    spec: KVCacheSpec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.first_spec
    assert isinstance(spec, ColumnSpec)
    return spec


def open_driver(vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig) -> ColumnDriver:
    """Open the store that the options name; nothing but the scratch column takes memory."""
    store = hooks.store_class(ColumnOptions.of(vllm_config.additional_config).store)
    geometry = cache_spec(kv_cache_config).geometry
    return ColumnDriver(store(geometry))


class ColumnRunnerMixin:
    """Goes in front of a vLLM model runner class."""

    driver: ColumnDriver | None = None
    vllm_config: "VllmConfig"
    shared_kv_cache_layers: dict[str, str]

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The stock specs of all layers, turned into column specs in one go."""
        # The next class in line is vLLM's runner, which mypy cannot know here.
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[misc]
        if self.shared_kv_cache_layers:
            raise Unsupported(
                "layers that share another layer's KV cache",
                f"{len(self.shared_kv_cache_layers)} layers of this model do",
                "drop --attention-backend SDPA_VARLEN",
            )
        return column_specs(specs, self.vllm_config)

    def column_views(self, kv_cache_config: KVCacheConfig) -> dict[str, torch.Tensor]:
        """Open the store and view it, layer name -> `[rows, cols, 2, H, D]`."""
        self.driver = open_driver(self.vllm_config, kv_cache_config)
        (group,) = kv_cache_config.kv_cache_groups
        return {layer: self.driver.store.layer_view(layer) for layer in group.layer_names}

    def column_stats(self) -> dict[str, Any]:
        """Pages and bytes of the store: `committed_pages`, `peak_pages`, `resident_bytes`."""
        assert self.driver is not None
        store = self.driver.store
        return {
            "committed_pages": store.committed_pages,
            "peak_pages": self.driver.peak_pages,
            "resident_bytes": store.resident_bytes(),
        }
