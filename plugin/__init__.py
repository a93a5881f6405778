"""The vLLM plugin: `register` is the entry point of group `vllm.general_plugins`.

vLLM calls it in every process and more than once. Nothing of vLLM changes until a configuration
selects the backend `SDPA_VARLEN`.
"""

import logging

__all__ = ["register"]


def register() -> None:
    """Make the attention backend `SDPA_VARLEN` selectable. Idempotent; called by vLLM.

    A vLLM so different that the names to replace are not there stays as it is, with a warning.
    """
    try:
        from vllm_kv_columns.plugin import patches
    except ImportError as error:
        logging.getLogger("vllm").warning(
            "vllm-kv-columns is inactive, it does not know this release of vLLM: %s", error
        )
        return
    patches.install()
