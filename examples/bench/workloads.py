"""What is served: requests x (tokens in + tokens out). No torch."""

import re
from dataclasses import dataclass

__all__ = ["OURS", "STOCK", "Load", "Workload"]

OURS = "SDPA_VARLEN"
STOCK = "stock"  # vLLM's choice where none is named, as on the CPU


@dataclass(frozen=True)
class Workload:
    """So many requests at once, each of so many tokens in and out."""

    requests: int
    tokens_in: int
    tokens_out: int

    @classmethod
    def parse(cls, text: str) -> "Workload":
        """From a text like 256x1024+256. Raises ValueError for another."""
        found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
        numbers = [int(number) for number in found.groups()] if found else []
        if not numbers or not all(numbers):
            raise ValueError(f"{text!r} is no workload; write REQUESTSxIN+OUT, as 256x1024+256")
        return cls(*numbers)

    def prompt_lengths(self, uneven: bool) -> list[int]:
        """Tokens of each prompt: all alike, or from a half to one and a half times."""
        count, length = self.requests, self.tokens_in
        if not uneven or count == 1:
            return [length] * count
        return [max(1, length // 2 + i * length // (count - 1)) for i in range(count)]

    def __str__(self) -> str:
        return f"{self.requests} x ({self.tokens_in} + {self.tokens_out})"


@dataclass(frozen=True)
class Load:
    """Requests that come at random (Poisson), ``rate`` a second on average."""

    rate: float
    requests: int
    tokens_in: int
    tokens_out: int

    def __str__(self) -> str:
        return f"{self.requests} at {self.rate:g}/s ({self.tokens_in} + {self.tokens_out})"
