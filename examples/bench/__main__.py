"""``python -m vllm_kv_columns.bench``."""

import importlib.util
import sys


def main() -> int:
    """Returns the status of the process."""
    if importlib.util.find_spec("rich") is None:
        sys.exit("the benchmarks need rich: pip install 'vllm-kv-columns[bench]'")
    from .cli import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
