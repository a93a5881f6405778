"""The store 'cuda-vmm': columns in the memory of a CUDA device, mapped as they grow."""

from .driver import Driver
from .stats import StoreStats
from .store import CudaVmmStore

__all__ = ["CudaVmmStore", "Driver", "StoreStats"]
