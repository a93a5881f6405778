"""vLLM's CPU worker and V1 model runner on columns."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.utils import bind_kv_cache

from vllm_kv_columns.plugin.runner import SCRATCH_BLOCK, ColumnRunnerMixin
from vllm_kv_columns.plugin.worker import ColumnWorkerMixin

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

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

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> Any:
        """A refused request computed nothing; the host would hand that out and forget the wish."""
        assert self.driver is not None
        served = {
            request: tokens
            for request, tokens in num_scheduled_tokens.items()
            if request not in self.driver.refused
        }
        return super()._get_prompt_logprobs_dict(hidden_states, served)

    def _update_states(self, scheduler_output: "SchedulerOutput") -> Any:
        later = super()._update_states(scheduler_output)
        for request in self.refused_in(scheduler_output):
            self.requests[request].block_ids = SCRATCH_BLOCK
            row = self.input_batch.req_id_to_index[request]
            self.input_batch.block_table.add_row(SCRATCH_BLOCK, row)
        return later


class ColumnCPUWorker(ColumnWorkerMixin, CPUWorker):
    model_runner: ColumnCPUModelRunner

    def init_device(self) -> None:
        super().init_device()
        # The host builds its runner deep inside init_device; ours differs in methods only.
        assert type(self.model_runner) is CPUModelRunner
        self.model_runner.__class__ = ColumnCPUModelRunner
