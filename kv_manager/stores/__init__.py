"""The built-in column stores, registered through the same hook as anybody's."""

from ..hooks import hookimpl
from .base import ColumnStore
from .cuda import CudaVmmStore
from .dense import DenseStore
from .host import HostStore

__all__ = ["ColumnStore", "CudaVmmStore", "DenseStore", "HostStore", "kv_columns_stores"]


@hookimpl
def kv_columns_stores() -> dict[str, type[ColumnStore]]:
    return {"host": HostStore, "dense": DenseStore, "cuda-vmm": CudaVmmStore}
