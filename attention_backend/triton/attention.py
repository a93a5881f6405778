"""The CUDA kernel: prepare, write, attend, with lengths that only the device knows."""

from typing import ClassVar

import torch

from ...kv_manager.tables import StepTables
from ..kernel import AttentionKernel, StepBounds, check_layer
from .buffers import Buffers
from .checks import check_attend, check_write
from .config import Cut, choose_tiles
from .device import capability, current, processors
from .layer import LayerLaunch, launch_schedule, launch_write

__all__ = ["TritonKernel", "TritonStep"]

_Shape = tuple[Cut, int, torch.device]  # what buffers are made for; int: the head size in registers


class TritonStep:
    """A step prepared for the layers of one (rows, window), see ``TritonKernel.prepare``."""

    def __init__(
        self,
        tables: StepTables,
        rows: int,
        window: int | None,
        causal: bool,
        max_q_len: int | None,
    ) -> None:
        self.tables, self.rows, self.window, self.causal = tables, rows, window, causal
        self.max_q_len = max_q_len
        self.buffers: dict[_Shape, Buffers] = {}  # its own, where the kernel keeps none


class TritonKernel(AttentionKernel):
    """Attention on CUDA. Nothing waits for the device or depends on a length that it holds.

    keep_buffers: schedules and parts live in buffers of the kernel object, made by ``reserve`` or
    by the first step that needs them (or larger ones) and never freed or moved while the object
    lives, so that captured graphs may hold them. A kernel object is then for one stream at a
    time, and for one kind of layer (rows, window, causal) where graphs are captured: a step
    overwrites the schedule of an earlier one. Interleaved steps are right in eager mode, at the
    cost of a schedule each time. False: every step allocates its own.

    Lengths, columns and positions on the device are the caller's promise: segments that lie
    outside the cache read foreign memory. As on the CPU, a NaN that some query of a segment
    attends may reach the segment's other queries.
    """

    device_types: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self, keep_buffers: bool = True) -> None:
        self._keep = keep_buffers
        self._reserved: _Shape | None = None
        self._buffers: dict[_Shape, Buffers] = {}
        self._outgrown: list[Buffers] = []
        self._layers: dict[tuple[object, ...], LayerLaunch] = {}

    def reserve(self, bounds: StepBounds, device: torch.device) -> None:
        """Make the buffers for all steps within ``bounds``; ``prepare`` then makes schedules.

        Does nothing for a kernel that keeps no buffers.
        """
        if bounds.kv_heads < 1 or bounds.query_heads % bounds.kv_heads:
            raise ValueError(
                f"{bounds.query_heads} query heads and {bounds.kv_heads} KV heads; "
                f"the first must be a multiple of the second"
            )
        device = _indexed(device)
        group = bounds.query_heads // bounds.kv_heads
        tiles = choose_tiles(
            bounds.kv_heads,
            group,
            bounds.head_size,
            2,
            processors(device),
            capability=capability(device),
        )
        if self._keep:
            self._reserved = (tiles.cut, tiles.dims, device)
            self._kept(self._reserved, bounds.max_tokens, bounds.max_segments)

    def prepare(
        self,
        tables: StepTables,
        *,
        rows: int,
        window: int | None,
        causal: bool,
        max_q_len: int | None = None,
    ) -> TritonStep:
        """See AttentionKernel. One launch after ``reserve``, else none: attend makes schedules.

        The tables must keep their place and content until the step's last layer has run; a graph
        reads them anew in each replay, and ``prepare`` must be called before it.
        """
        check_layer(rows, window)
        step = TritonStep(tables, rows, window, causal, max_q_len)
        segments = tables.seq_info.shape[0]
        if self._reserved is not None and segments:
            self._schedule(self._kept(self._reserved, tables.num_tokens, segments), step)
        return step

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        step: TritonStep,
    ) -> None:
        """See AttentionKernel. Tokens of column 0 go to its row 0, whatever their position."""
        tables = step.tables
        check_write(key, value, key_cache, value_cache, tables, step.rows)
        if not key.numel():
            return
        with current(key.device):
            launch_write(
                key,
                value,
                key_cache,
                value_cache,
                tables.seq_cols,
                tables.positions,
                step.rows,
            )

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        step: TritonStep,
        *,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """See AttentionKernel. Raises ValueError for shapes, dtypes and devices alone."""
        seq_info = step.tables.seq_info
        check_attend(query, key_cache, value_cache, seq_info, out, step.rows)
        if not query.shape[0]:
            return
        if not seq_info.shape[0]:
            out.zero_()
            return
        layer = self._layer(query, key_cache.shape[2], step, scale)
        buffers = self._buffers_for(layer, step, query.shape[0], query.device)
        if buffers.owner is not step:
            self._schedule(buffers, step)
        with current(query.device):
            layer.run(
                query,
                key_cache,
                value_cache,
                out,
                seq_info,
                buffers,
                rows=step.rows,
                window=step.window,
                scale=scale,
                max_q_len=step.max_q_len,
                early=not buffers.is_new,
            )
        buffers.is_new = False

    def _layer(
        self, query: torch.Tensor, heads: int, step: TritonStep, scale: float
    ) -> LayerLaunch:
        _, query_heads, size = query.shape
        windowed, causal, negate = step.window is not None, step.causal, scale < 0
        rows = min(step.rows, 1024)  # what matters is whether a tile has more
        key = (query_heads, heads, size, query.dtype, query.device, windowed, causal, rows, negate)
        layer = self._layers.get(key)
        if layer is None:
            layer = self._layers[key] = LayerLaunch(
                heads,
                query_heads // heads,
                size,
                query.dtype,
                query.device,
                windowed=windowed,
                causal=causal,
                rows=rows,
                negate=negate,
            )
        return layer

    def _buffers_for(
        self, layer: LayerLaunch, step: TritonStep, tokens: int, device: torch.device
    ) -> Buffers:
        shape = (layer.tiles.cut, layer.tiles.dims, device)
        segments = step.tables.seq_info.shape[0]
        if self._keep:
            return self._kept(shape, tokens, segments)
        buffers = step.buffers.get(shape)
        if buffers is None or not buffers.hold(tokens, segments):
            cut, dims, _ = shape
            buffers = step.buffers[shape] = Buffers(cut, dims, tokens, segments, device)
        return buffers

    def _kept(self, shape: _Shape, tokens: int, segments: int) -> Buffers:
        buffers = self._buffers.get(shape)
        if buffers is None or not buffers.hold(tokens, segments):
            if buffers is not None:
                self._outgrown.append(buffers)  # a graph may hold them
                tokens, segments = max(tokens, buffers.tokens), max(segments, buffers.segments)
            cut, dims, device = shape
            buffers = self._buffers[shape] = Buffers(cut, dims, tokens, segments, device)
        return buffers

    def _schedule(self, buffers: Buffers, step: TritonStep) -> None:
        seq_info = step.tables.seq_info
        with current(seq_info.device):
            launch_schedule(buffers, seq_info, seq_info.shape[0], step.window)
        buffers.owner, buffers.is_new = step, True


def _indexed(device: torch.device) -> torch.device:
    """Tensors say cuda:0 where a caller may say cuda."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
