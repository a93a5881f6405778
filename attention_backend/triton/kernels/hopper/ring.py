"""Places in shared memory that the copy engine fills, one after the other and round again."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton renamed it after 3.6.
copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def bring(desc, at, places, full, empty, count, NUMBERS: gl.constexpr, STAGES: gl.constexpr):
    """Bring the count-th box of all, NUMBERS of two bytes from at on, when its place is free."""
    stage = count % STAGES
    phase = (count // STAGES) & 1
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), NUMBERS * 2)
    copy(desc, at, full.index(stage), places.index(stage))
