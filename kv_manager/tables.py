"""The step's tables as tensors, the form that attention kernels take."""

from dataclasses import dataclass

import torch

from .errors import StepError
from .planner import StepPlan

__all__ = ["StepTables"]


@dataclass(frozen=True)
class StepTables:
    """Tables of one step, all int32 on one device.

    seq_info: [S, 4], rows (q_start, q_len, col, kv_end); spare rows are zero.
    seq_cols, positions: [T], column and position of each token of the packed batch.
    """

    seq_info: torch.Tensor
    seq_cols: torch.Tensor
    positions: torch.Tensor

    def __post_init__(self) -> None:
        for name in ("seq_info", "seq_cols", "positions"):
            tensor: torch.Tensor = getattr(self, name)
            if tensor.dtype != torch.int32:
                raise StepError(f"{name} has dtype {tensor.dtype}; it must be torch.int32")
            if tensor.device != self.seq_info.device:
                raise StepError(
                    f"{name} is on {tensor.device} and seq_info on {self.seq_info.device}; "
                    f"the tables must be on one device"
                )
        if self.seq_info.dim() != 2 or self.seq_info.shape[1] != 4:
            raise StepError(f"seq_info has shape {tuple(self.seq_info.shape)}; it must be [S, 4]")
        if self.seq_cols.dim() != 1 or self.seq_cols.shape != self.positions.shape:
            raise StepError(
                f"seq_cols has shape {tuple(self.seq_cols.shape)} and positions "
                f"{tuple(self.positions.shape)}; both must be [T]"
            )

    @property
    def num_tokens(self) -> int:
        """T, padded tokens included."""
        return self.seq_cols.shape[0]

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        device: torch.device | str = "cpu",
        max_segments: int | None = None,
    ) -> "StepTables":
        """Tables of a plan on ``device``; seq_info is zero-padded to ``max_segments`` rows.

        Raises StepError when the plan has more segments than that.
        """
        segments = len(plan.seq_info)
        size = segments if max_segments is None else max_segments
        if segments > size:
            raise StepError(
                f"the step has {segments} segments and the table {size} rows; raise max_segments"
            )
        seq_info = torch.zeros((size, 4), dtype=torch.int32)
        if segments:
            seq_info[:segments] = torch.tensor(plan.seq_info, dtype=torch.int32)
        return cls(
            seq_info=seq_info.to(device),
            seq_cols=torch.tensor(plan.seq_cols, dtype=torch.int32, device=device),
            positions=torch.tensor(plan.positions, dtype=torch.int32, device=device),
        )
