"""Benchmarks of the kernels and of serving: ``python -m vllm_kv_columns.bench kernels`` (``serve``)."""
