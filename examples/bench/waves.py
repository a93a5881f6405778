"""A process that serves waves of requests from one engine and samples memory meanwhile.

    python -m vllm_kv_columns.bench.waves '{"engine": {...}, "waves": [...], "pause": 3}'

Prints a line of JSON after each wave, and one in the end with all samples.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from .engine import Engine
from .memory import Sampler, device_memory
from .offline import ENDED, ROW, SETTLE, WARM_UP, Server
from .process import session_processes
from .server import store_bytes
from .timeline import CACHE, DEVICE, Timeline, Wave
from .workloads import Workload

__all__ = ["gauge", "record"]

INTERVAL = 0.1  # seconds between two samples


def gauge(server: Server) -> tuple[str, Callable[[], int]]:
    """What is measured, and what reads its bytes.

    On the CPU it is the cache: of columns what the kernel has allocated to the store's memory
    files, of other backends the pool, all of which vLLM allocates at start.
    """
    if server.engine.gpu:
        return DEVICE, device_memory()
    if server.engine.ours:
        session = os.getsid(0)
        return CACHE, lambda: store_bytes(session_processes(session))
    pool = server.pool_bytes()
    return CACHE, lambda: pool


def record(
    server: Server,
    waves: list[Workload],
    pause: float,
    measured: str,
    read: Callable[[], int],
    on_wave: Callable[[Wave], None],
) -> Timeline:
    """Serve the waves one after the other, with so many idle seconds behind each."""
    idle = read()
    sampler = Sampler(lambda: (read(), server.live_tokens), INTERVAL)
    start = time.perf_counter()
    sampler.start()
    served = []
    for workload in waves:
        begin = time.perf_counter() - start
        server.serve(workload)
        served.append(Wave(workload, begin, time.perf_counter() - start))
        time.sleep(pause)
        on_wave(served[-1])
    sampler.stop()
    return Timeline(
        measured=measured,
        token_bytes=server.token_bytes(),
        idle=idle,
        seconds=[round(at - start, 3) for at, _ in sampler.samples],
        used=[used for _, (used, _) in sampler.samples],
        live_tokens=[tokens for _, (_, tokens) in sampler.samples],
        waves=served,
    )


def main(text: str) -> None:
    plan = json.loads(text)
    engine = Engine(**plan["engine"])
    waves = [Workload(**wave) for wave in plan["waves"]]
    server = Server(engine)
    server.serve(WARM_UP if engine.gpu else waves[0])
    time.sleep(SETTLE)

    def on_wave(wave: Wave) -> None:
        print(ROW + json.dumps(asdict(wave)), flush=True)

    timeline = record(server, waves, plan["pause"], *gauge(server), on_wave)
    print(ENDED + json.dumps(asdict(timeline)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
