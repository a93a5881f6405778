"""``serve`` without a server: what is asked of the processes, and what becomes of their answers."""

import io
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_kv_columns.bench import serve as command
from vllm_kv_columns.bench.cli import main, parser
from vllm_kv_columns.bench.engine import Engine
from vllm_kv_columns.bench.model import VOCABULARY, prompt, write_llama
from vllm_kv_columns.bench.offline import Stream, percentile
from vllm_kv_columns.bench.process import ChildError, run_child, session_processes
from vllm_kv_columns.bench.serve_arguments import Plan, make_plan
from vllm_kv_columns.bench.serve_table import load_table, workload_table
from vllm_kv_columns.bench.table import console
from vllm_kv_columns.bench.workloads import Load, Workload


def plan(line: str, gpu: bool) -> Plan:
    whole = parser()
    return make_plan(whole.parse_args(["serve", *line.split()]), gpu, whole.error)


def test_on_a_gpu_it_serves_what_was_asked_for() -> None:
    found = plan("", gpu=True)
    assert found.backends == ("SDPA_VARLEN", "FLASH_ATTN", "TRITON_ATTN")
    assert [str(one) for one in found.workloads] == [
        "256 x (1024 + 256)",
        "32 x (15000 + 64)",
        "1 x (128 + 256)",
    ]
    assert found.loads == (
        Load(4, 48, 1024, 256),
        Load(8, 96, 1024, 256),
        Load(16, 192, 1024, 256),
    )
    assert (found.turns, found.model) == (1, None)


def test_on_the_cpu_it_takes_turns_on_the_model_that_was_given() -> None:
    found = plan("--model folder --rates 0.5 --load 32+8", gpu=False)
    assert found.backends == ("stock", "SDPA_VARLEN")
    assert found.workloads == (Workload(16, 128, 128),)
    assert found.loads == (Load(0.5, 6, 32, 8),)
    assert (found.turns, found.model) == (2, "folder")


def test_it_can_be_made_smaller() -> None:
    found = plan("--workloads 2x3+4 --rates --requests 5 --backends FLASH_ATTN", gpu=True)
    assert found.workloads == (Workload(2, 3, 4),)
    assert found.loads == ()
    assert found.backends == ("FLASH_ATTN",)


def test_all_backends_have_the_same_options_but_for_their_name() -> None:
    ours, stock = (Engine(name, "m", dummy=True, gpu=True) for name in ("SDPA_VARLEN", "stock"))
    assert ours.options() == {**stock.options(), "attention_backend": "SDPA_VARLEN"}
    assert "--no-enable-prefix-caching" in stock.flags()
    flags = Engine("FLASH_ATTN", "m", dummy=True, gpu=False, eager=True).flags()
    assert flags[flags.index("--attention-backend") + 1] == "FLASH_ATTN"
    assert flags[flags.index("--load-format") + 1] == "dummy"
    assert "--enforce-eager" in flags


def test_latency_is_from_a_requests_token_to_its_next() -> None:
    stream = Stream(prompts={"a": 10, "b": 20})
    for request, tokens, now in [("a", 1, 1.0), ("b", 1, 1.5), ("a", 1, 3.0), ("b", 0, 4.0)]:
        stream.add(request, tokens, now)
    stream.add("b", 1, 4.5)
    assert stream.gaps == [2.0, 3.0]
    assert stream.tokens == {"a": 2, "b": 2}


def test_tokens_live_from_a_prompts_first_answer_until_its_request_ends() -> None:
    stream, live = Stream(prompts={"a": 10, "b": 20}), []
    for request, tokens in [("a", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 1)]:
        stream.add(request, tokens, 0.0)
        live.append(stream.live)
    assert live == [0, 10, 30, 32, 33]  # the last token of each is not in the cache yet
    stream.end("a")
    assert stream.live == 20
    stream.end("b")
    assert stream.live == 0


def test_percentile_lies_between_the_nearest_values() -> None:
    values = [float(n) for n in range(101)]
    assert percentile(values[::-1], 99) == 99.0
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([5.0], 99) == 5.0


def test_n_words_of_the_tokenizer_are_n_tokens_there_and_back(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_llama(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCABULARY
    ids = prompt(3, 500)
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (32, 8)


def test_prompts_share_no_beginning() -> None:
    assert len({prompt(number, 1)[0] for number in range(256)}) == 256


def turn(seconds: list[float], itl: float | None) -> dict[str, Any]:
    middle = sorted(seconds)[len(seconds) // 2]
    row = {
        "requests": 2,
        "tokens_in": 10,
        "tokens_out": 5,
        "rounds": seconds,
        "seconds": middle,
        "output_tokens_per_s": 10 / middle,
        "total_tokens_per_s": 30 / middle,
        "itl_ms_mean": itl,
        "itl_ms_p99": itl,
    }
    return {"rows": [row]}


def test_turns_are_merged_by_the_median_of_all_rounds() -> None:
    (row,) = command.merge_turns([turn([1.0, 9.0, 2.0], 4.0), turn([4.0, 5.0, 8.0], 6.0)])
    assert row["rounds"] == [1.0, 9.0, 2.0, 4.0, 5.0, 8.0]
    assert row["seconds"] == 4.5
    assert row["output_tokens_per_s"] == pytest.approx(10 / 4.5)
    assert row["total_tokens_per_s"] == pytest.approx(30 / 4.5)
    assert row["itl_ms_mean"] == 5.0
    (row,) = command.merge_turns([turn([1.0], None)])
    assert row["itl_ms_p99"] is None


def load_row(rate: float, output: float) -> dict[str, Any]:
    return {
        "rate": rate,
        "requests": 5,
        "tokens_in": 10,
        "tokens_out": 5,
        "output_tokens_per_s": output,
        "total_tokens_per_s": 3 * output,
        "requests_per_s": 1.0,
        "itl_ms_mean": 7.25,
        "itl_ms_p99": 9.0,
        "ttft_ms_mean": 50.0,
        "ttft_ms_p99": 80.0,
    }


def cells(table: Any, first: str) -> list[list[str]]:
    text = io.StringIO()
    console(200, text).print(table)
    rows = [line.split("│") for line in text.getvalue().splitlines() if first in line]
    return [[cell.strip() for cell in row[1:-1]] for row in rows]


def test_tables_show_ours_over_each_backend() -> None:
    ours = turn([2.0], 4.0)["rows"][0]
    ours |= {"peak_gib": 1.25, "gib_2s_later": 0.0, "wait_share": 0.0123, "longest_wait_ms": 4.0}
    found = {
        "SDPA_VARLEN": {"rows": [ours], "loads": [load_row(2, 90.0)]},
        "FLASH_ATTN": {"rows": turn([1.5], 3.0)["rows"], "loads": [load_row(2, 100.0)]},
        "TRITON_ATTN": {},
    }
    first, second = cells(workload_table(found), "2 x (10 + 5)")
    assert first[1:7] == ["SDPA_VARLEN", "5.0", "15.0", "", "4.00", "4.00"]
    assert first[7:] == ["2.00", "1.2", "0.0", "1.23 %, <= 4.0 ms"]
    assert second[1:5] == ["FLASH_ATTN", "6.7", "20.0", "0.750"]
    _, second = cells(load_table(found), "5 at 2/s (10 + 5)")
    assert second[1:] == ["FLASH_ATTN", "100.0", "300.0", "0.900", "7.25", "9.00", "50.0", "80.0"]


def test_a_backend_that_fails_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[tuple[str, str]] = []

    def workloads(engine: Engine, *args: Any) -> dict[str, Any]:
        served.append((engine.backend, "workloads"))
        if engine.backend == "stock":
            raise ChildError("stock, offline ended with status 3:\n    it broke")
        return turn([1.0], 2.0)

    def loads(engine: Engine, loads: Sequence[Load], *args: Any) -> list[dict[str, Any]]:
        served.append((engine.backend, "loads"))
        return [load_row(load.rate, 10.0) for load in loads]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "serve_workloads", workloads)
    monkeypatch.setattr(command, "serve_loads", loads)
    file = tmp_path / "serve.json"
    line = f"serve --model m --turns 2 --rates 2 --workloads 2x10+5 --json {file}"
    assert main(line.split()) == 1
    assert served == [
        ("stock", "workloads"),
        ("SDPA_VARLEN", "workloads"),
        ("SDPA_VARLEN", "workloads"),
        ("SDPA_VARLEN", "loads"),
    ]
    shown = capsys.readouterr().out
    assert "stock failed: stock, offline ended with status 3" in shown
    assert "2 x (10 + 5)" in shown
    found = json.loads(file.read_text())
    assert found["command"] == f"python -m vllm_kv_columns.bench {line}"
    assert list(found["failures"]) == ["stock"]
    assert found["backends"]["SDPA_VARLEN"]["loads"][0]["rate"] == 2


def test_a_child_that_fails_shows_the_end_of_what_it_printed() -> None:
    code = "print(*range(100), sep='\\n'); raise SystemExit('it broke')"
    with pytest.raises(ChildError, match=r"(?s)the child ended with status 1:.*98.*it broke") as it:
        run_child([sys.executable, "-c", code], "the child", 20)
    assert " 42\n" not in str(it.value)


def test_a_child_that_hangs_is_killed_with_its_own_children() -> None:
    code = (
        "import os, subprocess, sys, time; print(os.getsid(0), flush=True); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    )
    sessions: list[int] = []
    begin = time.monotonic()
    with pytest.raises(ChildError, match="the child was not done in 1 s"):
        run_child(
            [sys.executable, "-c", code], "the child", 1, on_line=lambda s: sessions.append(int(s))
        )
    assert time.monotonic() - begin < 20
    assert len(sessions) == 1
    assert session_processes(sessions[0]) == []


def test_a_childs_lines_come_as_they_are_printed() -> None:
    lines: list[str] = []
    code = "print('one'); print('two')"
    assert run_child([sys.executable, "-c", code], "it", 20, on_line=lines.append) == lines
    assert lines == ["one", "two"]
