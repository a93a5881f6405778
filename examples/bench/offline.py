"""A process that serves workloads from one engine. Prints a line of JSON after each.

python -m vllm_kv_columns.bench.offline '{"engine": {...}, "workloads": [...], "rounds": 1}'
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from .engine import Engine
from .memory import Sampler, device_memory
from .model import prompt
from .workloads import Workload

__all__ = ["ENDED", "ROW", "SETTLE", "WARM_UP", "Server", "Stream", "percentile"]

ROW, ENDED = "KV_COLUMNS_ROW ", "KV_COLUMNS_ENDED "
GIB = 1 << 30
SETTLE = 2  # seconds after a workload until its memory should be back
WARM_UP = Workload(64, 600, 16)  # on a GPU


@dataclass
class Stream:
    """Tokens of a batch as they come.

    gaps: seconds from a request's token to its next. prompts: tokens of each request's prompt.
    live: tokens that running requests have in the cache; a prompt counts from its first answer on,
    an answer from the next one on.
    """

    gaps: list[float] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    live: int = 0
    _last: dict[str, float] = field(default_factory=dict)

    def add(self, request: str, tokens: int, now: float) -> None:
        if not tokens:
            return
        if request in self._last:
            self.gaps.append(now - self._last[request])
        self._last[request] = now
        self.live += tokens if request in self.tokens else self.prompts[request] + tokens - 1
        self.tokens[request] = self.tokens.get(request, 0) + tokens

    def end(self, request: str) -> None:
        """The request is done, and its tokens no longer live."""
        self.live -= self.prompts[request] + self.tokens[request] - 1


def percentile(values: list[float], percent: int) -> float:
    """Between the two nearest values, as numpy has it."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class Server:
    """vLLM's engine in this process, fed with token ids."""

    def __init__(self, engine: Engine) -> None:
        from vllm import LLM

        self.engine = engine
        self._llm = LLM(engine.model, skip_tokenizer_init=True, **engine.options())
        self._vocabulary = self._llm.llm_engine.model_config.get_vocab_size()
        self._batches = 0
        self.live_tokens = 0
        """Of running requests in the cache, as of the last step; see ``Stream.live``."""

    def serve(self, workload: Workload) -> tuple[float, Stream]:
        """Seconds until all requests are done, and their tokens as they came."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        lengths = self.lengths(workload)
        prompts = [prompt(i, length, self._vocabulary) for i, length in enumerate(lengths)]
        llm, stream = self._llm.llm_engine, Stream()
        self._batches += 1
        begin = time.perf_counter()
        for i, ids in enumerate(prompts):
            params = SamplingParams(
                temperature=0,
                max_tokens=workload.tokens_out,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            request = f"{self._batches}-{i}"
            llm.add_request(request, {"prompt_token_ids": ids}, params)
            stream.prompts[request] = len(ids)
        while llm.has_unfinished_requests():
            outputs = llm.step()
            now = time.perf_counter()
            for output in outputs:
                stream.add(output.request_id, len(output.outputs[0].token_ids), now)
                if output.finished:
                    stream.end(output.request_id)
            self.live_tokens = stream.live
        seconds = time.perf_counter() - begin
        assert list(stream.tokens.values()) == [workload.tokens_out] * workload.requests
        return seconds, stream

    def lengths(self, workload: Workload) -> list[int]:
        """Of the prompts: all alike on a GPU, uneven on the CPU."""
        return workload.prompt_lengths(uneven=not self.engine.gpu)

    def token_bytes(self) -> int:
        """Of the K and V of a token in all layers."""
        config = self._llm.llm_engine.vllm_config
        model, parallel = config.model_config, config.parallel_config
        numbers: int = (
            2
            * model.get_num_layers(parallel)
            * model.get_num_kv_heads(parallel)
            * model.get_head_size()
        )
        return numbers * int(model.dtype.itemsize)

    def pool_bytes(self) -> int:
        """Of the blocks that vLLM says it has allocated for the cache."""
        cache = self._llm.llm_engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size) * self.token_bytes()

    def stats(self) -> dict[str, Any]:
        """Of the columns; empty for another backend."""
        if not self.engine.ours:
            return {}
        found: dict[str, Any] = self._llm.collective_rpc("kv_columns_stats")[0]
        return found


def measure(server: Server, workload: Workload, rounds: int) -> dict[str, Any]:
    """Serve a workload so many times; medians of the rounds."""
    before = server.stats()
    seconds, gaps = [], []
    for _ in range(rounds):
        took, stream = server.serve(workload)
        seconds.append(took)
        gaps += stream.gaps
    after, median = server.stats(), statistics.median(seconds)
    made = workload.requests * workload.tokens_out
    row: dict[str, Any] = {
        "requests": workload.requests,
        "tokens_in": workload.tokens_in,
        "tokens_out": workload.tokens_out,
        "rounds": seconds,
        "seconds": median,
        "output_tokens_per_s": made / median,
        "total_tokens_per_s": (made + sum(server.lengths(workload))) / median,
        "itl_ms_mean": 1e3 * statistics.fmean(gaps) if gaps else None,
        "itl_ms_p99": 1e3 * percentile(gaps, 99) if gaps else None,
    }
    if "prepare_seconds" in after:
        row["store"] = change = {name: after[name] - before[name] for name in after}
        row["wait_share"] = change["prepare_seconds"] / sum(seconds)
        row["longest_wait_ms"] = 1e3 * after["longest_prepare_seconds"]
        if change["decode_steps"]:
            row["decode_wait_share"] = change["decode_prepare_seconds"] / change["decode_seconds"]
    return row


def main(text: str) -> None:
    plan = json.loads(text)
    engine = Engine(**plan["engine"])
    workloads = [Workload(**workload) for workload in plan["workloads"]]
    server = Server(engine)
    sampler = Sampler(device_memory()) if engine.gpu else None
    for workload in [WARM_UP] if engine.gpu else workloads:
        server.serve(workload)  # to warm up
    ended: dict[str, Any] = {}
    idle = 0
    if sampler is not None:
        time.sleep(SETTLE)
        idle = sampler.now()
        sampler.start()
    for workload in workloads:
        began = len(sampler.samples) if sampler is not None else 0
        row = measure(server, workload, plan["rounds"])
        if sampler is not None:
            peak = max((used for _, used in sampler.samples[began:]), default=idle)
            row["peak_gib"] = (peak - idle) / GIB
            time.sleep(SETTLE)
            row["gib_2s_later"] = (sampler.now() - idle) / GIB
        print(ROW + json.dumps(row), flush=True)
    if sampler is not None:
        sampler.stop()
        first = sampler.samples[0][0]
        ended["idle_gib"] = idle / GIB
        ended["memory"] = [
            (round(at - first, 3), round((used - idle) / GIB, 3)) for at, used in sampler.samples
        ]
    print(ENDED + json.dumps(ended), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
