"""Every name of vLLM that is replaced, and nothing else.

    vllm/platforms/cpu.py:CpuPlatform.check_and_update_config         all that the switch implies
    vllm/platforms/cpu.py:CpuPlatform.get_attn_backend_cls            ignores the selection
    vllm/platforms/cuda.py:CudaPlatform.check_and_update_config       all that the switch implies
    vllm/distributed/kv_transfer/kv_connector/v1/metrics.py:
        KVConnectorProm.__init__                                      the metrics of the columns
        KVConnectorLogging.observe                                    does not log them

Written for the releases in `support.VLLM_VERSIONS`. On another platform or release only
`check_and_update_config` is wrapped, to refuse the backend when it is selected.
"""

import functools
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kv_columns.kv_manager import hooks
from vllm_kv_columns.plugin import support
from vllm_kv_columns.plugin.options import SECTION, ColumnOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

__all__ = ["BACKEND_NAME", "backend_member", "install"]

BACKEND_NAME = "SDPA_VARLEN"
BACKEND_PATH = "vllm_kv_columns.attention_backend.vllm.backend.ColumnAttentionBackend"
WORKERS = {
    "cpu": (
        "vllm.v1.worker.cpu_worker.CPUWorker",
        "vllm_kv_columns.plugin.cpu_worker.ColumnCPUWorker",
    ),
    "cuda": (
        "vllm.v1.worker.gpu_worker.Worker",
        "vllm_kv_columns.plugin.gpu_worker.ColumnGPUWorker",
    ),
}
"""Device type -> vLLM's own worker, and the one with columns that takes its place."""
SCHEDULERS = {
    False: "vllm_kv_columns.plugin.scheduler.ColumnScheduler",
    True: "vllm_kv_columns.plugin.scheduler.AsyncColumnScheduler",
}
"""Whether scheduling is asynchronous -> the scheduler that takes the place of vLLM's own."""

logger = init_logger("vllm.plugins.kv_columns")


def backend_member() -> AttentionBackendEnum:
    """The enum member of the backend, registered at the first call; also what its pickle calls.

    A spawned process unpickles the configuration before it loads plugins, so the member must
    unpickle by registering itself.
    """
    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        member = AttentionBackendEnum.register(BACKEND_NAME, BACKEND_PATH)
        member.__reduce_ex__ = lambda protocol: (backend_member, ())
    return AttentionBackendEnum.__members__[BACKEND_NAME]


def apply_config(config: "VllmConfig") -> None:
    """Derive from the one switch all that it implies; runs once or more in every process.

    Raises:
        Unsupported: what the columns cannot serve.
        ValueError: options that are unknown or out of range.
    """
    if config.attention_config.backend is not backend_member() or config.model_config is None:
        return
    support.check_version(current_platform.device_type, vllm.__version__)
    support.check_config(config)
    options, device_type = ColumnOptions.of(config), current_platform.device_type
    support.check_store(options.store, hooks.store_class(options.store), device_type)
    support.check_kernel(options.kernel, hooks.kernel_class(options.kernel), device_type)
    workers = WORKERS[device_type]
    if config.parallel_config.worker_cls not in workers:
        raise support.Unsupported(
            f"--worker-cls {config.parallel_config.worker_cls}",
            "the columns need a worker of their own",
            "drop --worker-cls",
        )
    config.parallel_config.worker_cls = workers[1]
    scheduler = SCHEDULERS[bool(config.scheduler_config.async_scheduling)]
    if config.scheduler_config.scheduler_cls not in (None, *SCHEDULERS.values()):
        raise support.Unsupported(
            f"--scheduler-cls {config.scheduler_config.scheduler_cls}",
            "the columns need a scheduler of their own",
            "drop --scheduler-cls",
        )
    config.scheduler_config.scheduler_cls = scheduler


def _select_backend(selector: "AttentionSelectorConfig") -> str:
    """The backend's path, or a refusal with vLLM's own reasons for a layer it cannot serve."""
    from vllm_kv_columns.attention_backend.vllm.backend import ColumnAttentionBackend

    reasons = ColumnAttentionBackend.validate_configuration(
        device_capability=None,  # asked for on GPUs only
        **selector._asdict(),
    )
    if reasons:
        raise support.Unsupported(
            "this model", ", ".join(reasons), "drop --attention-backend SDPA_VARLEN"
        )
    return BACKEND_PATH


def _wrap_config(platform: Any) -> None:
    stock = platform.check_and_update_config

    def check_and_update_config(cls: type, vllm_config: "VllmConfig") -> None:
        stock(vllm_config)
        apply_config(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)


def _wrap_selection(platform: Any) -> None:
    stock = platform.get_attn_backend_cls

    def get_attn_backend_cls(
        cls: type,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: "AttentionSelectorConfig",
        num_heads: int | None = None,
    ) -> str:
        if selected_backend is backend_member():
            return _select_backend(attn_selector_config)
        path: str = stock(selected_backend, attn_selector_config, num_heads)
        return path

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def _wrap_metrics() -> None:
    """Let vLLM's loggers take the columns' numbers where a KV connector's would come.

    In both releases they are in the front end's only free-form field (`usage_stats.py`).
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorLogging,
        KVConnectorProm,
    )

    make, log = KVConnectorProm.__init__, KVConnectorLogging.observe

    @functools.wraps(make)
    def init(
        self: KVConnectorProm,
        vllm_config: "VllmConfig",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        make(self, vllm_config, labelnames, per_engine_labelvalues)
        if vllm_config.attention_config.backend is backend_member():
            from prometheus_client import Counter, Gauge, Histogram

            from vllm_kv_columns.plugin.metrics import ColumnMetrics

            types = {
                Gauge: self._gauge_cls,
                Counter: self._counter_cls,
                Histogram: self._histogram_cls,
            }
            self.prom_metrics = ColumnMetrics(
                vllm_config, types, labelnames, per_engine_labelvalues
            )

    @functools.wraps(log)
    def observe(self: KVConnectorLogging, transfer_stats_data: dict[str, Any]) -> None:
        if SECTION not in transfer_stats_data:
            log(self, transfer_stats_data)

    KVConnectorProm.__init__ = init
    KVConnectorLogging.observe = observe


@functools.cache
def install() -> None:
    """Register the backend and wrap the platform, once per process.

    On a platform or version that is not supported only the refusal is installed.
    """
    backend_member()
    platform = type(current_platform)
    _wrap_config(platform)
    try:
        support.check_version(current_platform.device_type, vllm.__version__)
    except support.Unsupported as refusal:
        logger.debug("inactive: %s", refusal)
        return
    from vllm_kv_columns.plugin import spec

    spec.register()
    _wrap_metrics()
    if current_platform.is_cpu():
        _wrap_selection(platform)
