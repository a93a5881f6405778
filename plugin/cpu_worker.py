"""vLLM's CPU worker and V1 model runner on columns."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.utils import bind_kv_cache

from vllm_kv_columns.plugin.runner import ColumnRunnerMixin

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

__all__ = ["ColumnCPUModelRunner", "ColumnCPUWorker"]


class ColumnCPUModelRunner(ColumnRunnerMixin, CPUModelRunner):
    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager[Any] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Bind views of the column store where the host would allocate the whole pool."""
        views = self.column_views(kv_cache_config)
        bind_kv_cache(
            views,
            self.compilation_config.static_forward_context,
            self.kv_caches,
            kv_cache_groups=kv_cache_config.kv_cache_groups,
        )
        return views


class ColumnCPUWorker(CPUWorker):
    model_runner: ColumnCPUModelRunner

    def init_device(self) -> None:
        super().init_device()
        # The host builds its runner deep inside init_device; ours differs in methods only.
        assert type(self.model_runner) is CPUModelRunner
        self.model_runner.__class__ = ColumnCPUModelRunner

    def determine_available_memory(self) -> int:
        """The host's budget less the scratch column, which is committed from start to end."""
        (geometry, *_) = {spec.geometry for spec in self.get_kv_cache_spec().values()}
        available: int = super().determine_available_memory()
        return available - geometry.scratch_pages * geometry.page_size

    def execute_model(
        self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any
    ) -> "ModelRunnerOutput | None":
        driver = self.model_runner.driver
        assert driver is not None
        driver.prepare(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def kv_columns_stats(self) -> dict[str, Any]:
        """For `collective_rpc`: what the store holds now and held at most."""
        return self.model_runner.column_stats()
