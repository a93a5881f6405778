"""How every backend is run: the same engine options, in a process or as a server."""

from dataclasses import dataclass
from typing import Any

from .workloads import OURS, STOCK

__all__ = ["MAX_SEQS", "MAX_TOKENS", "Engine", "max_length"]

MAX_SEQS = 256  # sequences of a step on a GPU, at most
MAX_TOKENS = 8192  # tokens of one


def max_length(gpu: bool) -> int:
    """Tokens of a request, prompt and answer together, at most."""
    return 16_384 if gpu else 4096


@dataclass(frozen=True)
class Engine:
    """A model on a backend, with vLLM's defaults but for what all backends must have alike.

    backend: a name of vLLM's, or STOCK for its own choice. dummy: random weights.
    """

    backend: str
    model: str
    dummy: bool
    gpu: bool
    utilization: float = 0.8
    max_seqs: int = MAX_SEQS
    eager: bool = False
    dtype: str = "auto"

    @property
    def ours(self) -> bool:
        return self.backend == OURS

    def options(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``."""
        found: dict[str, Any] = {
            "dtype": self.dtype,
            "max_num_seqs": self.max_seqs,
            "enable_prefix_caching": False,
            "max_model_len": max_length(self.gpu),
        }
        if self.gpu:
            found |= {
                "max_num_batched_tokens": MAX_TOKENS,
                "gpu_memory_utilization": self.utilization,
            }
        else:
            found["kv_cache_memory_bytes"] = 2 << 30
        if self.dummy:
            found["load_format"] = "dummy"
        if self.eager:
            found["enforce_eager"] = True
        if self.backend != STOCK:
            found["attention_backend"] = self.backend
        return found

    def flags(self) -> list[str]:
        """The same for ``vllm serve``."""
        flags = []
        for name, value in self.options().items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", str(value)]
        return flags
