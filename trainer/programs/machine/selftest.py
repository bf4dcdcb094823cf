"""Test a device for `trainbox health --deep`, and print a line of JSON for each test.

The argument `compute` tests the device alone. `exchange`, under torchrun, tests the links between
several devices.
"""

import dataclasses
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from trainbox.errors import ExitCode, Failure
from trainbox.processes.environment import launch_facts
from trainbox.processes.process_tree import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.programs.machine.devices import DeviceResult


def main() -> int:
    """Run the tests that the command line names, and return the exit code."""
    die_with_parent()  # before the import of torch, which takes seconds
    try:
        for measured in _tests(sys.argv[1], launch_facts(os.environ).device):
            _print_line(dataclasses.asdict(measured))
    except Failure as failure:
        _print_line({"error": str(failure)})
        return failure.exit_code
    except Exception as error:  # noqa: BLE001 - a broken device may raise anything
        traceback.print_exc()
        # The first line is enough. CUDA's errors continue with lines of advice.
        _print_line({"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})
        return ExitCode.UNEXPECTED
    return ExitCode.SUCCESS


def _tests(kind: str, device_name: str) -> "Iterator[DeviceResult]":
    from trainer.parallel.device import choose_device
    from trainer.parallel.world import World
    from trainer.programs.machine.devices import all_reduce, matrix_product, memory_copy

    if kind == "exchange":
        world = World.start(device_name)
        yield all_reduce(world)
        world.leave()
    else:
        device = choose_device(device_name, 0)
        yield matrix_product(device)
        yield memory_copy(device)


def _print_line(line: dict[str, Any]) -> None:
    """Write `line` as JSON in one call, because the ranks share a pipe."""
    whole = json.dumps({"rank": int(os.environ.get("RANK", "0")), **line})
    os.write(1, f"{whole}\n".encode())


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # The interpreter's normal exit sometimes aborts while it ends gloo's threads.
    os._exit(code)
