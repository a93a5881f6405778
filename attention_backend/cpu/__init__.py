"""Attention over columns on the CPU, in torch's fused scaled_dot_product_attention."""

from .attention import CpuKernel, CpuStep

__all__ = ["CpuKernel", "CpuStep"]
