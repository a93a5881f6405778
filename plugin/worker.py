"""What every worker with columns shares, whatever the device."""

from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_kv_columns.plugin.report import attach_report, attach_usage
from vllm_kv_columns.plugin.runner import SETTLE_SECONDS

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

    from vllm_kv_columns.plugin.runner import ColumnRunnerMixin

__all__ = ["ColumnWorkerMixin"]


class ColumnWorkerMixin:
    """Goes in front of a vLLM worker class."""

    model_runner: "ColumnRunnerMixin"
    model_config: "ModelConfig"

    def determine_available_memory(self) -> int:
        """The host's budget less the scratch column, which is committed from start to end."""
        # The next class in line is vLLM's worker, which mypy cannot know here.
        available: int = super().determine_available_memory()  # type: ignore[misc]
        return available - self.model_runner.scratch_bytes()

    def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """Back what the step writes, launch it, and back beside it what the next will write."""
        driver = self.model_runner.driver
        assert driver is not None
        driver.prepare(scheduler_output)
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        driver.grow_ahead()
        return self._reported(output)

    def sample_tokens(self, grammar_output: "GrammarOutput | None") -> Any:
        """The step's output, with the reports if there are any."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        return self._reported(output)

    def kv_columns_stats(self) -> dict[str, Any]:
        """For `collective_rpc`: what the store holds now and held at most."""
        return self.model_runner.column_stats()

    def kv_columns_limit(self, nbytes: int) -> None:
        """For `collective_rpc`: let the cache take at most so much memory, from the next step on.

        Lowered below what is in use, retained columns go first, then running requests are
        preempted, those that came last first.

        Args:
            nbytes: of this worker's columns, the scratch column included.

        Raises:
            ConfigError: less than one sequence of the model's length may need.
        """
        assert self.model_runner.driver is not None
        # Not the length of a column: vLLM may have fitted the model's to the memory since.
        self.model_runner.driver.set_limit(nbytes, self.model_config.max_model_len)

    def kv_columns_settle(self) -> None:
        """For `collective_rpc`: wait until what the store does in the background is done."""
        assert self.model_runner.driver is not None
        self.model_runner.driver.store.settle(SETTLE_SECONDS)

    def _reported(self, output: Any) -> Any:
        """Attach the reports to the output, or leave them for the call that returns one."""
        driver = self.model_runner.driver
        assert driver is not None
        if output is None:
            return output
        report, driver.report = driver.report, None
        usage = driver.take_usage()
        if report is None and usage is None:
            return output
        if isinstance(output, ModelRunnerOutput):
            output = held = copy(output)  # a step without tokens returns an object that all share
        else:
            # The output to come; vLLM's two model runners name what it will return differently.
            assert isinstance(output, AsyncModelRunnerOutput)
            held = getattr(output, "model_runner_output", None) or output._model_runner_output
        if report is not None:
            attach_report(held, report)
        if usage is not None:
            attach_usage(held, usage)
        return output
