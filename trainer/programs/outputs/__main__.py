"""Compare the files of two trainings: `python -P -m trainer.programs.outputs REQUEST`.

REQUEST is a JSON object with the `tolerance`, the patterns of `ignored` entries, and two `files`.
Each of these is a list of the file's path and of folders, which texts may name.

It prints one line of JSON: the digest of the second file, the first difference or null, and the
largest difference of two numbers. It exits with code 2 if a file cannot be read.
"""

import json
import sys
from pathlib import Path

from trainbox.errors import ExitCode, Failure
from trainbox.processes.streams import open_streams
from trainer.programs.outputs.contents import digest, without, without_folders
from trainer.programs.outputs.differences import first_difference, largest_difference
from trainer.programs.outputs.formats import noun, read_entries
from trainer.system.report import report_failure


def main(arguments: list[str]) -> int:
    """Compare the files, print the result, and return the exit code."""
    request = json.loads(arguments[0])
    try:
        reference, other = (
            without_folders(without(read_entries(Path(file)), request["ignored"]), folders)
            for file, *folders in request["files"]
        )
    except Failure as failure:
        report_failure(failure)
        return failure.exit_code
    name = noun(Path(request["files"][0][0]))
    found = {
        "digest": digest(other),
        "difference": first_difference(reference, other, request["tolerance"], name),
        "largest": largest_difference(reference, other),
    }
    print(json.dumps(found))
    return ExitCode.SUCCESS


if __name__ == "__main__":
    open_streams()
    sys.exit(main(sys.argv[1:]))
