"""The ops `kv_columns::sdpa_varlen` and `kv_columns::write_slots`, for eager and compiled code.

They run the kernel registered for the device. A caller that has many layers a step calls the
kernel itself and prepares once.
"""

import torch

from ..kv_manager.tables import StepTables
from .cpu import CpuKernel
from .kernel import AttentionKernel

__all__ = ["register_kernel", "sdpa_varlen", "write_slots"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_kernels: dict[str, AttentionKernel] = {}


def register_kernel(kernel: AttentionKernel) -> None:
    """Let the ops run ``kernel`` on the device types that it names, instead of an earlier one."""
    for device_type in kernel.device_types:
        _kernels[device_type] = kernel


register_kernel(CpuKernel())
try:
    from .triton import TritonKernel
except ImportError:  # no Triton for this platform
    pass
else:
    # Calls of different shapes and streams may interleave: each has buffers of its own.
    register_kernel(TritonKernel(keep_buffers=False))


def sdpa_varlen(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_info: torch.Tensor,
    scale: float,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of packed queries over the columns of their sequences.

    query: [T, Hq, D]. key_cache, value_cache: [rows, cols, H, D], same strides or not, Hq a
    multiple of H; query head h*G + g belongs to KV head h. seq_info: int32 [S, 4], rows (q_start,
    q_len, col, kv_end). All on one device, the first three of one dtype (float32, float16 or
    bfloat16). ``sdpa_varlen_reference`` says what is computed.

    Returns a new [T, Hq, D], contiguous; rows that no segment covers are zero. Mutates nothing.
    Raises ValueError for shapes, dtypes, devices or a window that do not fit, NotImplementedError
    for a device without a kernel.
    """
    result: torch.Tensor = torch.ops.kv_columns.sdpa_varlen(
        query, key_cache, value_cache, seq_info, scale, causal, window
    )
    return result


def write_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_cols: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Store token i of key and value in row positions[i] % rows of column seq_cols[i].

    key, value: [T, H, D]. key_cache, value_cache: [rows, cols, H, D], both mutated. seq_cols,
    positions: int32 [T]. All on one device, the first four of one dtype. Raises ValueError for
    what does not fit, NotImplementedError for a device without a kernel.
    """
    torch.ops.kv_columns.write_slots(key, value, key_cache, value_cache, seq_cols, positions)


@torch.library.custom_op("kv_columns::sdpa_varlen", mutates_args=())
def _sdpa_varlen(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_info: torch.Tensor,
    scale: float,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    _check_sdpa(query, key_cache, value_cache, seq_info, window)
    kernel = _kernel_for(query.device)
    none = seq_info.new_empty(0)
    tables = StepTables(seq_info=seq_info, seq_cols=none, positions=none)
    step = kernel.prepare(tables, rows=key_cache.shape[0], window=window, causal=causal)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    kernel.attend(query, key_cache, value_cache, step, scale=scale, out=out)
    return out


@_sdpa_varlen.register_fake
def _(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_info: torch.Tensor,
    scale: float,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    _check_sdpa(query, key_cache, value_cache, seq_info, window)
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@torch.library.custom_op("kv_columns::write_slots", mutates_args=("key_cache", "value_cache"))
def _write_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_cols: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    _check_write(key, value, key_cache, value_cache, seq_cols, positions)
    kernel = _kernel_for(key.device)
    tables = StepTables(seq_cols.new_empty((0, 4)), seq_cols, positions)
    step = kernel.prepare(tables, rows=key_cache.shape[0], window=None, causal=True)
    kernel.write(key, value, key_cache, value_cache, step)


@_write_slots.register_fake
def _(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_cols: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    _check_write(key, value, key_cache, value_cache, seq_cols, positions)


def _kernel_for(device: torch.device) -> AttentionKernel:
    kernel = _kernels.get(device.type)
    if kernel is None:
        raise NotImplementedError(
            f"no attention kernel for device {device}; there are kernels for "
            f"{', '.join(sorted(_kernels))}; register one with register_kernel"
        )
    return kernel


def _check_sdpa(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_info: torch.Tensor,
    window: int | None,
) -> None:
    _check_caches("query", query, key_cache, value_cache)
    heads = key_cache.shape[2]
    if query.shape[1] % heads:
        raise ValueError(
            f"query has {query.shape[1]} heads and the cache {heads}; "
            f"the first must be a multiple of the second"
        )
    if seq_info.dim() != 2 or seq_info.shape[1] != 4 or seq_info.dtype != torch.int32:
        raise ValueError(f"seq_info is {_form(seq_info)}; it must be int32 [S, 4]")
    _check_device("seq_info", seq_info, query)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1, or None for no window")


def _check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_cols: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    _check_caches("key", key, key_cache, value_cache)
    if key.shape[1] != key_cache.shape[2]:
        raise ValueError(
            f"key has {key.shape[1]} heads and the cache {key_cache.shape[2]}; they must be equal"
        )
    if value.shape != key.shape or value.dtype != key.dtype:
        raise ValueError(f"value is {_form(value)} and key {_form(key)}; they must be alike")
    _check_device("value", value, key)
    for name, tensor in (("seq_cols", seq_cols), ("positions", positions)):
        if tensor.dim() != 1 or tensor.dtype != torch.int32 or tensor.shape[0] != key.shape[0]:
            raise ValueError(
                f"{name} is {_form(tensor)}; it must be int32 [{key.shape[0]}], "
                f"one number for each token of key"
            )
        _check_device(name, tensor, key)


def _check_caches(
    name: str, tokens: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> None:
    if tokens.dim() != 3 or tokens.dtype not in _DTYPES:
        raise ValueError(
            f"{name} is {_form(tokens)}; it must be [T, heads, D] in float32, float16 or bfloat16"
        )
    for cache_name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4 or 0 in cache.shape:
            raise ValueError(
                f"{cache_name} is {_form(cache)}; it must be [rows, cols, H, D], none of them 0"
            )
        if cache.dtype != tokens.dtype:
            raise ValueError(
                f"{cache_name} is {cache.dtype} and {name} {tokens.dtype}; "
                f"convert {name} to the dtype of the cache"
            )
        if cache.shape[3] != tokens.shape[2]:
            raise ValueError(
                f"{cache_name} has head size {cache.shape[3]} and {name} {tokens.shape[2]}; "
                f"they must be equal"
            )
        _check_device(cache_name, cache, tokens)
    if key_cache.shape != value_cache.shape:
        raise ValueError(
            f"key_cache is {_form(key_cache)} and value_cache {_form(value_cache)}; "
            f"their shapes must be equal"
        )


def _check_device(name: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on {tensor.device} and other arguments on {other.device}; "
            f"all must be on one device"
        )


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
