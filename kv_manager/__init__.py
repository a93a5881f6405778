"""KV cache in per-sequence columns: configuration, planning, step protocol, stores.

Importing the package brings neither torch nor vLLM; names that need torch load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cache import BatchedSequenceCache
from .config import CacheConfig, FlatPolicy, LayerGroup, LayerPolicy, RingPolicy
from .errors import (
    CacheFullError,
    ConfigError,
    KVCacheError,
    RewindError,
    StepError,
    StepOrderError,
    StoreError,
    StoreFullError,
    UnknownColumnError,
)
from .geometry import SCRATCH_COLUMN, CacheGeometry, RegionGeometry
from .hooks import hookimpl, kernel_class, plugin_manager, store_class
from .pages import PageBudget
from .planner import Segment, StepPlan, Write

if TYPE_CHECKING:
    from .stores.base import ColumnStore
    from .stores.cuda.store import CudaVmmStore
    from .stores.dense import DenseStore
    from .stores.host import HostStore
    from .tables import StepTables

__all__ = [
    "SCRATCH_COLUMN",
    "BatchedSequenceCache",
    "CacheConfig",
    "CacheFullError",
    "CacheGeometry",
    "ColumnStore",
    "ConfigError",
    "CudaVmmStore",
    "DenseStore",
    "FlatPolicy",
    "HostStore",
    "KVCacheError",
    "LayerGroup",
    "LayerPolicy",
    "PageBudget",
    "RegionGeometry",
    "RewindError",
    "RingPolicy",
    "Segment",
    "StepError",
    "StepOrderError",
    "StepPlan",
    "StepTables",
    "StoreError",
    "StoreFullError",
    "UnknownColumnError",
    "Write",
    "hookimpl",
    "kernel_class",
    "plugin_manager",
    "store_class",
]

_NEEDS_TORCH = {
    "ColumnStore": ".stores.base",
    "CudaVmmStore": ".stores.cuda.store",
    "DenseStore": ".stores.dense",
    "HostStore": ".stores.host",
    "StepTables": ".tables",
}


def __getattr__(name: str) -> Any:
    module = _NEEDS_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module, __name__), name)
