"""What can be served from columns. A refusal is one sentence: what, why, what to use instead."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kv_columns.attention_backend.kernel import AttentionKernel
    from vllm_kv_columns.kv_manager.stores.base import ColumnStore

__all__ = [
    "VLLM_VERSIONS",
    "Unsupported",
    "check_config",
    "check_kernel",
    "check_store",
    "check_version",
]

VLLM_VERSIONS = {"cpu": "0.32", "cuda": "0.33"}
"""Platform device type -> the vLLM release whose internals the seams were written for."""


class Unsupported(ValueError):
    """A model, flag or vLLM version that SDPA_VARLEN cannot serve yet."""

    def __init__(self, what: str, why: str, instead: str) -> None:
        super().__init__(f"SDPA_VARLEN does not support {what}: {why}; {instead}.")


def check_version(device_type: str, version: str) -> None:
    """Refuse a platform or vLLM release that the seams were not written for.

    Args:
        device_type: `current_platform.device_type`, such as "cpu".
        version: `vllm.__version__`.

    Raises:
        Unsupported: naming the platform or version and what is supported.
    """
    wanted = VLLM_VERSIONS.get(device_type)
    if wanted is None:
        raise Unsupported(
            f"the {device_type} platform",
            "this release of vllm-kv-columns has no store and kernel for it",
            f"use one of: {', '.join(VLLM_VERSIONS)}, or drop --attention-backend",
        )
    if version.split("+")[0].rsplit(".", 1)[0] != wanted:
        raise Unsupported(
            f"vLLM {version}",
            "its internals may differ from those the plugin was written for",
            f"install vLLM {wanted} for {device_type}, or drop --attention-backend",
        )


def check_store(name: str, store: type["ColumnStore"], device_type: str) -> None:
    """Refuse a store of another device, or one that a budget of single requests does not fit.

    Raises:
        Unsupported: naming the store.
    """
    if device_type not in store.device_types:
        raise Unsupported(
            f"the store {name!r} on {device_type}",
            f"its memory is for {', '.join(store.device_types)}",
            "choose another in kv_columns.store",
        )
    if not (store.per_column and store.stable_views):
        raise Unsupported(
            f"the store {name!r} under vLLM",
            "it lengthens all columns together, and vLLM budgets each request by itself",
            "choose another in kv_columns.store",
        )


def check_kernel(name: str, kernel: type["AttentionKernel"], device_type: str) -> None:
    """Refuse a kernel that does not run on the platform.

    Raises:
        Unsupported: naming the kernel, and the devices that it runs on.
    """
    if device_type not in kernel.device_types:
        raise Unsupported(
            f"the kernel {name!r} on {device_type}",
            f"it runs on {', '.join(kernel.device_types)}",
            "choose another in kv_columns.kernel",
        )


def check_config(config: "VllmConfig") -> None:
    """Refuse, before any worker starts, what the column cache cannot serve.

    What only the model's layers tell (spec types, soft caps, shared caches) is refused when they
    are built, in the attention implementation and in `spec.column_specs`.

    Raises:
        Unsupported: the first thing found.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    stock = "drop --attention-backend SDPA_VARLEN"

    def refuse(condition: object, what: str, why: str, instead: str) -> None:
        if condition:
            raise Unsupported(what, why, instead)

    on_cpu = config.device_config.device_type == "cpu"
    refuse(
        on_cpu and config.use_v2_model_runner,
        "vLLM's V2 model runner on the CPU",
        "the CPU seams attach to the V1 runner",
        "unset VLLM_USE_V2_MODEL_RUNNER",
    )
    refuse(
        not on_cpu and not config.use_v2_model_runner,
        "vLLM's V1 model runner on a GPU",
        "the GPU seams attach to the V2 runner",
        "unset VLLM_USE_V2_MODEL_RUNNER and drop what the V2 runner does not serve",
    )
    refuse(
        model.runner_type != "generate",
        f"--runner {model.runner_type}",
        "a pooling model keeps no KV cache between steps",
        stock,
    )
    refuse(model.use_mla, "multi-head latent attention", "columns hold plain K and V", stock)
    refuse(
        model.is_encoder_decoder,
        "encoder-decoder models",
        "cross-attention KV has no column",
        stock,
    )
    refuse(
        model.is_hybrid or model.is_attention_free,
        f"the architecture {model.architecture}",
        "its recurrent state does not grow with the tokens",
        stock,
    )
    refuse(
        cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")),
        f"--kv-cache-dtype {cache.cache_dtype}",
        "columns store K and V in the model's dtype",
        "use --kv-cache-dtype auto",
    )
    refuse(
        config.speculative_config is not None,
        "speculative decoding",
        "rejected tokens are not rewound in the columns yet",
        "drop --speculative-config",
    )
    refuse(
        config.diffusion_config is not None,
        "diffusion language models",
        "their canvas is not rewound in the columns yet",
        stock,
    )
    # Before the next one: vLLM makes a connector of it.
    refuse(
        cache.kv_offloading_size is not None,
        f"--kv-offloading-size {cache.kv_offloading_size}",
        "what offloads copies paged blocks",
        "drop --kv-offloading-size",
    )
    refuse(
        config.kv_transfer_config is not None,
        "--kv-transfer-config",
        "KV connectors address paged blocks",
        "drop --kv-transfer-config",
    )
    refuse(
        parallel.pipeline_parallel_size > 1,
        f"--pipeline-parallel-size {parallel.pipeline_parallel_size}",
        "all layers of a sequence grow together in one process",
        "use --tensor-parallel-size",
    )
    refuse(
        parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "context parallelism",
        "a column is not split over ranks",
        "use --tensor-parallel-size",
    )
    refuse(
        parallel.use_ubatching,
        "microbatches",
        "the tables of a step are prepared once for the whole batch",
        "drop --enable-dbo and --ubatch-size",
    )
    refuse(
        config.attention_config.backend_per_kind,
        "--attention-config backend_per_kind",
        "one store holds the layers of every kind",
        "drop backend_per_kind",
    )
