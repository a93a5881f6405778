"""Attention beside other processes: `python -m tests.attention_backend.sharing SECONDS`.

Prints how often each kind of step ran and how many runs had other bits than the first.
"""

import json
import sys
import time

import torch

from tests.attention_backend.triton_helpers import packed, tables_of_segments
from vllm_kv_columns.attention_backend.triton import TritonKernel

KINDS = {  # KV heads, group, head size, window
    "prompts": (3, 3, 64, None),
    "wide prompts": (4, 2, 256, 100),
    "decodes": (8, 4, 128, None),
}
ROWS, BATCH = 1024, 50


class Repeated:
    """One step, of prompts of 20 to 700 tokens or of decodes, again and again."""

    def __init__(self, kind: str) -> None:
        heads, group, size, self.window = KINDS[kind]
        lengths = [20 + (173 * i * i + 61 * i) % 680 for i in range(40)]
        segments = packed([(1 if kind == "decodes" else end, end) for end in lengths])
        tokens = sum(q_len for _, q_len, _, _ in segments)
        torch.manual_seed(0)
        shape = (len(lengths) + 1, ROWS, 2, heads, size)
        region = torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
        self.key, self.value = region[:, :, 0], region[:, :, 1]
        self.query = torch.randn(tokens, heads * group, size, device="cuda", dtype=torch.bfloat16)
        self.tables = tables_of_segments(segments)
        self.kernel, self.scale = TritonKernel(), size**-0.5
        self.first = self.attend()
        self.others = torch.zeros((), dtype=torch.int64, device="cuda")
        self.runs = 0

    def attend(self) -> torch.Tensor:
        out = torch.full_like(self.query, float("nan"))
        step = self.kernel.prepare(self.tables, rows=ROWS, window=self.window, causal=True)
        self.kernel.attend(self.query, self.key, self.value, step, scale=self.scale, out=out)
        return out

    def repeat(self) -> None:
        for _ in range(BATCH):
            self.others += (self.attend() != self.first).any()
        torch.cuda.synchronize()
        self.runs += BATCH


def main(seconds: float) -> None:
    steps = {kind: Repeated(kind) for kind in KINDS}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for step in steps.values():
            step.repeat()
    counts = {kind: (step.runs, int(step.others)) for kind, step in steps.items()}
    print(json.dumps(counts))


if __name__ == "__main__":
    main(float(sys.argv[1]))
