"""Triton's interpreter, which runs kernels on the CPU, and what it lacks.

It is on for a whole process: functions are interpreted if TRITON_INTERPRET was set when they were
decorated, Triton's own included. A process that serves models must not see it.
"""

import os
from dataclasses import replace
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def complete() -> None:
    """Mend what makes the interpreter wrong or slow.

    ``tl.dot`` multiplies the bits of bfloat16 as integers. Every call of a device function wraps
    Triton's language once more and for good, so that all becomes slower and slower. Every sum of
    integers is made twice to look for an overflow. Left as it is: bfloat16 is cut, not rounded.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(operand, tl.float32) for operand in (a, b))
        return original(self, a, b, *rest)

    patched = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module.startswith("triton.") and module not in patched:  # ours: by the launch
            patched.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
