"""What was measured, as plain data: the JSON file, and what table and plot are made from."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .shapes import Shape

__all__ = ["Figure", "ShapeResult", "write_json", "write_run"]


@dataclass(frozen=True)
class Figure:
    """One backend on one shape: microseconds of a layer and the error of its result, or why not.

    wrong: its result failed the check, so it was not timed. error may then be known too.
    """

    us: float | None = None
    spread: float | None = None
    error: float | None = None
    failure: str | None = None
    wrong: bool = False


@dataclass
class ShapeResult:
    """One shape on all backends that were found, by name."""

    shape: Shape
    figures: dict[str, Figure] = field(default_factory=dict)

    def ratio(self, anchor: str) -> float | None:
        """Time of the anchor over ours: above 1, ours is faster."""
        ours, theirs = (self.us(name) for name in ("ours", anchor))
        return theirs / ours if ours and theirs else None

    def us(self, name: str) -> float | None:
        return self.figures[name].us if name in self.figures else None

    def tb_per_s(self, name: str) -> float | None:
        """K and V read once, of one layer, over its time."""
        us = self.us(name)
        return self.shape.kv_bytes / us / 1e6 if us else None

    def tflop_per_s(self, name: str) -> float | None:
        us = self.us(name)
        return self.shape.flop / us / 1e6 if us else None

    def as_json(self) -> dict[str, Any]:
        shape, names = self.shape, list(self.figures)
        return {
            "name": shape.name,
            "kind": shape.kind,
            "heads": shape.heads,
            "group": shape.group,
            "head_size": shape.head_size,
            "window": shape.window,
            "layers": shape.layers,
            "us": {name: _short(self.us(name)) for name in names},
            "spread": {name: _short(self.figures[name].spread) for name in names},
            "ratio": _short(self.ratio("fa3")),
            "triton_ratio": _short(self.ratio("triton")),
            "tb_per_s": {name: _short(self.tb_per_s(name)) for name in names},
            "tflop_per_s": {name: _short(self.tflop_per_s(name)) for name in names},
            "error": {name: _short(self.figures[name].error) for name in names},
            "failures": {
                name: figure.failure for name, figure in self.figures.items() if figure.failure
            },
        }


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Make the file's folder if there is none, and write it whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.new")
    scratch.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    scratch.replace(file)


def write_run(
    args: argparse.Namespace,
    about: Mapping[str, Any],
    backends: Mapping[str, Any],
    failures: Mapping[str, str],
) -> None:
    """To ``args.json``, if given: what there is, should a later backend of the run never end."""
    if args.json:
        content = {
            "command": args.line,
            "machine": about,
            "model": args.model or "shape of Llama 8B, random weights",
            "backends": backends,
            "failures": failures,
        }
        write_json(args.json, content)


def _short(value: float | None) -> float | None:
    """Four digits; None for what JSON cannot hold."""
    if value is None or value != value or value in (float("inf"), -float("inf")):
        return None
    return float(f"{value:.4g}")
