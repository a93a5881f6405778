"""Output tokens per second on columns against stock vLLM, on this machine, in one run.

    python examples/benchmark.py MODEL [--sequences 16] [--input 128] [--output 128] [--rounds 3]

Each backend gets processes of its own, in turns (stock, columns, stock, columns), so that a slow
phase of the machine meets both. Prints tokens/s of every round and the ratio of the medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

BACKENDS = {"stock": None, "columns": "SDPA_VARLEN"}


def measure(args: argparse.Namespace) -> list[float]:
    """Tokens per second of each round with backend `args.measure`, after one to warm up."""
    from vllm import LLM, SamplingParams

    backend = BACKENDS[args.measure]
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=4096,
        max_num_seqs=args.sequences,
        kv_cache_memory_bytes=2 << 30,
        enforce_eager=args.enforce_eager,
        enable_prefix_caching=False,
        **({"attention_backend": backend} if backend else {}),
    )
    vocabulary = llm.get_tokenizer().vocab_size
    # Uneven prompts: half the length to one and a half times.
    prompts = [
        {
            "prompt_token_ids": [
                (i * 7919 + t * 104729) % (vocabulary - 100) + 50
                for t in range(args.input // 2 + i * args.input // max(args.sequences - 1, 1))
            ]
        }
        for i in range(args.sequences)
    ]
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
    rates = []
    for _ in range(args.rounds + 1):
        start = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        rates.append(sum(len(r.outputs[0].token_ids) for r in results) / seconds)
    return rates[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--input", type=int, default=128, help="mean prompt length in tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens generated per sequence")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds in each process")
    parser.add_argument("--turns", type=int, default=2, help="processes of each backend")
    parser.add_argument("--enforce-eager", action="store_true", help="without torch.compile")
    parser.add_argument("--measure", choices=BACKENDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print("RATES " + json.dumps(measure(args)), flush=True)
        return
    rates: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for turn in range(args.turns):
        for name in BACKENDS:
            run = subprocess.run(
                [sys.executable, *sys.argv, "--measure", name],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
            )
            found = [line for line in run.stdout.splitlines() if line.startswith("RATES ")]
            if run.returncode or not found:
                sys.exit(f"{run.stdout}\nbenchmark: the {name} run failed, its output is above")
            new = json.loads(found[0].removeprefix("RATES "))
            rates[name] += new
            print(
                f"turn {turn + 1} {name:8}", *(f"{rate:7.1f}" for rate in new), "tok/s", flush=True
            )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"{args.sequences} sequences, {args.input} in, {args.output} out, {args.dtype}: "
        f"stock {medians['stock']:.1f} tok/s, columns {medians['columns']:.1f} tok/s, "
        f"ratio {medians['columns'] / medians['stock']:.2f}"
    )


if __name__ == "__main__":
    main()
