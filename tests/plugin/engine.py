"""Runs one vLLM engine in a process of its own: `python engine.py FILE`, JSON in, JSON out.

Job: {"llm": LLM arguments, "fault": name or absent, "runs": [{"prompts": [token ids],
"params": sampling parameters, "abort_after": tokens or absent}]}. One process holds scheduler and
worker, so that a fault can be planted in both and the store be read at every step.
"""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

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
        from vllm_kv_columns.attention_backend.vllm import metadata

        tables = metadata.step_tables

        def swapped(batch: Any, block_size: int) -> Any:
            step = tables(batch, block_size)
            if step.seq_info.shape[0] > 1:
                step.seq_info[:2, 2] = step.seq_info[:2, 2].flip(0)
            return step

        metadata.step_tables = swapped
    else:
        raise ValueError(fault)


def watch() -> list[dict[str, int]]:
    """Record, after each step is prepared, the live tokens and what the store measures."""
    from vllm_kv_columns.plugin.column_driver import ColumnDriver

    log: list[dict[str, int]] = []
    length: dict[str, int] = {}
    stock = ColumnDriver.prepare

    def prepare(self: Any, plan: Any) -> None:
        for request in (*plan.finished_req_ids, *(plan.preempted_req_ids or ())):
            length.pop(request, None)
        cached = plan.scheduled_cached_reqs
        length.update((new.req_id, new.num_computed_tokens) for new in plan.scheduled_new_reqs)
        length.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request, tokens in plan.num_scheduled_tokens.items():
            length[request] += tokens
        stock(self, plan)
        regions = self.store.geometry.regions
        log.append(
            {
                "sequences": len(length),
                "live_bytes": sum(
                    min(n, region.rows) * region.row_bytes
                    for n in length.values()
                    for region in regions
                ),
                "regions": len(regions),
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


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    if job.get("fault"):
        plant(job["fault"])
    from vllm import LLM, SamplingParams

    columns = job["llm"].get("attention_backend") == "SDPA_VARLEN"
    log = watch() if columns else []
    llm = LLM(disable_log_stats=False, seed=0, **job["llm"])
    runs = []
    for run in job["runs"]:
        params = SamplingParams(detokenize=False, **run["params"])
        prompts = [{"prompt_token_ids": ids} for ids in run["prompts"]]
        if "abort_after" in run:
            results = generate_and_abort(llm, prompts, params, run["abort_after"])
        else:
            results = llm.generate(prompts, params, use_tqdm=False)
        runs.append(outputs(results))
    # One more step tells the worker what finished; a serving engine takes it by itself.
    llm.llm_engine.step()
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    metrics = {
        metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
    }
    result = {
        "runs": runs,
        "impl": type(next(iter(layers.values())).impl).__name__,
        "preemptions": metrics["vllm:num_preemptions"],
        "kv_cache_usage": metrics["vllm:kv_cache_usage_perc"],
        "stats": llm.collective_rpc("kv_columns_stats")[0] if columns else None,
        "log": log,
    }
    path.with_suffix(".out.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
