"""Run `trainbox train` on two processes with deadlines of seconds instead of minutes.

The command is `python supervised.py STOP_BUDGET_S TIMEOUT_S ARGUMENTS`. torchrun starts this file
again as the program of each rank, with TIMEOUT_S for an exchange first. It is then the trainer.
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
        "trainer.programs.ranks.torchrun",
        "--standalone",
        "--nproc-per-node=2",
        "--",
        __file__,
        *words,
    ]
    sys.exit(supervise(argv, os.environ, float(budget_s)).code)


main()
