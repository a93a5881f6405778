"""The same attention from contiguous tensors in float64, written without the op's ideas."""

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["dense_attention"]


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """Queries [q, Hq, D] at the last q positions of key and value [n, H, D]; [q, Hq, D] float64."""
    group = query.shape[1] // key.shape[1]
    positions = torch.arange(key.shape[0], device=key.device)
    distance = positions[-query.shape[0] :].unsqueeze(1) - positions
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    return scaled_dot_product_attention(
        query.double().transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=seen,
        scale=scale,
    ).transpose(0, 1)
