"""Requests that come at a step of their own, with what vLLM lets a request ask for.

A request: {"prompt": token ids, "params": sampling parameters, and where wanted "step": at which it
comes, 0 if absent, "priority": lower runs first, "adapter": folder of a LoRA, "structured": what
`StructuredOutputsParams` takes}.
"""

import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

__all__ = ["accounts", "serve_special"]


def serve_special(llm: Any, run: dict[str, Any]) -> Any:
    """Serve a run of {"requests": a list}, {"beams": prompts, "params": of the beams} or
    {"storm": requests}; None if it is another one.
    """
    if "requests" in run:
        return [[answer] for answer in serve(llm, run["requests"])]
    if "beams" in run:
        return beams(llm, run["beams"], run["params"])
    if "storm" in run:
        return storm(llm, run["storm"])
    return None


def serve(llm: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serve all of them; tokens, log-probabilities of the prompt and which ended when."""
    due: dict[int, list[int]] = defaultdict(list)
    for i, request in enumerate(requests):
        due[request.get("step", 0)].append(i)
    answers: list[dict[str, Any]] = [{} for _ in requests]
    engine, ended = llm.llm_engine, itertools.count()
    for step in itertools.count():
        for i in due.pop(step, ()):
            add(engine, str(i), requests[i])
        for output in engine.step():
            if output.finished:
                (completion,) = output.outputs
                answers[int(output.request_id)] = {
                    "tokens": list(completion.token_ids),
                    "ended": next(ended),
                    "prompt_logprobs": output.prompt_logprobs
                    and [
                        at and {str(token): value.logprob for token, value in at.items()}
                        for at in output.prompt_logprobs
                    ],
                }
        if not due and not engine.has_unfinished_requests():
            break
    return answers


def add(engine: Any, name: str, request: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structured, adapter = request.get("structured"), request.get("adapter")
    params = SamplingParams(
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=StructuredOutputsParams(**structured) if structured else None,
        detokenize=False,
        **request["params"],
    )
    engine.add_request(
        name,
        {"prompt_token_ids": request["prompt"]},
        params,
        lora_request=LoRARequest(adapter, 1 + zlib.crc32(adapter.encode()) % 9999, adapter)
        if adapter
        else None,
        priority=request.get("priority", 0),
    )


def beams(llm: Any, prompts: list[list[int]], params: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Every beam of every prompt."""
    from vllm.sampling_params import BeamSearchParams

    results = llm.beam_search(
        [{"prompt_token_ids": ids} for ids in prompts], BeamSearchParams(**params)
    )
    return [[{"tokens": beam.tokens} for beam in one.sequences] for one in results]


def storm(llm: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Add all at once and abort them one after the other, in whatever state there is to find.

    Returns how many were aborted in which state, and what is accounted for in the end.
    """
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    for i, request in enumerate(requests):
        add(engine, str(i), request)
    states: dict[str, Callable[[Any], object]] = {
        "waiting": lambda one: one.status.name == "WAITING",
        "preempted": lambda one: one.status.name == "PREEMPTED",
        "prefilling": lambda one: one.status.name == "RUNNING" and one.is_prefill_chunk,
        "decoding": lambda one: one.status.name == "RUNNING" and one.num_output_tokens,
    }
    aborted = dict.fromkeys(states, 0)
    while scheduler.requests:
        engine.step()
        for state, holds in states.items():
            found = [name for name, one in scheduler.requests.items() if holds(one)]
            if found and aborted[state] <= min(aborted.values()) + 1:
                engine.abort_request(found[:1], internal=True)
                aborted[state] += 1
    for _ in range(2):  # a step takes along what is released
        assert engine.reset_prefix_cache()
        serve(llm, [{"prompt": [3], "params": {"max_tokens": 1}}])
        engine.step()
    committed = llm.collective_rpc("kv_columns_stats")[0]["committed_pages"]
    return {"aborted": aborted, "committed_pages": committed, **accounts(scheduler)}


def accounts(scheduler: Any) -> dict[str, int]:
    """Pages and columns, as the scheduler counts them."""
    pool, table = scheduler.kv_cache_manager.block_pool, scheduler._columns.table
    return {
        "free": pool.get_num_free_blocks(),
        "unused": pool.unused_pages,
        "budget": pool.num_gpu_blocks - 1,
        "withheld": len(pool.withheld),
        "free_columns": len(table._free),
        "columns": table.geometry.max_seqs,
        "users": len(table.pages),
        "scratch_pages": table.geometry.scratch_pages,
        "page_size": table.geometry.page_size,
    }
