"""Freed memory stays in the process."""

import ctypes
import subprocess
import sys

import pytest

_FAULTS = """
import ctypes, resource
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a huge page has a single fault
from trainer.loop.arithmetic import keep_freed_memory
keep_freed_memory()
def round():
    blocks = [bytearray(16 * 2**20) for _ in range(3)]
for _ in range(3):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_blocks_are_used_again_without_new_pages() -> None:
    # A process of its own, because a training in this one may have called the function before.
    ended = subprocess.run(
        [sys.executable, "-P", "-c", _FAULTS], capture_output=True, text=True, check=True
    )
    assert int(ended.stdout) < 100  # tens of thousands if glibc returns the blocks of each round
