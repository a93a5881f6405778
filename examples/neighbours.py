"""Two models on one device, each with a ceiling; together the ceilings are more than there need be.

Starts two servers on columns, gives the first requests, then the second, then both, then none, and
shows once a second how much memory the KV cache of each takes. Stock vLLM would hold both ceilings
from start to end.

    python examples/neighbours.py [--models A B] [--ceiling-gib N] [--requests N] [--json FILE]

Runs on the CPU, too, as it is.
"""

import argparse
import json
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from openai import OpenAI

import smollm2
from vllm_kv_columns.bench.server import Server, ServerStartError, serving

MODEL = "neighbour"
TOKENS = 200
WIDTH = 30  # characters of a bar
PHASES = [("the first", (0,)), ("the second", (1,)), ("both", (0, 1)), ("none", ())]
QUIET_SECONDS = 4.0


def arguments(ceiling_bytes: int) -> list[str]:
    return [
        *("--served-model-name", MODEL),
        *("--attention-backend", "SDPA_VARLEN"),
        *("--kv-cache-memory-bytes", str(ceiling_bytes)),
        *("--max-model-len", "2048"),
        *("--max-num-seqs", "32"),
        *("--additional-config", '{"kv_columns": {"retain_seconds": 1}}'),
    ]


def cache_bytes(server: Server) -> int:
    """Physical memory of a server's KV cache, asked of its worker."""
    request = urllib.request.Request(
        server.url + "/collective_rpc",
        data=b'{"method": "kv_columns_stats"}',
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        (stats,) = json.load(answer)["results"]
    return int(stats["resident_bytes"])


class Watch(threading.Thread):
    """Reads both caches once a second and prints a line for each reading."""

    def __init__(self, servers: list[Server], ceiling: int) -> None:
        super().__init__(daemon=True)
        self._servers, self._ceiling, self._ended = servers, ceiling, threading.Event()
        self._begin = time.monotonic()
        self.phase = ""
        self.readings: list[tuple[float, str, list[int]]] = []

    def run(self) -> None:
        while not self._ended.wait(1):
            sizes = [cache_bytes(server) for server in self._servers]
            seconds = time.monotonic() - self._begin
            self.readings.append((round(seconds, 1), self.phase, sizes))
            bars = "  ".join(map(self._bar, sizes))
            print(f"{seconds:5.0f} s  {bars}  {self.phase}", flush=True)

    def _bar(self, size: int) -> str:
        """Of the ceiling."""
        length = min(WIDTH, size * WIDTH // self._ceiling)
        return f"{size / 2**20:8.1f} MiB |{'#' * length:{WIDTH}}|"

    def stop(self) -> None:
        self._ended.set()
        self.join()


def ask(server: Server, count: int) -> None:
    """So many requests at once; returns when all are answered."""
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        def one(i: int) -> None:
            answer = client.completions.create(
                model=MODEL,
                prompt=f"{i}. " + "A neighbour comes and goes. " * (1 + i % 30),
                max_tokens=TOKENS,
                extra_body={"ignore_eos": True},
            )
            assert answer.usage is not None and answer.usage.completion_tokens == TOKENS

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(one, range(count)))


def share(models: list[str], ceiling: int, requests: int) -> Watch:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                serving(model, *arguments(ceiling), env={"VLLM_SERVER_DEV_MODE": "1"}, wait=False)
            )
            for model in models
        ]
        for server in servers:
            server.wait_ready(600)
        watch = Watch(servers, ceiling)
        watch.start()
        try:
            for name, asked in PHASES:
                watch.phase = f"requests for {name}"
                with ThreadPoolExecutor(2) as pool:
                    list(pool.map(lambda i: ask(servers[i], requests), asked))
                time.sleep(QUIET_SECONDS)
        finally:
            watch.stop()
        return watch


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs=2, help="folders or names; SmolLM2-135M twice if absent")
    parser.add_argument("--ceiling-gib", type=float, default=0.5, help="of each KV cache")
    parser.add_argument("--requests", type=int, default=16, help="for each model in a phase")
    parser.add_argument("--json", type=Path, help="write the readings to this file")
    args = parser.parse_args()
    ceiling = int(args.ceiling_gib * 2**30)
    try:
        models = args.models or [str(smollm2.convert())] * 2
        print("  two servers are starting, which takes a minute or two", flush=True)
        watch = share(models, ceiling, args.requests)
    except (smollm2.ModelNotFoundError, ServerStartError) as error:
        print(f"neighbours: FAILED, {error}")
        return 1
    both = [sum(sizes) for _, _, sizes in watch.readings]
    print(
        f"neighbours: together at most {max(both) / 2**20:.1f} MiB and at the end "
        f"{both[-1] / 2**20:.1f} MiB; the ceilings are {2 * ceiling / 2**20:.0f} MiB"
    )
    if args.json:
        args.json.write_text(json.dumps({"ceiling": ceiling, "readings": watch.readings}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
