"""Runs one vLLM engine in a process of its own, JSON in, JSON out.

`python -m tests.plugin.engine FILE`.

Job: {"llm": LLM arguments, "fault": name or absent, "weights": "random" or absent, "events": true
if the KV cache events are to be in the result, "runs": [{"prompts": [token ids], "params": sampling
parameters, "abort_after": tokens or absent, "one_by_one": true or absent}, or {"chats": [[token ids
of each turn]], "params": the same}]}. A run may have a "pause": seconds to wait before it, or a
"sleep": level to sleep at and wake up from; what the store holds then is in the result. It may have
"reset": true, to have the prefix cache emptied before it, and "limits": {step: bytes}, set before
that step of all. What else a run may be says `arrivals.serve_special`. One process holds scheduler
and worker, so that a fault can be planted in both and the store be read at every step; with tensor
parallelism the workers are processes of their own.
"""

import itertools
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.plugin import arrivals
from tests.plugin.router import Router

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"


def plant(fault: str) -> None:
    """Break the cache in one way that its tests must notice."""
    from vllm_kv_columns.kv_manager.config import RingPolicy
    from vllm_kv_columns.plugin.column_driver import ColumnDriver

    if fault == "ring rows cut to the window":
        RingPolicy.rows = lambda self, capacity, max_write: min(capacity, self.window)  # type: ignore[method-assign]
    elif fault == "column freed too early":
        stock = ColumnDriver.prepare
        steps = itertools.count()

        def prepare(self: Any, plan: Any) -> None:
            stock(self, plan)
            if next(steps) == 5:
                self.store.release(column := next(iter(self._column.values())))
                self.store.prepare_write(column, 0, 512)

        ColumnDriver.prepare = prepare  # type: ignore[method-assign]
    elif fault == "wrong column":
        from vllm_kv_columns.attention_backend.vllm.tables import HostTables

        make = HostTables.make

        def swapped(self: Any, batch: Any) -> Any:
            step = make(self, batch)
            if step.seq_info.shape[0] > 1:
                step.seq_info[:2, 2] = step.seq_info[:2, 2].flip(0)
            return step

        HostTables.make = swapped  # type: ignore[method-assign]
    elif fault == "memory taken away for a while":
        take_memory_away()
    elif fault == "no memory where a prompt ends":
        take_memory_where_prompts_end()
    else:
        raise ValueError(fault)


class Shortage:
    """While it holds, the store of this process gets no new page, as if others had the memory."""

    def __init__(self) -> None:
        from vllm.platforms import current_platform

        from vllm_kv_columns.kv_manager import StoreFullError
        from vllm_kv_columns.kv_manager.hooks import store_class
        from vllm_kv_columns.plugin.options import ColumnOptions

        store: Any = store_class(ColumnOptions.parse({}, current_platform.device_type).store)
        one, many, obtainable = store.prepare_write, store.prepare_writes, store.obtainable_pages
        self._taken = False

        def check(this: Any, wants: dict[int, tuple[int, int]]) -> None:
            if self._taken and this.pages_needed(wants):
                raise StoreFullError("the test holds the memory", 1)

        def prepare_write(this: Any, col: int, start: int, end: int) -> None:
            check(this, {col: (start, end)})
            one(this, col, start, end)

        def prepare_writes(this: Any, wants: dict[int, tuple[int, int]]) -> None:
            check(this, wants)
            many(this, wants)

        def can_have(this: Any) -> int:
            pages: int = this.committed_pages if self._taken else obtainable(this)
            return pages

        store.prepare_write = prepare_write
        store.prepare_writes = prepare_writes
        store.obtainable_pages = can_have

    def hold(self, much: bool) -> None:
        self._taken = much


def take_memory(when: Callable[[Any], bool]) -> None:
    """In steps with such a plan the store gets no new page."""
    from vllm_kv_columns.plugin.column_driver import ColumnDriver

    shortage, prepare = Shortage(), ColumnDriver.prepare

    def held(self: Any, plan: Any) -> None:
        shortage.hold(when(plan))
        prepare(self, plan)

    ColumnDriver.prepare = held  # type: ignore[method-assign]


def take_memory_away(first: int = 10, last: int = 90) -> None:
    """From one step to another the store gets no new page."""
    steps = itertools.count()
    take_memory(lambda plan: first <= next(steps) < last)


def take_memory_where_prompts_end(times: int = 4) -> None:
    """In steps that compute the last token of a prompt the store gets no new page."""
    ends, prompt = itertools.count(), dict[str, int]()

    def ending(plan: Any) -> bool:
        cached = plan.scheduled_cached_reqs
        start = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in plan.scheduled_new_reqs:
            prompt[new.req_id] = len(new.prompt_token_ids)
            start[new.req_id] = new.num_computed_tokens
        scheduled = plan.num_scheduled_tokens.items()
        ends_here = any(
            start[one] < prompt[one] <= start[one] + tokens for one, tokens in scheduled
        )
        return ends_here and next(ends) < times

    take_memory(ending)


def randomize(llm: Any) -> None:
    """Weights that make attention matter, the same for every backend: a seed for each name.

    What a layer adds is kept small beside what it adds to, or rounding would grow from layer to
    layer until nothing could be compared.
    """
    import torch

    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()
    gemma = type(model).__name__.startswith("Gemma")  # its norms scale by one plus the weight
    added = ("post_attention_layernorm", "post_feedforward_layernorm")
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            one = 0.0 if gemma else 1.0
            weight.data.fill_(-0.8 if gemma and any(norm in name for norm in added) else one)
        else:
            generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
            weight.data.normal_(0, 0.02, generator=generator)


def watch() -> list[dict[str, float]]:
    """Record, after each step is prepared, the live tokens and what the store measures."""
    from vllm_kv_columns.plugin.column_driver import ColumnDriver

    log: list[dict[str, float]] = []
    length: dict[str, int] = {}
    released: list[int] = []
    stock = ColumnDriver.prepare

    def prepare(self: Any, plan: Any) -> None:
        for request in (*plan.finished_req_ids, *(plan.preempted_req_ids or ())):
            released.append(length.pop(request, 0))
        cached = plan.scheduled_cached_reqs
        length.update((new.req_id, new.num_computed_tokens) for new in plan.scheduled_new_reqs)
        length.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request, tokens in plan.num_scheduled_tokens.items():
            length[request] += tokens
        stock(self, plan)
        regions = self.store.geometry.regions

        def bytes_of(lengths: Iterable[int]) -> int:
            return sum(min(n, one.rows) * one.row_bytes for n in lengths for one in regions)

        log.append(
            {
                "sequences": len(length),
                "live_bytes": bytes_of(length.values()),
                "released_sequences": len(released),  # so far
                "released_bytes": bytes_of(released),
                "regions": len(regions),
                "tokens": plan.total_num_scheduled_tokens,
                "seconds": time.perf_counter(),
                "resident_bytes": self.store.resident_bytes(),
            }
        )

    ColumnDriver.prepare = prepare  # type: ignore[method-assign]
    return log


def outputs(results: list[Any]) -> list[list[dict[str, Any]]]:
    """Tokens and, where asked for, log-probabilities of every completion."""
    return [
        [
            {
                "tokens": list(completion.token_ids),
                "logprobs": completion.logprobs
                and [
                    {str(token): value.logprob for token, value in step.items()}
                    for step in completion.logprobs
                ],
            }
            for completion in sorted(result.outputs, key=lambda c: c.index)
        ]
        for result in results
    ]


def generate_and_abort(llm: Any, prompts: list[Any], params: Any, after: int) -> list[Any]:
    """Step by step; abort the first request once it has `after` tokens. Results of the others."""
    engine = llm.llm_engine
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    done: dict[str, Any] = {}
    aborted = False
    while engine.has_unfinished_requests():
        for result in engine.step():
            if result.finished:
                done[result.request_id] = result
            elif result.request_id == "0" and len(result.outputs[0].token_ids) == after:
                engine.abort_request(["0"])
                aborted = True
    assert aborted and "0" not in done
    return [done[key] for key in sorted(done, key=int)]


def change_limits(llm: Any, limits: dict[int, int]) -> None:
    """Set the limit of the cache before those steps, counted from now."""
    engine = llm.llm_engine
    step, count = engine.step, itertools.count()

    def limited() -> Any:
        nbytes = limits.get(next(count))
        if nbytes is not None:
            llm.collective_rpc("kv_columns_limit", args=(nbytes,))
        return step()

    engine.step = limited


def chat(llm: Any, chats: list[list[list[int]]], params: Any) -> list[Any]:
    """Turn by turn, all conversations at once; each turn goes on from the answer to the last."""
    told: list[list[int]] = [[] for _ in chats]
    results = []
    for turn in range(max(map(len, chats))):
        going = [i for i, turns in enumerate(chats) if turn < len(turns)]
        for i in going:
            told[i] += chats[i][turn]
        prompts = [{"prompt_token_ids": told[i]} for i in going]
        answers = llm.generate(prompts, params, use_tqdm=False)
        for i, answer in zip(going, answers, strict=True):
            told[i] += answer.outputs[0].token_ids
        results += answers
    return results


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    if job.get("fault"):
        plant(job["fault"])
    from vllm import LLM, SamplingParams

    columns = job["llm"].get("attention_backend") == "SDPA_VARLEN"
    log = watch() if columns else []
    router = None
    if job.get("events"):
        router = Router(Path(tempfile.mkdtemp(prefix="kv-events-")))
        job["llm"]["kv_events_config"] = router.config()
    llm = LLM(disable_log_stats=False, seed=0, **job["llm"])
    if router is not None:
        router.listen()
    if job.get("weights") == "random":
        randomize(llm)
    limits: dict[int, int] = {}
    for run in job["runs"]:
        limits |= {int(step): nbytes for step, nbytes in run.get("limits", {}).items()}
    if limits:
        change_limits(llm, limits)
    runs, held_after_pauses = [], []
    for run in job["runs"]:
        if "pause" in run:
            llm.llm_engine.step()  # tells the worker what finished, as a serving engine does
            time.sleep(run["pause"])
            held_after_pauses.append(llm.collective_rpc("kv_columns_stats")[0]["resident_bytes"])
        if "sleep" in run:
            llm.sleep(level=run["sleep"])
            held_after_pauses.append(llm.collective_rpc("kv_columns_stats")[0]["resident_bytes"])
            llm.wake_up()
            if run["sleep"] == 2:
                llm.collective_rpc("reload_weights")
        if run.get("reset"):
            assert llm.reset_prefix_cache()
        special = arrivals.serve_special(llm, run)
        if special is not None:
            runs.append(special)
            continue
        params = SamplingParams(detokenize=False, **run["params"])
        prompts = [{"prompt_token_ids": ids} for ids in run.get("prompts", ())]
        if "chats" in run:
            results = chat(llm, run["chats"], params)
        elif "abort_after" in run:
            results = generate_and_abort(llm, prompts, params, run["abort_after"])
        elif run.get("one_by_one"):
            results = [llm.generate(one, params, use_tqdm=False)[0] for one in prompts]
        else:
            results = llm.generate(prompts, params, use_tqdm=False)
        runs.append(outputs(results))
    # More steps tell the worker what finished; a serving engine takes them by itself.
    for _ in range(3):
        llm.llm_engine.step()
    if columns:
        llm.collective_rpc("kv_columns_settle")
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    metrics = {
        metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
    }
    result = {
        "runs": runs,
        "held_after_pauses": held_after_pauses,
        "max_model_len": llm.llm_engine.vllm_config.model_config.max_model_len,
        # With several workers the layers are in their processes.
        "impl": type(next(iter(layers.values())).impl).__name__ if layers else None,
        "preemptions": metrics["vllm:num_preemptions"],
        "kv_cache_usage": metrics["vllm:kv_cache_usage_perc"],
        "prefix_queries": metrics["vllm:prefix_cache_queries"],
        "prefix_hits": metrics["vllm:prefix_cache_hits"],
        "stats": llm.collective_rpc("kv_columns_stats")[0] if columns else None,
        "log": log,
        "events": router and router.heard(),
    }
    path.with_suffix(".out.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
