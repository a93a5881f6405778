"""Arguments that make no sense end with status 2 and a sentence that says what to do."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_kv_columns.bench import __main__ as entry
from vllm_kv_columns.bench.cli import main


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def lacking(name: str) -> Callable[[str], object]:
    find = importlib.util.find_spec
    return lambda asked: None if asked == name else find(asked)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: {kernels,serve,memory}"),
        ("kernels", "kernels needs a CUDA device, and torch finds none"),
        ("kernels --shapes decode 3x3", "no shape has '3x3' in its name; the shapes are decode-64"),
        ("kernels --kernel fast", "unknown attention kernel 'fast'; known are: torch-sdpa, triton"),
        ("kernels --backends fa2", "invalid choice: 'fa2'"),
        ("kernels --seconds 0", "--seconds and --bound must be above 0"),
        ("serve", "torch finds no CUDA device, and on the CPU serve needs --model"),
        ("serve --model m --workloads 3x4", "'3x4' is no workload; write REQUESTSxIN+OUT"),
        ("serve --model m --workloads 0x4+1", "'0x4+1' is no workload"),
        ("serve --model m --load 7", "'1x7' is no workload"),
        ("serve --model m --rates 0", "must be above 0"),
        ("serve --model m --requests 0 --rates 1", "must be above 0"),
        ("serve --model m --utilization 1.5", "--utilization must be above 0 and at most 1"),
        ("memory", "torch finds no CUDA device, and on the CPU memory needs --model"),
        ("memory --model m --waves 3x4", "'3x4' is no workload; write REQUESTSxIN+OUT"),
        ("memory --model m --waves", "argument --waves: expected at least one argument"),
        ("memory --model m --pause 0", "--pause and --timeout must be above 0"),
        ("memory --model m --timeout -1", "--pause and --timeout must be above 0"),
        ("memory --model m --utilization 0", "--utilization must be above 0 and at most 1"),
        (
            "memory --model m --waves 1x9+9 2x2730+2",
            "a request of 2 x (2730 + 2) has up to 4097 tokens, and the engine takes 4096",
        ),
        ("serve --model m --workloads", "nothing to serve: give --workloads, --rates or both"),
    ],
)
def test_it_says_what_is_wrong(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["kernels", "memory"])
def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lacking("matplotlib"))
    with pytest.raises(SystemExit):
        main([command, "--plot", str(tmp_path / "plot.png")])
    assert "pip install 'vllm-kv-columns[bench]'" in capsys.readouterr().err


def test_without_rich_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lacking("rich"))
    with pytest.raises(SystemExit, match=r"need rich: pip install 'vllm-kv-columns\[bench\]'"):
        entry.main()
