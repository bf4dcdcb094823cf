"""A training whose rank 1 sends pickles: `python hostile.py MARKER train ...`.

A pickle writes the file MARKER when it is loaded.
"""

import os
import pickle
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist

from trainer.parallel import world as distributed


class Evil:
    """An object whose unpickling writes the marker."""

    marker = ""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.marker, "w")


def packed(_value: Any) -> torch.Tensor:
    """Return a pickle instead of JSON."""
    return torch.frombuffer(bytearray(pickle.dumps(Evil())), dtype=torch.uint8)


def main() -> None:
    """Train as the other ranks do; rank 1 sends pickles instead of values."""
    Evil.marker = sys.argv.pop(1)
    if os.environ["RANK"] == "1":
        real = dist.all_gather_object
        # what a version with pickles would call
        dist.all_gather_object = lambda values, _value: real(values, Evil())
        distributed.packed = packed
    sys.argv[0] = "trainer"
    runpy.run_module("trainer", run_name="__main__")


if __name__ == "__main__":
    main()
