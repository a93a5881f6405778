"""Refusals of what can be seen without reading the device."""

import torch

from ...kv_manager.tables import StepTables

__all__ = ["check_attend", "check_write"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: StepTables,
    rows: int,
) -> None:
    if key.shape[0] != tables.num_tokens:
        raise ValueError(
            f"key has {key.shape[0]} tokens and the step's tables {tables.num_tokens}; "
            f"pass the tokens that seq_cols and positions describe"
        )
    if key.dim() != 3 or value.shape != key.shape or value.dtype != key.dtype:
        raise ValueError(
            f"key is {key.dtype} {list(key.shape)} and value {value.dtype} {list(value.shape)}; "
            f"both must be [T, H, D] of one dtype"
        )
    _check_caches("key", key, key_cache, value_cache, rows)
    if key.shape[1] != key_cache.shape[2]:
        raise ValueError(
            f"key has {key.shape[1]} heads and the cache {key_cache.shape[2]}; they must be equal"
        )
    _check_device(key, value, tables.seq_cols)


def check_attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_info: torch.Tensor,
    out: torch.Tensor,
    rows: int,
) -> None:
    if query.dim() != 3 or query.shape[1] % key_cache.shape[2]:
        raise ValueError(
            f"query is {list(query.shape)} and the cache {list(key_cache.shape)}; query must be "
            f"[T, Hq, D] and Hq a multiple of the cache's heads"
        )
    _check_caches("query", query, key_cache, value_cache, rows)
    if out.shape != query.shape or out.dtype != query.dtype:
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} and query {query.dtype} {list(query.shape)}; "
            f"they must be alike"
        )
    _check_device(query, out, seq_info)


def _check_caches(
    name: str,
    tokens: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: int,
) -> None:
    if tokens.dtype not in _DTYPES or not tokens.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(
            f"{name} is {tokens.dtype}, the cache {key_cache.dtype} and {value_cache.dtype}; "
            f"this kernel needs one of float16, bfloat16 and float32 for all"
        )
    shape = key_cache.shape
    if len(shape) != 4 or shape != value_cache.shape or shape[3] != tokens.shape[2]:
        raise ValueError(
            f"key_cache is {list(shape)}, value_cache {list(value_cache.shape)} and {name} "
            f"{list(tokens.shape)}; caches must be [rows, cols, H, D] with one D for all"
        )
    if shape[0] < rows:
        raise ValueError(
            f"the step was prepared for {rows} cache rows; there are {shape[0]}: "
            f"prepare it for the rows of the cache"
        )
    _check_device(tokens, key_cache, value_cache)


def _check_device(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> None:
    if not first.device == second.device == third.device:
        raise ValueError(
            f"tensors of a step are on {first.device}, {second.device} and {third.device}; "
            f"all must be on one device"
        )
