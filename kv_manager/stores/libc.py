"""The five system calls behind the host store, each with its failure as a StoreError.

Sizes and offsets are bytes, addresses integers. Linux only.
"""

import ctypes
import errno
import mmap
import os
import sys

from ..errors import StoreError, StoreFullError

__all__ = ["allocate", "map_file", "new_file", "punch", "reserve", "reserve_again", "unmap"]

MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MAP_FAILED = ctypes.c_void_p(-1).value
FALLOC_PUNCH = 0x02 | 0x01  # PUNCH_HOLE | KEEP_SIZE

_FIXES = {
    "mmap": {
        errno.ENOMEM: "raise vm.max_map_count (mappings of a process), or free memory",
    },
    "mmap (reservation)": {
        errno.ENOMEM: "lower max_seqs or capacity, or raise the address-space limit (ulimit -v)",
    },
    "fallocate": {
        errno.ENOMEM: "free memory, or lower the cache's byte budget below the memory limit",
        errno.ENOSPC: "free memory, or lower the cache's byte budget below the memory limit",
        errno.EFBIG: "raise the file-size limit (ulimit -f)",
    },
    "memfd_create": {errno.EMFILE: "raise the limit on open files (ulimit -n)"},
}

_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _error(call: str, nbytes: int, number: int) -> StoreError:
    name = errno.errorcode.get(number, str(number))
    fix = _FIXES.get(call, {}).get(number, "see the call's manual page")
    return StoreError(f"{call} of {nbytes} bytes failed: {name}, {os.strerror(number)}; {fix}")


def new_file(name: str) -> int:
    """Descriptor of a new empty file in memory; it is freed with its last mapping."""
    if sys.platform != "linux":
        raise StoreError(f"memfd is not available on {sys.platform}; use the store 'dense'")
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        raise _error("memfd_create", 0, error.errno or 0) from error


def _mmap(address: int | None, nbytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
    found: int | None = _libc.mmap(address, nbytes, prot, flags, fd, offset)
    if found is None or found == MAP_FAILED:
        call = "mmap (reservation)" if address is None else "mmap"
        raise _error(call, nbytes, ctypes.get_errno())
    return found


def reserve(nbytes: int) -> int:
    """Address of a new read-only stretch that reads as zeros and commits nothing."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return _mmap(None, nbytes, mmap.PROT_READ, flags, -1, 0)


def reserve_again(address: int, nbytes: int) -> None:
    """Turn mapped addresses back into reserved ones."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
    _mmap(address, nbytes, mmap.PROT_READ, flags, -1, 0)


def map_file(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Put file bytes at reserved addresses, readable and writable."""
    _mmap(
        address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, offset
    )


def unmap(address: int, nbytes: int) -> None:
    """Drop a stretch of addresses altogether."""
    _libc.munmap(address, nbytes)


def allocate(fd: int, first: int, count: int, page_size: int) -> None:
    """Commit file pages now (zeros), or fail with the file as it was.

    Raises StoreFullError where the system has no memory.
    """
    nbytes = count * page_size
    number = _fallocate(fd, 0, first * page_size, nbytes)
    if number in (errno.ENOMEM, errno.ENOSPC):
        raise StoreFullError(str(_error("fallocate", nbytes, number)), count)
    if number:
        raise _error("fallocate", nbytes, number)


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Give file bytes back to the operating system; they read as zeros."""
    number = _fallocate(fd, FALLOC_PUNCH, offset, nbytes)
    if number:
        raise _error("fallocate", nbytes, number)


def _fallocate(fd: int, mode: int, offset: int, nbytes: int) -> int:
    """The error number, 0 for success."""
    while _libc.fallocate(fd, mode, offset, nbytes) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            return number
    return 0
