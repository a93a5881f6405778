"""Benchmarks: ``python -m vllm_kv_columns.bench kernels``, ``serve`` or ``memory``."""
