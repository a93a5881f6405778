"""``kernels`` from end to end, on the CPU with small steps: output, JSON, plot, status."""

import argparse
import io
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.tiny import CPU, TINY, Spoiled
from vllm_kv_columns.bench import kernels, kernels_command, timing
from vllm_kv_columns.bench.backend import Backend, Step
from vllm_kv_columns.bench.columns import Columns
from vllm_kv_columns.bench.flash3 import FlashAttention3
from vllm_kv_columns.bench.problem import Problem
from vllm_kv_columns.bench.results import Figure, ShapeResult, write_json
from vllm_kv_columns.bench.shapes import SHAPES, Shape
from vllm_kv_columns.bench.table import console, kernel_table, print_machine
from vllm_kv_columns.bench.timing import Time


class Picky(Backend):
    """An anchor that does not take one of the shapes."""

    name = "triton"
    title = "picky"

    def obstacle(self, device: torch.device) -> str | None:
        return None

    def step(self, problem: Problem) -> Step:
        if problem.shape.name == "ring":
            raise RuntimeError("no window here\nand a long story")
        return Columns("torch-sdpa").step(problem)


def command(
    tmp_path: Path,
    *backends: Backend,
    plot: Path | None = None,
    shapes: Sequence[Shape] = TINY[:2],
) -> tuple[int, Any]:
    file = tmp_path / "deep" / "results.json"
    args = argparse.Namespace(seconds=0.01, bound=1e-2, json=file, plot=plot, line="the command")
    status = kernels_command.measure_and_show(args, shapes, backends, CPU)
    return status, json.loads(file.read_text())


def test_without_fa3_it_says_so_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = command(tmp_path, Columns("torch-sdpa"), FlashAttention3())
    assert status == 0
    shown = capsys.readouterr().out
    assert "fa3: not found, going on without it: it needs a CUDA device, not cpu" in shown
    assert found["anchors"]["fa3"]["found"] is False
    for shape in found["shapes"]:
        assert shape["us"]["ours"] > 0
        assert shape["ratio"] is None


@pytest.fixture
def exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that four digits hold: what is computed from them then differs by one rounding."""
    times = itertools.cycle((1234.0, 2345.0, 3456.0))

    def time_step(step: Step, seconds: float) -> Time:
        measured = timing.time_step(step, seconds)
        return replace(measured, us=next(times))

    monkeypatch.setattr(kernels, "time_step", time_step)


@pytest.mark.usefixtures("exact_times")
def test_an_anchor_that_fails_on_one_shape_is_reported_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = command(tmp_path, Columns("torch-sdpa"), Picky())
    assert status == 0
    assert "ring, triton: RuntimeError: no window here" in capsys.readouterr().out
    decode, ring = found["shapes"]
    assert decode["failures"] == {}
    ratio = decode["us"]["triton"] / decode["us"]["ours"]
    assert decode["triton_ratio"] == pytest.approx(ratio, rel=1e-3)
    assert ring["failures"] == {"triton": "RuntimeError: no window here"}
    assert ring["us"]["triton"] is None
    assert ring["us"]["ours"] > 0


def test_a_wrong_result_of_ours_is_named_and_the_status_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def half_too_much(step: Step, index: int) -> None:
        step.out *= 1.5

    status, found = command(tmp_path, Spoiled(half_too_much))
    assert status == 1
    shown = capsys.readouterr().out
    assert "WRONG" in shown
    assert "decode, ours: not timed: relative error 0.5" in shown
    assert found["shapes"][0]["us"]["ours"] is None
    assert found["shapes"][0]["error"]["ours"] == pytest.approx(0.5, abs=0.01)


def test_a_step_in_a_model_is_checked_timed_and_written_like_all_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [one for one in TINY if one.kind == "step"]
    status, found = command(tmp_path, Columns("torch-sdpa"), shapes=steps)
    assert status == 0
    (shape,) = found["shapes"]
    assert (shape["name"], shape["kind"]) == ("step", "step")
    assert shape["us"]["ours"] > 0
    assert 0 < shape["error"]["ours"] < 1e-2
    assert " TB/s)" in capsys.readouterr().out

    def wrong(step: Step, index: int) -> None:
        step.out *= 1.5

    status, found = command(tmp_path, Spoiled(wrong), shapes=steps)
    assert status == 1
    assert found["shapes"][0]["us"]["ours"] is None


@pytest.mark.usefixtures("exact_times")
def test_json_names_command_machine_anchors_and_what_was_measured(tmp_path: Path) -> None:
    _, found = command(tmp_path, Columns("torch-sdpa"))
    assert list(found) == ["command", "machine", "anchors", "shapes"]
    assert found["command"] == "the command"
    assert {"device", "driver", "torch", "triton", "vllm"} <= set(found["machine"])
    shape = found["shapes"][0]
    assert (shape["name"], shape["kind"], shape["heads"], shape["layers"]) == (
        "decode",
        "decode",
        2,
        3,
    )
    us = shape["us"]["ours"]
    assert shape["tb_per_s"]["ours"] == pytest.approx(TINY[0].kv_bytes / us / 1e6, rel=1e-3)
    assert shape["tflop_per_s"]["ours"] == pytest.approx(TINY[0].flop / us / 1e6, rel=1e-3)
    assert 0 < shape["error"]["ours"] < 1e-2


def test_caches_that_do_not_fit_end_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels_command, "run", full)
    args = argparse.Namespace(seconds=0.01, bound=1e-2, json=tmp_path / "f", plot=None, line="")
    backends = [Columns("torch-sdpa")]
    assert kernels_command.measure_and_show(args, SHAPES[:1], backends, CPU) == 1
    assert "the caches need 32.5 GiB of free device memory" in capsys.readouterr().out
    assert not (tmp_path / "f").exists()


def made_up() -> list[ShapeResult]:
    decode, prefill = SHAPES[0], SHAPES[7]
    return [
        ShapeResult(
            decode,
            {
                "ours": Figure(us=256.0, error=0.002),
                "fa3": Figure(us=320.0, error=0.002),
                "triton": Figure(failure="RuntimeError: no"),
            },
        ),
        ShapeResult(
            prefill,
            {
                "ours": Figure(us=1000.0, error=0.003),
                "fa3": Figure(us=850.0, error=0.002),
                "triton": Figure(us=7000.0, error=0.002),
            },
        ),
    ]


def test_rates_are_bytes_and_flop_over_time() -> None:
    decode, prefill = made_up()
    # 64 sequences x 4096 rows x (K, V) x 8 heads x 128 numbers x 2 bytes in 256 us
    assert decode.tb_per_s("ours") == pytest.approx(64 * 4096 * 2 * 8 * 128 * 2 / 256e-6 / 1e12)
    # 8192 x 8193 / 2 pairs x 32 heads x 4 x 128 in 1 ms
    flop = 8192 * 8193 / 2 * 32 * 4 * 128
    assert prefill.tflop_per_s("ours") == pytest.approx(flop / 1e-3 / 1e12)
    assert decode.ratio("fa3") == 1.25
    assert decode.ratio("triton") is None


def test_the_table_shows_figures_ratios_and_what_failed() -> None:
    text = io.StringIO()
    console(160, text).print(kernel_table(made_up()))
    lines = text.getvalue().splitlines()
    (decode,) = [line.split("│") for line in lines if "decode-64x4k" in line]
    (prefill,) = [line.split("│") for line in lines if "prefill-1x8k" in line]
    assert [cell.strip() for cell in decode[1:-1]] == [
        "decode-64x4k",
        "256.0 (4.19 TB/s)",
        "320.0 (3.36 TB/s)",
        "failed",
        "1.25",
        "-",
        "2.0e-03",
    ]
    assert [cell.strip() for cell in prefill[4:7]] == ["7,000.0 (79 TFLOP/s)", "0.85", "7.00"]


def test_the_header_names_the_device_versions_and_what_it_reaches() -> None:
    text = io.StringIO()
    machine = {
        "device": "NVIDIA H200",
        "driver": "580.1",
        "torch": "2.11",
        "triton": None,
        "copy_tb_per_s": 4.28,
        "read_tb_per_s": 4.4,
        "matmul_tflop_per_s": 700.1,
    }
    print_machine(console(160, text), machine, {"fa3": {"found": True, "title": "FA3 of vLLM 1"}})
    assert text.getvalue().splitlines() == [
        "NVIDIA H200: torch 2.11, driver 580.1",
        "device copy 4.28 TB/s, read 4.4 TB/s, 8192^3 product 700.1 TFLOP/s",
        "fa3: FA3 of vLLM 1",
    ]


def test_the_plot_is_a_png_with_a_bar_for_each_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    from matplotlib.axes import Axes

    from vllm_kv_columns.bench.plot import plot_ratios

    bars: list[tuple[list[float], list[float]]] = []
    original = Axes.bar

    def bar(self: Any, x: Any, height: Any, *args: Any, **kwargs: Any) -> Any:
        bars.append((x, height))
        return original(self, x, height, *args, **kwargs)

    monkeypatch.setattr(Axes, "bar", bar)
    file = tmp_path / "deep" / "plot.png"
    plot_ratios(file, made_up(), "made up")
    assert file.read_bytes().startswith(b"\x89PNG")
    (fa3_at, fa3), (triton_at, triton) = bars
    assert (len(fa3_at), len(triton_at)) == (2, 1)
    assert fa3 == pytest.approx([0.25, -0.15])
    assert triton == pytest.approx([6.0])


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    write_json(file, {"shapes": [1]})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(file, {"shapes": [float("nan")]})
    assert json.loads(file.read_text()) == {"shapes": [1]}
