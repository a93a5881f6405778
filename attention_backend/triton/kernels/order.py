"""How kernels of one stream overlap, where the device can do that (programmatic launch).

With OVERLAP a kernel is launched so that its programs may start before the kernel in front of it
has ended: as soon as all programs of that one have called ``let_later_kernels_start`` or ended.
Nothing that an earlier kernel writes may be touched before ``after_earlier_kernels``, which waits
for the end of the kernel in front. If every kernel waits before it lets later ones start, then
whatever lies further back has ended when a kernel starts.

The long segments' kernel alone waits last, to run beside the short segments' one in front of it, of
which it reads nothing. Its programs start when all of that one have waited, so that whatever lies
further back has ended by then. It ends after the one in front, so that who waits for its end has
waited for both. The kernel behind may start before, but waits for that; and does so before it lets
others start, so that the rule holds from there on.

The write of a layer's keys and values lets later ones start at once, before it waits: behind it
lies that layer's attention. Warps of its short segments' kernels for Hopper that bring keys and
values to shared memory do not wait as long as they bring nothing of this step's tokens, so that
memory is busy while the write runs. All else of them waits, and whoever waits for the write has
waited for what lies further back. What those warps read was written by an earlier step, or is the
schedule; of a step's first layer, which may lie right behind the schedule, they wait, too.
Source: CUDA C++ Programming Guide, Programmatic Dependent Launch and Synchronization.
"""

import triton
import triton.language as tl


@triton.jit
def after_earlier_kernels(OVERLAP: tl.constexpr):
    """Wait until the kernel in front has ended and what it wrote can be read."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_later_kernels_start(OVERLAP: tl.constexpr):
    """The next kernel's programs may start now, if it is launched for it."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
