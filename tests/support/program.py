"""Run the Python code of the first argument, as `python -c` does, in a fork of `Ranks`."""

import sys

exec(sys.argv.pop(1), {"__name__": "__main__"})  # noqa: S102 - a test's own code
