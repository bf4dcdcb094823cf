import sys

if not sys.flags.safe_path:
    # `-m` puts the current folder first, where a user's logging.py would replace the library.
    del sys.path[0]

import os
from pathlib import Path

from trainbox.processes.environment import Internal, restore_environment
from trainbox.processes.streams import open_streams, outlive_readers
from trainer.cli.commands import main

# torch reads this at its import. Without it, torch compiles kernels for some operators on GPUs, but
# only on machines with a C compiler and triton. So the bits would depend on both.
os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")

restore_environment()
open_streams()
try:
    main(outlive_readers)
except SystemExit as end:
    # End without the interpreter's own cleanup. It sometimes aborts while it ends gloo's threads,
    # and it waits forever for loader workers, which ignore SIGTERM and end with this process.
    if not end.code and (finished := os.environ.get(Internal.FINISHED)):
        Path(finished).touch()  # the launcher's proof: a task may also exit with code 0
    sys.stdout.flush()
    sys.stderr.flush()
    if logging := sys.modules.get("logging"):  # its import takes longer than the check of options
        logging.shutdown()
    os._exit(int(end.code or 0))
