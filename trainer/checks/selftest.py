"""A process of `trainbox health --deep`: tests its device, and tells what came out in a line of
JSON for each test.

`python -m trainer.checks.selftest compute` tests the device alone; `exchange`, under torchrun, what
lies between several.
"""

import dataclasses
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from trainer.errors import Failure
from trainer.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.checks.devices import Measured


def main() -> int:
    """Do the tests that the command line names; returns the exit code."""
    die_with_parent()  # before the import of torch, which takes seconds
    try:
        for measured in _tests(sys.argv[1], os.environ["TRAINBOX_DEVICE"]):
            _tell(dataclasses.asdict(measured))
    except Failure as failure:
        _tell({"error": str(failure)})
        return failure.exit_code
    except Exception as error:  # noqa: BLE001 - whatever a broken device does
        traceback.print_exc()
        # CUDA's have lines of advice
        _tell({"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})
        return 1
    return 0


def _tests(kind: str, device_name: str) -> "Iterator[Measured]":
    from trainer.checks.devices import all_reduce, matrix_product, memory_copy
    from trainer.parallel.world import World, choose_device

    if kind == "exchange":
        world = World.start(device_name)
        yield all_reduce(world)
        world.leave()
    else:
        device = choose_device(device_name, 0)
        yield matrix_product(device)
        yield memory_copy(device)


def _tell(line: dict[str, Any]) -> None:
    """All at once: the ranks share a pipe."""
    whole = json.dumps({"rank": int(os.environ.get("RANK", "0")), **line})
    os.write(1, f"{whole}\n".encode())


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # not the interpreter's own end, which aborts now and then while it takes gloo's threads down
    os._exit(code)
