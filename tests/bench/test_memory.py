"""``memory`` without an engine: what is sampled, and what becomes of it."""

import io
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from vllm_kv_columns.bench import children, waves
from vllm_kv_columns.bench import memory_command as command
from vllm_kv_columns.bench.cli import main, parser
from vllm_kv_columns.bench.engine import Engine
from vllm_kv_columns.bench.memory import Sampler, device_memory
from vllm_kv_columns.bench.memory_arguments import MemoryPlan, make_memory_plan
from vllm_kv_columns.bench.memory_table import memory_table
from vllm_kv_columns.bench.offline import Server
from vllm_kv_columns.bench.process import ChildError
from vllm_kv_columns.bench.server import store_bytes
from vllm_kv_columns.bench.table import console
from vllm_kv_columns.bench.timeline import CACHE, DEVICE, Timeline, Wave
from vllm_kv_columns.bench.workloads import Workload

GIB, MIB = 1 << 30, 1 << 20


def plan(line: str, gpu: bool) -> MemoryPlan:
    whole = parser()
    return make_memory_plan(whole.parse_args(["memory", *line.split()]), gpu, whole.error)


def test_a_load_rises_and_falls_where_none_is_given() -> None:
    for gpu in (True, False):
        found = plan("--model m", gpu=gpu)
        requests = [wave.requests for wave in found.waves]
        assert requests[0] < max(requests) > requests[-1]
        assert found.pause > 0
    assert plan("", gpu=True).backends == ("SDPA_VARLEN", "FLASH_ATTN")
    assert plan("--model m", gpu=False).backends == ("stock", "SDPA_VARLEN")


def test_waves_pause_and_backends_can_be_given() -> None:
    found = plan("--waves 2x3+4 1x16000+384 --pause 0.5 --backends A B A", gpu=True)
    assert found == MemoryPlan(
        gpu=True,
        backends=("A", "B"),
        waves=(Workload(2, 3, 4), Workload(1, 16000, 384)),
        pause=0.5,
    )


def test_prompts_are_alike_or_from_a_half_to_one_and_a_half_times() -> None:
    assert Workload(3, 20, 1).prompt_lengths(uneven=True) == [10, 20, 30]
    assert Workload(3, 20, 1).prompt_lengths(uneven=False) == [20, 20, 20]
    assert Workload(1, 20, 1).prompt_lengths(uneven=True) == [20]


def test_a_sampler_reads_until_it_is_stopped() -> None:
    values = iter(range(10_000))
    sampler = Sampler(lambda: next(values), 0.01)
    assert sampler.now() == 0
    begin = time.perf_counter()
    sampler.start()
    while len(sampler.samples) < 3:
        time.sleep(0.01)
    sampler.stop()
    taken = len(sampler.samples)
    assert [value for _, value in sampler.samples] == list(range(1, taken + 1))
    times = [at for at, _ in sampler.samples]
    assert begin < times[0] < times[1] < times[-1] < time.perf_counter()
    time.sleep(0.05)
    assert len(sampler.samples) == taken


def test_what_a_reading_raises_is_raised_by_stop() -> None:
    def read() -> int:
        raise OSError("the device is gone")

    sampler = Sampler(read, 0.01)
    sampler.start()
    sampler.join(5)
    with pytest.raises(OSError, match="the device is gone"):
        sampler.stop()


def test_device_memory_is_what_nvml_says_of_the_first_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: {0: "first"}[index],
        nvmlDeviceGetMemoryInfo=lambda device: {"first": SimpleNamespace(used=7, total=9)}[device],
    )
    package, third_party = ModuleType("vllm"), ModuleType("vllm.third_party")
    third_party.pynvml = nvml  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.third_party", third_party)
    assert device_memory()() == 7


def test_bytes_of_stores_are_those_of_their_memory_files_once_each() -> None:
    before = store_bytes([os.getpid()])
    with (
        open(os.memfd_create("kv_columns:test"), "wb") as store,
        open(os.memfd_create("another"), "wb") as another,
    ):
        another.write(bytes(MIB))
        another.flush()
        store.write(bytes(3 * MIB))
        store.flush()
        os.ftruncate(store.fileno(), GIB)  # addresses, not memory
        twice = os.dup(store.fileno())
        assert store_bytes([os.getpid()]) == before + 3 * MIB
        os.close(twice)
    assert store_bytes([os.getpid()]) == before


def engine(backend: str, gpu: bool = False) -> Engine:
    return Engine(backend, "m", dummy=False, gpu=gpu)


def server_of(backend: str) -> Server:
    """With 2 layers of 3 KV heads of 64 in bfloat16, and 10 blocks of 16 tokens."""
    model = SimpleNamespace(
        get_num_layers=lambda parallel: 2,
        get_num_kv_heads=lambda parallel: 3,
        get_head_size=lambda: 64,
        dtype=torch.bfloat16,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=None,
        cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16),
    )
    server = object.__new__(Server)
    server.engine = engine(backend)
    server._llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    return server


def test_on_the_cpu_stock_holds_its_pool_and_ours_what_its_files_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, ours = server_of("stock"), server_of("SDPA_VARLEN")
    assert stock.token_bytes() == 2 * 2 * 3 * 64 * 2
    measured, read = waves.gauge(stock)
    assert (measured, read()) == (CACHE, 160 * stock.token_bytes())
    seen: list[list[int]] = []

    def of_session(processes: Sequence[int]) -> int:
        seen.append(list(processes))
        return 5

    monkeypatch.setattr(waves, "store_bytes", of_session)
    measured, read = waves.gauge(ours)
    assert (measured, read()) == (CACHE, 5)
    assert os.getpid() in seen[0]


def test_on_a_gpu_it_is_the_device_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waves, "device_memory", lambda: lambda: 11)
    for backend in ("SDPA_VARLEN", "FLASH_ATTN"):
        server = server_of(backend)
        server.engine = engine(backend, gpu=True)
        measured, read = waves.gauge(server)
        assert (measured, read()) == (DEVICE, 11)


class Pretended:
    """A server whose requests take 0.3 s and 1000 bytes each while they run."""

    def __init__(self) -> None:
        self.live_tokens, self.used = 0, 50

    def token_bytes(self) -> int:
        return 10

    def serve(self, workload: Workload) -> None:
        self.live_tokens, self.used = 100 * workload.requests, 50 + 1000 * workload.requests
        time.sleep(0.3)
        self.live_tokens, self.used = 0, 50


def test_waves_are_served_with_pauses_and_samples_tell_what_was_held_when() -> None:
    server = Pretended()
    told: list[Wave] = []
    loads = [Workload(2, 5, 5), Workload(7, 5, 5)]
    found = waves.record(cast(Server, server), loads, 0.35, CACHE, lambda: server.used, told.append)
    assert (found.measured, found.token_bytes, found.idle) == (CACHE, 10, 50)
    assert [wave.workload for wave in found.waves] == loads
    assert told == found.waves
    assert len(found.seconds) == len(found.used) == len(found.live_tokens)
    assert list(found.seconds) == sorted(found.seconds)
    first, second = found.waves
    assert first.end - first.begin >= 0.3
    assert second.begin - first.end >= 0.35
    for number, wave in enumerate(found.waves):
        at = found.samples(number)
        # A sample within 20 ms of the wave's edges may be of either side.
        inside = [i for i in at if wave.begin + 0.02 < found.seconds[i] < wave.end - 0.02]
        behind = [i for i in at if found.seconds[i] > wave.end + 0.02]
        requests = wave.workload.requests
        assert {found.used[i] for i in inside} == {50 + 1000 * requests}
        assert {found.live[i] for i in inside} == {1000 * requests}
        assert {(found.used[i], found.live_tokens[i]) for i in behind} == {(50, 0)}


def timeline(measured: str = DEVICE, idle: int = 20 * GIB, most: int = 24 * GIB) -> Timeline:
    """Two waves, from 1 to 2 s and from 3 to 4 s, and a sample every half second."""
    return Timeline(
        measured=measured,
        token_bytes=MIB,
        idle=idle,
        seconds=[0.5 * at for at in range(10)],
        used=[idle, idle, idle + GIB, idle + GIB, idle, idle, most, most, idle, idle + MIB],
        live_tokens=[0, 0, 900, 1000, 0, 0, 3000, 3500, 0, 0],
        waves=[Wave(Workload(1, 900, 100), 1.0, 2.0), Wave(Workload(4, 800, 75), 3.0, 4.0)],
    )


def test_a_timeline_goes_through_json_and_back() -> None:
    found = timeline()
    assert Timeline.from_json(json.loads(json.dumps(asdict(found)))) == found


def test_samples_of_a_wave_end_where_the_next_begins() -> None:
    assert [timeline().samples(number) for number in range(2)] == [range(2, 6), range(6, 10)]


def test_the_table_has_peaks_and_what_is_left() -> None:
    text = io.StringIO()
    console(160, text).print(memory_table({"SDPA_VARLEN": timeline()}))
    assert DEVICE in text.getvalue()
    rows = [line.split("│") for line in text.getvalue().splitlines() if "SDPA_VARLEN" in line]
    first, second = ([cell.strip() for cell in row[1:-1]] for row in rows)
    assert first == [
        "SDPA_VARLEN",
        "1 x (900 + 100)",
        "20,480.0",
        "21,504.0",
        "1,000.0",
        "20,480.0",
    ]
    assert second[1:] == ["4 x (800 + 75)", "20,480.0", "24,576.0", "3,500.0", "20,481.0"]


def test_the_process_is_asked_for_the_waves_and_answers_with_a_timeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def run(module: str, argument: str, *rest: Any) -> Any:
        asked.extend([module, json.loads(argument), *rest])
        return [], json.loads(json.dumps(asdict(timeline())))

    monkeypatch.setattr(children, "_run", run)
    found = children.serve_waves(engine("stock"), [Workload(1, 2, 3)], 0.5, 60, print)
    assert found == timeline()
    assert asked[0] == "waves"
    assert Engine(**asked[1]["engine"]) == engine("stock")
    assert [Workload(**wave) for wave in asked[1]["waves"]] == [Workload(1, 2, 3)]
    assert asked[1]["pause"] == 0.5
    assert asked[2:] == ["stock", 60, print]


def test_a_backend_that_fails_is_reported_and_the_others_are_written_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    served: list[tuple[Engine, Sequence[Workload]]] = []

    def serve_waves(of: Engine, loads: Sequence[Workload], *_: Any) -> Timeline:
        served.append((of, loads))
        if of.backend == "stock":
            raise ChildError("stock, waves ended with status 3:\n    it broke")
        return timeline(CACHE)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "serve_waves", serve_waves)
    json_file, plot_file = tmp_path / "deep" / "memory.json", tmp_path / "deeper" / "memory.png"
    line = f"memory --model m --waves 40x3+4 --dtype half --json {json_file} --plot {plot_file}"
    assert main(line.split()) == 1
    assert [(of.backend, of.model, of.max_seqs, of.dtype, of.dummy) for of, _ in served] == [
        ("stock", "m", 40, "half", False),
        ("SDPA_VARLEN", "m", 40, "half", False),
    ]
    assert served[0][1] == (Workload(40, 3, 4),)
    shown = capsys.readouterr().out
    assert "stock failed: stock, waves ended with status 3" in shown
    assert "4 x (800 + 75)" in shown
    found = json.loads(json_file.read_text())
    assert found["command"] == f"python -m vllm_kv_columns.bench {line}"
    assert list(found["failures"]) == ["stock"]
    assert Timeline.from_json(found["backends"]["SDPA_VARLEN"]) == timeline(CACHE)
    assert plot_file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("measured", [DEVICE, CACHE])
def test_the_plot_has_an_area_of_memory_and_a_line_of_live_tokens_for_each_backend(
    measured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    from matplotlib.axes import Axes

    from vllm_kv_columns.bench.memory_plot import plot_memory

    drawn: dict[str, list[list[float]]] = {"fill_between": [], "plot": []}
    labels: list[str] = []

    def record(name: str) -> None:
        original = getattr(Axes, name)

        def call(self: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
            drawn[name].append(list(y))
            labels.append(kwargs["label"])
            return original(self, x, y, *args, **kwargs)

        monkeypatch.setattr(Axes, name, call)

    record("fill_between")
    record("plot")
    found = {"SDPA_VARLEN": timeline(measured), "FLASH_ATTN": timeline(measured, idle=90 * GIB)}
    plot_memory(tmp_path / "memory.png", found, "made up")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert labels == [measured, "live tokens"] * 2
    ours, theirs = drawn["fill_between"]
    under = 20.0 if measured == DEVICE else 0.0  # what ours has in use when idle: no cache
    assert ours[:3] == [20.0 - under, 20.0 - under, 21.0 - under]
    assert theirs[0] == 90.0 - under
    assert drawn["plot"][0][3] == pytest.approx(1000 / 1024)
