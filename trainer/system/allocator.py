"""Let the C library keep the memory that training steps free and need again."""

import ctypes

# From glibc's malloc.h. If one of them is set, glibc no longer adjusts the other, so both are set.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_IN_HEAP = 32 * 2**20  # bytes; the most that glibc allows
_KEPT = 2**31 - 1  # bytes; the most that an int holds


def keep_freed_memory() -> None:
    """Keep freed blocks of up to 32 MiB in the process. Without glibc, do nothing.

    By default, glibc may return the gradients of a small model to the kernel in each step. The
    kernel then clears hundreds of pages for the next step. The figures are in
    docs/decisions/0013-speed.md.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT)
