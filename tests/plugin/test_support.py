"""What cannot be served is refused when the configuration is made, in one sentence."""

import re
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from tests.plugin.configured import configure
from vllm_kv_columns.attention_backend.cpu import CpuKernel
from vllm_kv_columns.attention_backend.vllm.impl import ColumnAttentionImpl
from vllm_kv_columns.plugin import patches, support
from vllm_kv_columns.plugin.support import Unsupported


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    patches.install()


def test_the_switch_selects_worker_and_scheduler(
    mistral_like: Path,
) -> None:
    config = configure(mistral_like)
    assert config.parallel_config.worker_cls == patches.WORKERS["cpu"][1]
    assert config.cache_config.enable_prefix_caching
    assert not configure(
        mistral_like, enable_prefix_caching=False
    ).cache_config.enable_prefix_caching
    asynchronous = bool(config.scheduler_config.async_scheduling)
    assert config.scheduler_config.scheduler_cls == patches.SCHEDULERS[asynchronous]


def test_without_the_switch_the_configuration_is_stock(mistral_like: Path) -> None:
    config = EngineArgs(model=str(mistral_like), skip_tokenizer_init=True).create_engine_config()
    assert config.parallel_config.worker_cls == patches.WORKERS["cpu"][0]
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"kv_cache_dtype": "fp8"},
            "SDPA_VARLEN does not support --kv-cache-dtype fp8: columns store K and V in the "
            "model's dtype; use --kv-cache-dtype auto.",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "SDPA_VARLEN does not support speculative decoding: rejected tokens are not rewound "
            "in the columns yet; drop --speculative-config.",
        ),
        (
            {"kv_offloading_size": 1.0},
            "SDPA_VARLEN does not support --kv-offloading-size 1.0: what offloads copies paged "
            "blocks; drop --kv-offloading-size.",
        ),
        (
            {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
            "SDPA_VARLEN does not support --kv-offloading-size 1.0: what offloads copies paged "
            "blocks; drop --kv-offloading-size.",
        ),
        (
            {
                "kv_transfer_config": KVTransferConfig(
                    kv_connector="OffloadingConnector", kv_role="kv_both"
                )
            },
            "SDPA_VARLEN does not support --kv-transfer-config: KV connectors address paged "
            "blocks; drop --kv-transfer-config.",
        ),
        (
            {"pipeline_parallel_size": 2},
            "SDPA_VARLEN does not support --pipeline-parallel-size 2: all layers of a sequence "
            "grow together in one process; use --tensor-parallel-size.",
        ),
        (
            {"worker_cls": "vllm.v1.worker.gpu_worker.Worker"},
            "SDPA_VARLEN does not support --worker-cls vllm.v1.worker.gpu_worker.Worker: "
            "the columns need a worker of their own; drop --worker-cls.",
        ),
        (
            {"additional_config": {"kv_columns": {"pages": 1}}},
            "Unknown option 'pages' in kv_columns; known options: store, kernel, page_size, "
            "ahead_rows, spare_bytes, layers_per_region, retained, retain_seconds.",
        ),
        (
            {"additional_config": {"kv_columns": {"store": "tape"}}},
            "unknown store 'tape'; known are: cuda-vmm, dense, host",
        ),
        (
            {"additional_config": {"kv_columns": {"store": "dense"}}},
            "SDPA_VARLEN does not support the store 'dense' under vLLM: it lengthens all columns "
            "together, and vLLM budgets each request by itself; choose another in "
            "kv_columns.store.",
        ),
        (
            {"additional_config": {"kv_columns": {"store": "cuda-vmm"}}},
            "SDPA_VARLEN does not support the store 'cuda-vmm' on cpu: its memory is for cuda; "
            "choose another in kv_columns.store.",
        ),
        (
            {"scheduler_cls": "my.Scheduler"},
            "SDPA_VARLEN does not support --scheduler-cls my.Scheduler: the columns need a "
            "scheduler of their own; drop --scheduler-cls.",
        ),
    ],
    ids=[
        "fp8",
        "speculation",
        "offloading",
        "offloading to LMCache",
        "connector",
        "pipeline",
        "worker",
        "option",
        "store",
        "dense",
        "other device",
        "scheduler",
    ],
)
def test_refusals(mistral_like: Path, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        configure(mistral_like, **arguments)


def test_cache_events_are_no_reason_to_refuse(mistral_like: Path) -> None:
    configure(mistral_like, kv_events_config=KVEventsConfig(enable_kv_cache_events=True))


@pytest.mark.parametrize(
    ("device", "version", "sentence"),
    [
        ("cpu", "0.31.2", "vLLM 0.31.2: its internals may differ"),
        ("cpu", "0.33.0+cpu", "install vLLM 0.32 for cpu, or drop --attention-backend."),
        ("cuda", "0.32.0", "install vLLM 0.33 for cuda, or drop --attention-backend."),
        ("tpu", "0.32.0", "the tpu platform: this release of vllm-kv-columns has no store"),
    ],
)
def test_versions_and_platforms_it_was_not_written_for(
    device: str, version: str, sentence: str
) -> None:
    with pytest.raises(Unsupported, match=re.escape(sentence)):
        support.check_version(device, version)


def test_a_kernel_of_another_device() -> None:
    sentence = "the kernel 'torch-sdpa' on cuda: it runs on cpu; choose another in kv_columns"
    with pytest.raises(Unsupported, match=re.escape(sentence)):
        support.check_kernel("torch-sdpa", CpuKernel, "cuda")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu"])
def test_the_version_it_was_written_for(version: str) -> None:
    support.check_version("cpu", version)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"alibi_slopes": [0.5]}, "ALiBi: sdpa_varlen does not compute it"),
        ({"logits_soft_cap": 30.0}, "a logits soft cap of 30.0: sdpa_varlen does not"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "layers that share another layer's KV"),
        ({"attn_type": "encoder_only"}, "encoder_only attention: sdpa_varlen does not"),
        ({"sinks": object()}, "the layer option sinks: sdpa_varlen does not compute it"),
    ],
    ids=["alibi", "soft cap", "shared cache", "encoder", "sinks"],
)
def test_layers_it_cannot_compute(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(sentence)):
        ColumnAttentionImpl(4, 32, 0.1, 2, **arguments)


def test_a_layer_that_the_selector_describes_and_columns_cannot_serve() -> None:
    import torch
    from vllm.v1.attention.selector import AttentionSelectorConfig

    selector = AttentionSelectorConfig(
        head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, has_sink=True
    )
    with pytest.raises(Unsupported, match="this model: attention sinks not supported"):
        current_platform.get_attn_backend_cls(patches.backend_member(), selector)
