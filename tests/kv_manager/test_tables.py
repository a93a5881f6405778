"""The step's tables as tensors."""

import pytest
import torch

from vllm_kv_columns.kv_manager import CacheGeometry, StepError, StepTables
from vllm_kv_columns.kv_manager.planner import pad_step, plan_step

from .builders import config

PLAN = pad_step(plan_step([2, 2, 1], {1: 4, 2: 6}, CacheGeometry.of(config())), 5)


def test_tables_hold_the_plan_as_int32() -> None:
    tables = StepTables.of(PLAN)
    assert tables.seq_info.tolist() == [[0, 2, 2, 8], [2, 1, 1, 5]]
    assert tables.seq_cols.tolist() == [2, 2, 1, 0, 0]
    assert tables.positions.tolist() == [6, 7, 4, 0, 0]
    assert {tables.seq_info.dtype, tables.seq_cols.dtype, tables.positions.dtype} == {torch.int32}
    assert tables.num_tokens == 5


def test_spare_segments_are_zero() -> None:
    seq_info = StepTables.of(PLAN, max_segments=8).seq_info
    assert seq_info.shape == (8, 4)
    assert not seq_info[2:].any()


def test_a_step_without_tokens_has_empty_tables() -> None:
    plan = plan_step([], {}, CacheGeometry.of(config()))
    tables = StepTables.of(plan)
    assert tables.seq_info.shape == (0, 4)
    assert tables.seq_cols.dtype == torch.int32


def test_too_few_segment_rows_are_refused() -> None:
    with pytest.raises(StepError, match="the step has 2 segments and the table 1 rows"):
        StepTables.of(PLAN, max_segments=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": torch.zeros(3)}, "positions has dtype torch.float32"),
        ({"seq_cols": torch.zeros(2, dtype=torch.int32)}, r"seq_cols has shape \(2,\)"),
        ({"seq_info": torch.zeros(3, 3, dtype=torch.int32)}, r"seq_info has shape \(3, 3\)"),
        ({"positions": torch.zeros(3, dtype=torch.int32, device="meta")}, "positions is on meta"),
    ],
    ids=["dtype", "length", "columns", "device"],
)
def test_tables_that_do_not_fit_together_are_refused(
    changes: dict[str, torch.Tensor], message: str
) -> None:
    fields = {
        "seq_info": torch.zeros(3, 4, dtype=torch.int32),
        "seq_cols": torch.zeros(3, dtype=torch.int32),
        "positions": torch.zeros(3, dtype=torch.int32),
    }
    with pytest.raises(StepError, match=message):
        StepTables(**{**fields, **changes})
