"""What is timed, ours and the anchors alike: a step in two verbs, and its cache for the check."""

from abc import ABC, abstractmethod

import torch

from .problem import Problem

__all__ = ["Backend", "Step"]


class Step(ABC):
    """One step of a problem, laid out for one backend.

    ``begin`` and then ``layer`` for each layer is a whole step, as often as wanted. Both only give
    work to the device, so that they can be captured in a CUDA graph.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.out = torch.empty_like(problem.query)
        """[T, Hq, D], all of which every layer overwrites."""

    @abstractmethod
    def begin(self) -> None:
        """What the layers share: the schedule."""

    @abstractmethod
    def layer(self, index: int) -> None:
        """Write the step's keys and values to the layer's cache, attend, merge into ``out``."""

    @abstractmethod
    def cached(
        self, layer: int, segment: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V [n, H, D] at positions int64 [n] of a sequence, found by indexing."""


class Backend(ABC):
    """An implementation of attention with a cache."""

    name: str
    title: str
    """What it is, and of which version."""

    @abstractmethod
    def obstacle(self, device: torch.device) -> str | None:
        """Why it cannot run here, in one sentence; None if it can."""

    @abstractmethod
    def step(self, problem: Problem) -> Step:
        """Lay the problem out. Raises whatever the backend raises for a shape it does not take."""
