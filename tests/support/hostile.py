"""A rank that sends pickles: `python hostile.py MARKER train ...` trains, and its pickles write
MARKER when they are loaded.
"""

import pickle
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist

from trainer.parallel import world as distributed


class Evil:
    """Whoever unpickles it writes the marker."""

    marker = ""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.marker, "w")


def packed(_value: Any) -> torch.Tensor:
    """A pickle in the place of JSON."""
    return torch.frombuffer(bytearray(pickle.dumps(Evil())), dtype=torch.uint8)


def main() -> None:
    """Train as the others do, and send pickles instead of values."""
    Evil.marker = sys.argv.pop(1)
    real = dist.all_gather_object
    # what a version with pickles would call
    dist.all_gather_object = lambda values, _value: real(values, Evil())
    distributed._packed = packed
    sys.argv[0] = "trainer"
    runpy.run_module("trainer", run_name="__main__")


if __name__ == "__main__":
    main()
