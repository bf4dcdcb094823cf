"""Keep CPU cores busy beside a command: `python -m tests.support.load --cores 2 -- make test`.

Without a command, keep them busy until this process ends. Tests must also pass on a busy machine,
because they wait for events and not for time.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

# This process ends when its parent has ended in any way.
_BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""


@contextlib.contextmanager
def load(cores: int) -> Iterator[list[int]]:
    """Keep `cores` processes busy, and yield their process ids."""
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(cores)]
    try:
        yield [process.pid for process in busy]
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main(words: Sequence[str]) -> int:
    """Run the command beside the load and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.load", description=__doc__)
    parser.add_argument(
        "--cores", type=int, default=2, metavar="N", help="Cores to keep busy. Default: 2."
    )
    parser.add_argument(
        "command", nargs="*", metavar="COMMAND", help="Command to run beside the load."
    )
    given = parser.parse_args(words)
    with load(given.cores), contextlib.suppress(KeyboardInterrupt):
        if given.command:
            return subprocess.run(given.command, check=False).returncode
        while True:
            time.sleep(3600)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
