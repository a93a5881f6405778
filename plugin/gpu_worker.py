"""vLLM's GPU worker and V2 model runner on columns."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import bind_kv_cache_to_layers

from vllm_kv_columns.plugin.runner import SCRATCH_BLOCK, SETTLE_SECONDS, ColumnRunnerMixin
from vllm_kv_columns.plugin.worker import ColumnWorkerMixin

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["ColumnGPUModelRunner", "ColumnGPUWorker"]


class ColumnGPUModelRunner(ColumnRunnerMixin, GPUModelRunner):
    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Bind views of the column store where the host would allocate the whole pool.

        Called once to profile graph capture, with a small budget, and once for good. The store is
        the same, so that addresses stay; only its limit changes.
        """
        super().initialize_kv_cache(
            replace(kv_cache_config, kv_cache_tensors=[]), is_profiling, kv_cache_allocation_context
        )
        bind_kv_cache_to_layers(
            self.column_views(kv_cache_config),
            self.compilation_config.static_forward_context,
            kv_cache_groups=self.kv_cache_config.kv_cache_groups,
        )

    def add_requests(self, scheduler_output: "SchedulerOutput") -> None:
        # Before, not after: of two writes to a row of the block table in one step either may win.
        refused = set(self.refused_in(scheduler_output))
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in refused:
                new.block_ids = SCRATCH_BLOCK
        super().add_requests(scheduler_output)

    def update_requests(self, scheduler_output: "SchedulerOutput") -> None:
        # Both would address whole blocks of the host's pool, which does not exist.
        assert not scheduler_output.new_block_ids_to_zero
        assert not scheduler_output.kv_cache_block_copies
        super().update_requests(scheduler_output)
        refused = set(self.refused_in(scheduler_output))
        for request in refused.intersection(scheduler_output.scheduled_cached_reqs.req_ids):
            self.block_tables.append_block_ids(
                self.req_states.req_id_to_index[request], SCRATCH_BLOCK, overwrite=True
            )

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture the graphs once the store has nothing left to do beside it."""
        assert self.driver is not None
        self.driver.store.settle(SETTLE_SECONDS)
        captured: int = super().capture_model(profile_only=profile_only)
        return captured

    def shutdown(self) -> None:
        super().shutdown()
        self.close_columns()


class ColumnGPUWorker(ColumnWorkerMixin, Worker):
    model_runner: ColumnGPUModelRunner

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the columns back, then do as stock: kernels' buffers are kept."""
        self._give_back()
        super().sleep(level)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Stock's, with the columns for what it calls kv_cache."""
        if "kv_cache" in tags:
            self._give_back()
        super().discard(tags)

    def _give_back(self) -> None:
        torch.accelerator.synchronize()
        assert self.model_runner.driver is not None
        self.model_runner.driver.give_back()

    def _make_model_runner(self) -> ColumnGPUModelRunner:
        return ColumnGPUModelRunner(self.vllm_config, self.device)
