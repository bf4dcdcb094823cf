import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, put there by -m: a logging.py of a user's is not ours

import os
from pathlib import Path

from trainer.cli.commands import main
from trainer.system.streams import open_streams, outlive_readers

# torch reads this at its import. Without it, torch compiles kernels for some operators on GPUs, but
# only on machines with a C compiler and triton. So the bits would depend on both.
os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")

open_streams()
if sys.argv[1:2] in (["train"], ["verify"], ["sweep"], ["sweep-run"]):
    outlive_readers()
try:
    main()
except SystemExit as end:
    # Not the interpreter's own end: taking gloo's threads down it is aborted now and then, and it
    # would wait for ever for loader workers, which do not hear SIGTERM and die with this process.
    if not end.code and (finished := os.environ.get("TRAINBOX_FINISHED")):
        Path(finished).touch()  # a task that ends the process with code 0 has not trained
    sys.stdout.flush()
    sys.stderr.flush()
    if logging := sys.modules.get("logging"):  # its import takes longer than the check of options
        logging.shutdown()
    os._exit(int(end.code or 0))
