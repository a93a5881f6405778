"""Mixed traffic for a while, with limits that move and memory that others take and give back.

`python -m tests.plugin.soak FILE`, JSON in, JSON out. Job: {"llm": LLM arguments, "weights":
"random" or absent, "seconds": of traffic, "seed": of what comes, "vocabulary": token ids to draw
from, "longest": tokens of a request, answer included, "neighbour": bytes of the device that
another process takes and returns, 0 for memory that the store alone does not get}.

The result has the answers of some requests, each with the same request's answer from the quiet
server at the end, and the pages of the worker and of the scheduler once nothing is held any more.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.plugin.arrivals import accounts
from tests.plugin.engine import Shortage, randomize  # sets the environment for vLLM, too

ASKED_AGAIN = 16  # answers at most
SYSTEM_PROMPTS = 3
ABORT_SECONDS, LIMIT_SECONDS = 1.0, 1.0  # between two, on average
HOLD_SECONDS, FREE_SECONDS = 0.4, 1.5
MOST_TOKENS = 40  # of an answer
HOLD = """
import sys, torch
held = None
for line in sys.stdin:
    held = None
    torch.cuda.empty_cache()
    if int(line):
        held = torch.empty(int(line), dtype=torch.uint8, device="cuda")
    print(int(line), flush=True)
"""


class Neighbour(AbstractContextManager["Neighbour"]):
    """A process that holds memory of the device."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hold(self, much: bool) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{self._nbytes if much else 0}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the neighbour ended: it did not get its memory"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()


class Traffic:
    """Requests of all kinds, what becomes of them, and pressure from the side."""

    def __init__(self, llm: Any, job: dict[str, Any], press: Callable[[bool], None]) -> None:
        self.engine = llm.llm_engine
        self._llm = llm
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.random = random.Random(job["seed"])
        self.counts = dict.fromkeys(
            ("requests", "finished", "aborted", "limits", "holds", "steps"), 0
        )
        self.answers: list[dict[str, Any]] = []
        self._job, self._press = job, press
        self._said: list[list[int]] = []  # prompts with their answers, to go on from
        self._prompts: dict[str, list[int]] = {}
        self._samples: dict[str, int] = {}
        self._pressed = False
        self._keeps = True
        self._system = [self._draw(job["longest"] // 4) for _ in range(SYSTEM_PROMPTS)]
        geometry = self.scheduler._columns.table.geometry
        self._page = geometry.page_size
        self._least = geometry.scratch_pages + geometry.pages_for(geometry.capacity)
        self._most = self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        self._most += geometry.scratch_pages

    def set_limit(self, nbytes: int) -> None:
        self._llm.collective_rpc("kv_columns_limit", args=(nbytes,))

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self._llm.collective_rpc("kv_columns_stats")[0]
        return found

    def run(self, seconds: float) -> None:
        now = time.monotonic()
        end, abort_at, limit_at, press_at = now + seconds, now, now, now
        most = 2 * self._job["llm"]["max_num_seqs"]
        while (now := time.monotonic()) < end:
            while len(self._prompts) < most and self.random.random() < 0.5:
                self._ask(self._prompt(), 2 if self.random.random() < 0.1 else 1)
            if self._prompts and now > abort_at:
                abort_at = now + self.random.expovariate(1 / ABORT_SECONDS)
                self._abort()
            if now > limit_at:
                limit_at = now + self.random.expovariate(1 / LIMIT_SECONDS)
                self.set_limit(self._page * self.random.randint(self._least, self._most))
                self.counts["limits"] += 1
            if now > press_at:
                self._pressed = not self._pressed
                lasts = HOLD_SECONDS if self._pressed else FREE_SECONDS
                press_at = now + self.random.expovariate(1 / lasts)
                self._press(self._pressed)
                self.counts["holds"] += self._pressed
            self.step()
        self._press(False)
        self.set_limit(self._page * self._most)

    def step(self) -> None:
        self.counts["steps"] += 1
        for output in self.engine.step():
            if not output.finished:
                continue
            self.counts["finished"] += 1
            prompt = self._prompts.pop(output.request_id)
            answers = [list(one.token_ids) for one in output.outputs]
            assert len(answers) == self._samples.pop(output.request_id)
            self._said.append(prompt + answers[0])
            del self._said[:-40]
            if self._keeps and len(answers) == 1:
                self.answers.append({"prompt": prompt, "tokens": answers[0]})

    def drain(self) -> None:
        """Serve what is left, then let the workers hear of it."""
        while self.engine.has_unfinished_requests():
            self.step()
        for _ in range(3):
            self.engine.step()

    def ask_again(self) -> None:
        """Some requests one by one, with log-probabilities of what was likely."""
        self._keeps = False
        self.random.shuffle(self.answers)
        del self.answers[ASKED_AGAIN:]
        for answer in self.answers:
            self._ask(answer["prompt"], 1, len(answer["tokens"]), logprobs=2)
            results: list[Any] = []
            while not results:
                results = [one for one in self.engine.step() if one.finished]
            (completion,) = results[0].outputs
            answer["again"] = list(completion.token_ids)
            answer["likely"] = [
                {str(token): value.logprob for token, value in step.items()}
                for step in completion.logprobs
            ]
            self._prompts.clear()
            self._samples.clear()

    def pages(self) -> dict[str, int]:
        """Once nothing is held: of the scheduler and of the worker."""
        assert self.engine.reset_prefix_cache()
        self._ask([self._job["vocabulary"] - 1], 1, 1)  # takes the releases along
        self.drain()
        assert self.engine.reset_prefix_cache()
        self._ask([self._job["vocabulary"] - 2], 1, 1)
        self.drain()
        assert self.engine.reset_prefix_cache()
        return accounts(self.scheduler)

    def _draw(self, count: int) -> list[int]:
        return [self.random.randrange(self._job["vocabulary"] - 10) for _ in range(count)]

    def _prompt(self) -> list[int]:
        longest = self._job["longest"] * 3 // 4
        kind = self.random.choice(("new", "system", "go on", "go back"))
        if kind == "system":
            made = self.random.choice(self._system) + self._draw(self.random.randint(1, 40))
        elif kind == "new" or not self._said:
            made = self._draw(self.random.randint(1, longest))
        else:
            said = self.random.choice(self._said)
            if kind == "go back":
                said = said[: self.random.randint(1, len(said))]
            made = said + self._draw(self.random.randint(1, 20))
        return made[:longest]

    def _ask(
        self,
        prompt: list[int],
        samples: int,
        tokens: int | None = None,
        logprobs: int | None = None,
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = min(self._job["longest"] - len(prompt), MOST_TOKENS)
        params = SamplingParams(
            n=samples,
            temperature=0.0 if samples == 1 else 1.0,
            max_tokens=tokens or self.random.randint(1, room),
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = str(self.counts["requests"])
        self.counts["requests"] += 1
        self._prompts[name], self._samples[name] = prompt, samples
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def _abort(self) -> None:
        name = self.random.choice(list(self._prompts))
        self.engine.abort_request([name])
        del self._prompts[name], self._samples[name]
        self.counts["aborted"] += 1


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    from vllm import LLM

    pressure = Neighbour(job["neighbour"]) if job["neighbour"] else nullcontext(Shortage())
    with pressure as press:
        llm = LLM(disable_log_stats=False, seed=0, **job["llm"])
        if job.get("weights") == "random":
            randomize(llm)
        traffic = Traffic(llm, job, press.hold)
        traffic.run(job["seconds"])
        traffic.drain()
    traffic.ask_again()
    traffic.drain()
    pages = traffic.pages()
    llm.collective_rpc("kv_columns_settle")
    metrics = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
    result = {
        "answers": traffic.answers,
        "counts": traffic.counts,
        "pages": pages,
        "store": traffic.stats(),
        "preemptions": metrics["vllm:num_preemptions"],
        "prefix_hits": metrics["vllm:prefix_cache_hits"],
    }
    path.with_suffix(".out.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
