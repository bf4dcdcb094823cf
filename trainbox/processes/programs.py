"""The table of all programs that Trainbox starts with its own Python.

`command_of` makes their commands. `tests/test_programs.py` compares the table with the code.
"""

import sys
from typing import NamedTuple


class Program(NamedTuple):
    """A module that runs as a process of its own.

    Attributes:
        module: What follows `python -P -m`.
        started_by: The modules that start it.
        reads: What it gets besides the environment.
        prints: Its output, for the module that has started it.
    """

    module: str
    started_by: tuple[str, ...]
    reads: str
    prints: str


TRAINER = Program(
    "trainer",
    (
        "entrypoint.launch.plan",
        "entrypoint.cli.planning",
        "entrypoint.cli.training",
        "entrypoint.cli.launching",
        "entrypoint.bench.runs",
    ),
    "a command of the table of options, all values checked",
    "what the user sees",
)
ENTRYPOINT = Program(
    "entrypoint",
    # A trial of a sweep over a script is a run of its own, so the trainer starts what starts it.
    ("entrypoint.launch.inner_trainings", "trainer.sweep.trial_work"),
    "a command of `trainbox`",
    "what the user sees",
)
TORCHRUN = Program(
    "trainer.programs.ranks.torchrun",
    ("entrypoint.launch.plan", "entrypoint.health.deep_cases"),
    "the options of torchrun, and the command of each rank",
    "the output of its ranks",
)
SCRIPT_RANK = Program(
    "entrypoint.script.rank",
    ("entrypoint.cli.run",),
    "the command of a user's script",
    "the output of the script, which replaces it",
)
DRIVER = Program(
    "entrypoint.driver.process",
    ("entrypoint.driver.process",),
    "questions to NVML on a pipe",
    "nothing; the answers go to another pipe",
)
TORCH_INFO = Program(
    "trainer.programs.machine.torch_info",
    ("entrypoint.doctor.examine",),
    "nothing",
    "what torch sees of the GPUs, as a line of JSON",
)
COLLECT_ENV = Program(
    "torch.utils.collect_env",  # torch's own
    ("entrypoint.doctor.examine",),
    "nothing",
    "torch's report for its developers",
)
SELFTEST = Program(
    "trainer.programs.machine.selftest",
    ("entrypoint.health.deep_cases",),
    "`compute`, or `exchange` under torchrun",
    "a line of JSON for each test of a device",
)
GPU_EVENTS = Program(
    "trainer.records.gpu_events",
    ("entrypoint.health.watch",),
    "the file of events of the GPUs",
    "nothing; it adds the events to the run that has ended",
)
OUTPUTS = Program(
    "trainer.programs.outputs",
    ("entrypoint.drill.compare_files",),
    "the paths of two files of tensors, as JSON",
    "their differences, as JSON",
)
SWEEP_WORKER = Program(
    "trainer.sweep.worker",
    ("trainer.sweep.trial_work", "trainer.sweep.slots"),
    "orders on a connection, each for a training",
    "nothing; metrics and results go to the connection",
)
SCRIPT_WORKER = Program(
    "trainer.sweep.script_worker",
    ("trainer.sweep.trial_work",),
    "orders on a connection, each for a run of a script",
    "nothing; metrics and results go to the connection",
)
PROGRAMS = (
    *(TRAINER, ENTRYPOINT, TORCHRUN, SCRIPT_RANK, DRIVER, TORCH_INFO, COLLECT_ENV),
    *(SELFTEST, GPU_EVENTS, OUTPUTS, SWEEP_WORKER, SCRIPT_WORKER),
)


def command_of(program: Program, *arguments: str) -> list[str]:
    """Return the command that runs a program of the table.

    `-P` keeps the current folder out of sys.path. Without it a user's trainer.py or statistics.py
    would run instead of ours.
    """
    return [sys.executable, "-P", "-m", program.module, *arguments]
