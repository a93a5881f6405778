"""Triton kernels for CUDA."""

from .attention import TritonKernel, TritonStep
from .tables import fill_tables, fill_tables_reference

__all__ = ["TritonKernel", "TritonStep", "fill_tables", "fill_tables_reference"]
