"""Gluon kernels compiled for a GPU that is not there."""

import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

OPTIONS = ("num_warps", "enable_fp_fusion")


def compile_gluon(
    kernel: Any, constants: Mapping[str, Any], kinds: Mapping[str, str], aligned: Collection[str]
) -> Any:
    """The kernel for sm_90 as a launch would compile it.

    kinds: types of the arguments that are no int32; aligned: arguments that 16 divides.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
            continue
        signature[name] = kinds.get(name, "i32")
        if name in aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {name: constants[name] for name in OPTIONS if name in constants}
    source = GluonASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def registers_and_stack(made: Any, folder: Path) -> tuple[int, int]:
    """Registers of a thread at launch and bytes of its stack, from the binary."""
    from triton import knobs

    binary = folder / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    usage = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found.group(1)), int(found.group(2))


def barriers_and_numbers(made: Any) -> tuple[set[int], set[int]]:
    """Where in shared memory barriers are made, and where plain stores put numbers, in bytes.

    Of the addresses that are constants: those of single numbers and of what has no index.
    """
    text = made.asm["ptx"]
    constant = {
        register: int(offset)
        for register, offset in re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", text)
    }
    made_at = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", text)
    barriers = {constant[register] for register in made_at if register in constant}
    stores = re.findall(
        r"st\.shared[.\w]*\s+\[\s*(?:global_smem\+(\d+)|(%r\d+)\s*\+\s*0)\s*\]", text
    )
    numbers = {int(at) if at else constant.get(register, -1) for at, register in stores} - {-1}
    return barriers, numbers
