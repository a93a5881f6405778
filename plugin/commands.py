"""What the scheduler has workers do with columns before a step, along with the step's plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Clone", "Command", "Release", "Rewind", "attach_commands", "commands_of"]

ATTRIBUTE = "kv_columns_commands"
"""A plain attribute of vLLM's `SchedulerOutput`; it survives pickling between processes."""


@dataclass(frozen=True)
class Release:
    """Nobody has the column any more: its memory is free."""

    column: int


@dataclass(frozen=True)
class Clone:
    """The empty `column` begins with the first `tokens` positions of `source`."""

    source: int
    column: int
    tokens: int


@dataclass(frozen=True)
class Rewind:
    """Of what the column holds only the first `tokens` positions count."""

    column: int
    tokens: int


Command = Release | Clone | Rewind


def attach_commands(plan: Any, commands: Sequence[Command]) -> None:
    """Put the commands on a `SchedulerOutput`; they are carried out in order, before the step."""
    setattr(plan, ATTRIBUTE, tuple(commands))


def commands_of(plan: Any) -> Sequence[Command] | None:
    """The commands on a `SchedulerOutput`; None if it is not one of our scheduler's."""
    commands: Sequence[Command] | None = getattr(plan, ATTRIBUTE, None)
    return commands
