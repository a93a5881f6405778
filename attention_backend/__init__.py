"""Attention over columns: the op, its reference, and the kernels behind it. Free of vLLM."""

from .cpu import CpuKernel
from .kernel import AttentionKernel, StepBounds
from .op import register_kernel, sdpa_varlen, write_slots
from .reference import sdpa_varlen_reference, write_slots_reference

__all__ = [
    "AttentionKernel",
    "CpuKernel",
    "StepBounds",
    "register_kernel",
    "sdpa_varlen",
    "sdpa_varlen_reference",
    "write_slots",
    "write_slots_reference",
]
