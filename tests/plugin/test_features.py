"""What vLLM serves beside plain generation, from columns as from blocks.

Small engines that do many things at once: with a budget that makes them preempt, prefixes reused,
prompts cut into chunks and a model length that vLLM fits to the memory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugin import tiny_models
from tests.plugin.conftest import Job, Result, tokens

RunEngine = Callable[..., Result]
ENV = {"TORCHDYNAMO_DISABLE": "1"}  # log-probabilities would be compiled, which takes longer
COLUMNS = {
    "attention_backend": "SDPA_VARLEN",
    "enable_prefix_caching": True,
    "additional_config": {"kv_columns": {"page_size": 4096}},
}
PROMPTS = tiny_models.prompts([150, 60, 30, 200, 61, 90, 75, 120], seed=8)
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SCORED = {**GREEDY, "prompt_logprobs": 4}
WRITTEN = {"temperature": 0.0, "max_tokens": 60}
CHOICES = ["seven", "seventeen"]
SCORES = range(5)
CHOICE, LETTERS = 5, 6
URGENT = 7
REQUESTS: list[Job] = [
    {"prompt": PROMPTS[0], "params": SCORED, "priority": 9},
    {"prompt": PROMPTS[1], "params": SCORED, "priority": 8},
    {"prompt": PROMPTS[2], "params": SCORED, "priority": 7, "step": 1},
    {"prompt": PROMPTS[3], "params": SCORED, "priority": 6, "step": 2},
    {"prompt": PROMPTS[4], "params": SCORED, "priority": 5, "step": 3},
    {"prompt": PROMPTS[5], "params": WRITTEN, "priority": 4, "structured": {"choice": CHOICES}},
    {"prompt": PROMPTS[6], "params": WRITTEN, "structured": {"regex": "[ab]{40}"}, "step": 3},
    {"prompt": PROMPTS[7], "params": GREEDY, "step": 9},
]
BEAMS = {
    "beams": [PROMPTS[1], PROMPTS[2]],
    "params": {"beam_width": 3, "max_tokens": 4, "ignore_eos": True},
}
STORM = {
    "storm": [
        {"prompt": ids, "params": {**GREEDY, "max_tokens": 30}, "priority": i % 3}
        for i, ids in enumerate(tiny_models.prompts([40, 170, 90, 130, 20, 210] * 3, seed=9))
    ]
}


def llm(model: Path, **changes: Any) -> Job:
    return {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 28,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 64,
        **changes,
    }


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def stock(run_engine: RunEngine, gemma3_like: Path, tokenizer: str) -> Result:
    job = llm(gemma3_like, tokenizer=tokenizer)
    return run_engine(job, [{"requests": REQUESTS}, BEAMS], plugin=False, env=ENV)


@pytest.fixture(scope="module")
def columns(run_engine: RunEngine, gemma3_like: Path, tokenizer: str) -> Result:
    """With everything that the scheduler can be asked for, and little memory."""
    changes: Job = {
        "tokenizer": tokenizer,
        "scheduling_policy": "priority",
        "long_prefill_token_threshold": 40,
        "max_model_len": -1,
        "kv_cache_memory_bytes": BUDGET,
    }
    job = llm(gemma3_like, **COLUMNS, **changes)
    return run_engine(job, [{"requests": REQUESTS}, BEAMS, STORM], env=ENV)


BUDGET = 1000 * 1024
"""Bytes that hold some 600 tokens of one request, where the model could have 1024."""


def text(answer: list[int]) -> str:
    """Of tokens that are visible ASCII; those before stand for no byte."""
    return "".join(chr(token - 3 + ord("!")) for token in answer if token >= 3)


def scores(result: Result) -> list[list[dict[str, float] | None]]:
    return [result["runs"][0][i][0]["prompt_logprobs"] for i in SCORES]


def check_scores(ours: Result, stock: Result) -> None:
    for i, mine, theirs in zip(SCORES, scores(ours), scores(stock), strict=True):
        assert mine is not None and theirs is not None and len(mine) == len(PROMPTS[i])
        for at, (some, others) in enumerate(zip(mine[1:], theirs[1:], strict=True), 1):
            assert some is not None and others is not None
            token = str(PROMPTS[i][at])
            assert some[token] == pytest.approx(others[token], abs=1e-3)


def test_tokens_with_priorities_preemption_and_chunks(columns: Result, stock: Result) -> None:
    assert columns["impl"] == "ColumnAttentionImpl"
    assert columns["preemptions"] > 0
    assert tokens(columns) == tokens(stock)


def test_the_urgent_request_overtakes(columns: Result) -> None:
    ended = [answer["ended"] for (answer,) in columns["runs"][0]]
    assert ended[URGENT] < ended[0]


def test_structured_output(columns: Result) -> None:
    chosen, letters = (text(tokens(columns)[i][0]) for i in (CHOICE, LETTERS))
    assert chosen in CHOICES
    assert len(letters) == 40 and set(letters) <= {*"ab"}


def test_log_probabilities_of_prompts(columns: Result, stock: Result) -> None:
    check_scores(columns, stock)


def test_log_probabilities_of_prompts_whose_step_got_no_memory(
    run_engine: RunEngine, gemma3_like: Path, tokenizer: str, stock: Result
) -> None:
    job = llm(gemma3_like, tokenizer=tokenizer, **COLUMNS)
    ours = run_engine(job, [{"requests": REQUESTS}], fault="no memory where a prompt ends", env=ENV)
    assert ours["preemptions"] > 0
    assert tokens(ours) == tokens(stock)
    check_scores(ours, stock)


def test_beams(columns: Result, stock: Result) -> None:
    assert tokens(columns, 1) == tokens(stock, 1)
    assert len({tuple(beam) for beam in tokens(stock, 1)[0]}) == 3


def test_the_model_length_is_fitted_to_the_memory(columns: Result) -> None:
    assert 500 < columns["max_model_len"] < 700


def test_a_storm_of_aborts_leaves_nothing_behind(columns: Result) -> None:
    left = columns["runs"][2]
    assert min(left["aborted"].values()) > 0, left["aborted"]
    assert left["free"] == left["unused"] == left["budget"]
    assert left["free_columns"] == left["columns"]
    assert left["committed_pages"] == left["scratch_pages"]


def test_no_prefix_is_found_under_another_adapter(
    run_engine: RunEngine, mistral_like: Path, tmp_path: Path
) -> None:
    """The same prompt for the model, two adapters, and the first of them once more."""
    adapters = [str(tiny_models.adapter(tmp_path / f"adapter{i}", i)) for i in range(2)]
    asked: list[Job] = [
        {"prompt": PROMPTS[1], "params": {**GREEDY, "max_tokens": 4}, "step": 6 * i}
        | ({} if which is None else {"adapter": adapters[which]})
        for i, which in enumerate([None, 0, 1, 0])
    ]
    job = llm(
        mistral_like, skip_tokenizer_init=True, enable_lora=True, max_loras=2, max_lora_rank=8
    )
    stock = run_engine(job, [{"requests": asked}], plugin=False, env=ENV)
    ours = run_engine({**job, **COLUMNS}, [{"requests": asked}], env=ENV)
    assert tokens(ours) == tokens(stock)
    assert len({str(answer) for answer in tokens(stock)}) == 3, "adapters change the answer"
    assert ours["prefix_hits"] == len(PROMPTS[1]) // 16 * 16, "the last one's, and no other's"
