"""Check that all ranks have the same software, arguments and settings."""

import dataclasses
import hashlib
import itertools
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainbox.classification import Classification
from trainbox.disclosure.suggested_commands import command
from trainbox.errors import WrongUse
from trainbox.options.config import Config
from trainbox.task import Task
from trainer.parallel.world import World
from trainer.records import manifest

_SAME_COMMAND = (
    "start the same version with the same arguments and TRAINBOX_ variables on each machine"
)
SAME_HARDWARE = (
    "use machines with the same GPUs, drivers and files of the task (compare "
    f"`{command('doctor')}`), or set the option on each machine"
)


def check_command(world: World, config: Config, run: str | None, resume: str) -> None:
    """Check that all ranks were started with the same software, device and arguments.

    Raises:
        WrongUse: Something differs.
    """
    # The versions are first, because another version may have other settings.
    versions = {"torch": torch.__version__, "trainbox": manifest.revision()}
    refuse_difference(world, versions, _SAME_COMMAND)
    refuse_difference(world, {"device": world.device.type}, SAME_HARDWARE)
    arguments = {"run": run, "resume": resume, **dataclasses.asdict(config)}
    refuse_difference(world, arguments, _SAME_COMMAND)


def refuse_difference(world: World, found: Mapping[str, Any], remedy: str) -> None:
    """Raise WrongUse if a value of `found` differs between ranks."""
    digests = {n: hashlib.sha256(repr(x).encode()).hexdigest() for n, x in found.items()}
    if (name := world.first_difference(digests)) is not None:
        raise WrongUse(
            f"{name} is {found[name]} on {socket.gethostname()}, but differs in another process: "
            f"{remedy}"
        )


def refuse_other_classes(task: Task, path: Path, classes: Sequence[str] | None) -> None:
    """Check that the task has the same `classes` as the manifest of the run in `path`.

    A task may find its classes in the data, so other data could give the model's outputs another
    meaning.

    Raises:
        WrongUse: A class differs.
    """
    names = task.class_names if isinstance(task, Classification) else ()
    pairs = itertools.zip_longest(classes or (), names, fillvalue="missing")
    for k, (before, now) in enumerate(pairs):
        if before != now:
            raise WrongUse(
                f"class {k} of {path} is {before}, but class {k} of the data is {now}: give "
                "data with the classes of the training"
            )
