"""`trainbox train` on two processes with seconds where it has minutes: `python supervised.py
STOP_BUDGET_S TIMEOUT_S WORDS`.

Run by torchrun as a rank's program, with the deadline of an exchange first, it is the trainer
itself.
"""

import os
import sys
from datetime import timedelta


def main() -> None:
    if "RANK" in os.environ:
        import trainer.parallel.world

        trainer.parallel.world.TIMEOUT = timedelta(seconds=float(sys.argv.pop(1)))
        from trainer.cli.commands import main as train

        train()
    from entrypoint.launch.supervise import supervise

    budget_s, *words = sys.argv[1:]
    argv = [
        sys.executable,
        "-P",
        "-m",
        "trainer.launch.torchrun",
        "--standalone",
        "--nproc-per-node=2",
        "--",
        __file__,
        *words,
    ]
    sys.exit(supervise(argv, os.environ, float(budget_s)))


main()
