"""The class that `--attention-backend SDPA_VARLEN` names."""

from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend

from vllm_kv_columns.attention_backend.vllm.impl import ColumnAttentionImpl
from vllm_kv_columns.attention_backend.vllm.metadata import ColumnMetadataBuilder

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType

__all__ = ["ColumnAttentionBackend"]


class ColumnAttentionBackend(AttentionBackend):
    """Decoder attention, full or sliding window, over per-sequence columns."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list["CacheDType"]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "SDPA_VARLEN"

    @staticmethod
    def get_impl_cls() -> type[ColumnAttentionImpl]:
        return ColumnAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[ColumnMetadataBuilder]:
        return ColumnMetadataBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False
