"""Train one run in forks of this process, which has torch already, and kill each: `python killed.py
KILLS TRAIN-WORDS`.

A line for each kill; the last fork is let alone and says how the run ends.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch._dynamo  # an optimizer imports it; with all of these here, a fork begins at once
import torch.utils.tensorboard  # noqa: F401

import trainer.session  # noqa: F401
from trainer.cli.commands import main

_CHECKPOINTS = Path("runs/r/checkpoints")


def _train() -> None:
    """As `python -m trainer` does."""
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(end.code or 0))


def _fork(*more_words: str) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        sys.argv += more_words
        _train()
    return pid


def _wait_until(pid: int, saving: bool) -> None:
    """Until the fork is writing a save, or until it is not (and has removed what the one before it
    left).
    """
    while any(_CHECKPOINTS.glob("*.tmp")) is not saving:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended before it was killed"
        time.sleep(0.0005)  # a save takes several times as long


def _kill(draw: random.Random, at_a_save: bool) -> None:
    pid = _fork("--checkpoint-steps", "3")
    for _save in range(draw.randint(1, 3)):
        _wait_until(pid, saving=False)
        _wait_until(pid, saving=True)
    if not at_a_save:
        # steps take a millisecond, saves some more: any moment of theirs
        time.sleep(draw.uniform(0, 0.1))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print("killed", "saving" if any(_CHECKPOINTS.glob("*.tmp")) else "between", flush=True)


kills, *words = sys.argv[1:]
sys.argv = ["trainer", "train", *words]
for number in range(int(kills)):
    _kill(random.Random(number), at_a_save=number % 2 == 0)  # noqa: S311
_, status = os.waitpid(_fork(), 0)
sys.exit(os.waitstatus_to_exitcode(status))
