"""Serving time and cache memory on a GPU: columns against stock FLASH_ATTN and TRITON_ATTN.

    python examples/benchmark_gpu.py [--backends SDPA_VARLEN FLASH_ATTN TRITON_ATTN]
        [--workloads 256x1024+256 256x1024+1 32x15000+64 1x128+256] [--json FILE]

Each backend serves the shape of an 8B Llama with random weights in a process of its own, one after
the other, with vLLM's defaults, and gets the same workloads: requests x (tokens in + tokens out).
Device memory is what NVML reports, at 20 samples a second, less what it was before the first
workload. For columns it also prints the share of the time that steps waited for their rows, all
bookkeeping included, and the longest such wait.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WORKLOADS = ("256x1024+256", "256x1024+1", "32x15000+64", "1x128+256")
VOCABULARY = 128_256
GIB = 1 << 30
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


class MemorySampler(threading.Thread):
    """Bytes in use on device 0, sampled from NVML until stopped: (seconds, bytes) pairs."""

    def __init__(self, interval: float = 0.05) -> None:
        super().__init__(daemon=True)
        from vllm.third_party import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._interval, self._ended = interval, threading.Event()
        self.samples: list[tuple[float, int]] = []

    def now(self) -> int:
        used: int = self._nvml.nvmlDeviceGetMemoryInfo(self._device).used
        return used

    def run(self) -> None:
        while not self._ended.wait(self._interval):
            self.samples.append((time.perf_counter(), self.now()))

    def stop(self) -> None:
        self._ended.set()
        self.join()


def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
    return [
        {
            "prompt_token_ids": [
                (i * 7919 + t * 104_729) % (VOCABULARY - 100) + 50 for t in range(length)
            ]
        }
        for i in range(count)
    ]


def measure(backend: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Serve the workloads after a short warm-up; seconds, memory, waits."""
    from vllm import LLM, SamplingParams

    sampler = MemorySampler()
    llm = LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=16_384,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=args.utilization,
        enable_prefix_caching=False,
        attention_backend=backend,
    )

    def serve(count: int, length: int, output: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        batch = prompts(count, length)
        begin = time.perf_counter()
        results = llm.generate(batch, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(len(one.outputs[0].token_ids) == output for one in results)
        return seconds

    def stats() -> dict[str, Any]:
        found: dict[str, Any] = llm.collective_rpc("kv_columns_stats")[0]
        return found

    columns = backend == "SDPA_VARLEN"
    serve(64, 600, 16)
    time.sleep(2)
    idle = sampler.now()
    sampler.start()
    rows = []
    for workload in args.workloads:
        count, length, output = (int(n) for n in re.split("[x+]", workload))
        before = stats() if columns else {}
        began = len(sampler.samples)
        seconds = min(serve(count, length, output) for _ in range(args.rounds))
        peak = max((used for _, used in sampler.samples[began:]), default=idle)
        row: dict[str, Any] = {
            "requests": count,
            "tokens_in": length,
            "tokens_out": output,
            "seconds": seconds,
            "peak_gib": (peak - idle) / GIB,
        }
        if columns:
            after = stats()
            row["store"] = change = {name: after[name] - before[name] for name in after}
            row["wait_share"] = change["prepare_seconds"] / (args.rounds * seconds)
            row["longest_wait_ms"] = 1000 * after["longest_prepare_seconds"]
            if change["decode_steps"]:
                waited, whole = change["decode_prepare_seconds"], change["decode_seconds"]
                row["decode_wait_share"] = waited / whole
        rows.append(row)
        time.sleep(2)
        row["gib_2s_later"] = (sampler.now() - idle) / GIB
    sampler.stop()
    first = sampler.samples[0][0]
    return {
        "backend": backend,
        "idle_gib": idle / GIB,
        "rows": rows,
        "memory": [(at - first, (used - idle) / GIB) for at, used in sampler.samples],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backends", nargs="+", default=["SDPA_VARLEN", "FLASH_ATTN", "TRITON_ATTN"]
    )
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, help="requests x in + out")
    parser.add_argument("--utilization", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=1, help="of each workload; the best counts")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        backend, model = args.measure
        result = measure(backend, model, args)
        print("RESULT " + json.dumps(result), flush=True)
        return
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(SHAPE))
        for backend in args.backends:
            run = subprocess.run(
                [sys.executable, *sys.argv, "--measure", backend, model],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
            if run.returncode or not lines:
                print(run.stdout[-6000:], f"\nbenchmark: {backend} failed, its output is above")
                continue
            found[backend] = json.loads(lines[0].removeprefix("RESULT "))
            for row in found[backend]["rows"]:
                print(
                    f"{backend:12} {row['requests']:4} x ({row['tokens_in']} + "
                    f"{row['tokens_out']}): {row['seconds']:.2f} s, memory +"
                    f"{row['peak_gib']:.1f} GiB, 2 s later +{row['gib_2s_later']:.1f} GiB"
                    + (
                        f"; steps waited {100 * row['wait_share']:.2f} % of the time, at most "
                        f"{row['longest_wait_ms']:.1f} ms, steps of decodes alone "
                        f"{100 * row.get('decode_wait_share', math.nan):.2f} %"
                        if "wait_share" in row
                        else ""
                    ),
                    flush=True,
                )
            print(f"{backend:12} idle: {found[backend]['idle_gib']:.1f} GiB in use", flush=True)
            if args.json:
                args.json.write_text(json.dumps(found))
    if len(found) < len(args.backends):
        sys.exit(1)
    ours = found.get("SDPA_VARLEN")
    for backend, stock in found.items():
        if ours and stock is not ours:
            ratios = (
                f"{mine['seconds'] / theirs['seconds']:.2f}"
                for mine, theirs in zip(ours["rows"], stock["rows"], strict=True)
            )
            print(f"time, columns / {backend}:", *ratios)


if __name__ == "__main__":
    main()
