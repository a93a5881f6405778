"""One attention layer: write the step's K and V to their columns, then attend."""

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType

from vllm_kv_columns.attention_backend.vllm.metadata import ColumnMetadata
from vllm_kv_columns.plugin.support import Unsupported

__all__ = ["ColumnAttentionImpl"]


class ColumnAttentionImpl(AttentionImpl[ColumnMetadata]):
    """vLLM builds one for each attention layer.

    Raises:
        Unsupported: ALiBi, logits soft cap, attention sinks, shared caches or anything but
            decoder attention.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **unknown: Any,
    ) -> None:
        absent = {
            "ALiBi": alibi_slopes is not None,
            f"a logits soft cap of {logits_soft_cap}": bool(logits_soft_cap),
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "layers that share another layer's KV cache": kv_sharing_target_layer_name is not None,
        } | {f"the layer option {name}": value is not None for name, value in unknown.items()}
        for what, found in absent.items():
            if found:
                raise Unsupported(
                    what, "sdpa_varlen does not compute it", "drop --attention-backend SDPA_VARLEN"
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self._split: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ColumnMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over the columns.

        Args:
            query: `[T, Hq, D]`; key, value: `[T, H, D]`, padded to T tokens.
            kv_cache: `[rows, cols, 2, H, D]`, strided; rows of this step are written.
            attn_metadata: None in vLLM's warm-up and profiling runs, which hold no sequence.
            output: `[T, Hq, D]`, overwritten.

        Returns:
            `output`.
        """
        if attn_metadata is None:
            return output.zero_()
        tokens, kernel, step = attn_metadata.num_tokens, attn_metadata.kernel, attn_metadata.step
        if self._split is None or self._split[0] is not kv_cache:
            self._split = (kv_cache, kv_cache[:, :, 0], kv_cache[:, :, 1])
        _, key_cache, value_cache = self._split
        kernel.write(key[:tokens], value[:tokens], key_cache, value_cache, step)
        kernel.attend(
            query[:tokens], key_cache, value_cache, step, scale=self.scale, out=output[:tokens]
        )
        return output
