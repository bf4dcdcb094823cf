"""The drill of a task: kills and other numbers of processes do not change its training.

The drill repeats a small `trainbox train` with random kills, and compares the digests.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

from entrypoint.drill.schedule import KillSchedule, row, task_schedules
from entrypoint.drill.training import Due, Kill, StartProgress, Training, drill_folder
from entrypoint.drill.written_files import RUN
from trainbox.disclosure.suggested_commands import command
from trainbox.errors import ExitCode, Failure
from trainbox.files.entries import EntryReader

_CHECKPOINT_STEPS = 5


def drill_task(
    task: str, shards: int, steps: int, device: Sequence[str], most: int, draw: random.Random
) -> Iterator[str]:
    """Train `task` with each schedule; yield the table line by line.

    Raises:
        Failure: one of the trainings failed, with its exit code.
        Failure: the digests differ, or a training has not resumed.
    """
    yield f"{task}\n  {'processes':<18} {'':<34} weights          optimizer metrics"
    digests: list[str] = []
    with drill_folder(f"drill {task}") as folder:
        for number, case in enumerate(task_schedules(most)):
            case_folder = folder / f"case-{number}"
            arguments = training_arguments(task, shards, steps, case_folder, device)
            kills, digest = train(case, arguments, case_folder, steps, draw)
            digests.append(digest)
            yield row(case, kills, digest, "same" if digest == digests[0] else "DIFFERENT")
        if different := [number for number, digest in enumerate(digests) if digest != digests[0]]:
            verify = command("verify", f"{folder}/case-0/run {folder}/case-{different[0]}/run")
            raise Failure(
                f"{len(different)} of {len(digests)} trainings differ in their bits; to find the "
                f"first difference: {verify}",
                exit_code=ExitCode.DIFFERENT,
            )
    yield f"  the same bits in all {len(digests)} trainings"


def train(
    case: KillSchedule, arguments: list[str], folder: Path, steps: int, draw: random.Random
) -> tuple[str, str]:
    """Train `case` in `folder`, and kill each start but the last one after a random step.

    `arguments` are the arguments of `trainbox`. Return the column of the kills, and the digest of
    weights, optimizer and validations at the end.

    Raises:
        Failure: a start failed or left no digest, or the last one has not resumed.
    """
    training = Training(
        folder,
        lambda count: [argument.replace("{processes}", str(count)) for argument in arguments],
    )

    def kills() -> Iterator[Kill]:
        for left in reversed(range(len(case.processes) - 1)):
            begin = training.starts[-1].steps[-1] if training.starts else 0
            after = draw.randint(begin + 1, begin + max(1, (steps - begin) // 2))
            yield kill_after(after, None if left else training.run), SIGKILL

    training.train(case.processes, kills())
    if len(case.processes) > 1 and len(training.starts) == 1:
        raise Failure("the training ended before it could be killed: give more --steps")
    killed = ", ".join(str(start.steps[-1]) for start in training.starts[:-1])
    shown = f"killed after step {killed}" if killed else "undisturbed"
    digest = final_digest(training.run, steps)
    if killed:
        check_resumed(training.run)
    return shown, digest


def kill_after(step: int, run: Path | None = None) -> Due:
    """Return a function that tells whether `step` is done, and whether `run` has a checkpoint."""

    def is_due(now: StartProgress) -> bool:
        return now.step >= step and (run is None or any(run.glob("checkpoints/step-*.json")))

    return is_due


def check_resumed(run: Path) -> None:
    """Check that the last start of a training began with a checkpoint.

    If it began with the first step, its bits would be the same as well.

    Raises:
        Failure: it has not resumed.
    """
    kinds = [entry["kind"] for entry in _entries(run / "digests.jsonl")]
    if [kind for kind in kinds if kind in ("start", "resume")][-1:] != ["resume"]:
        raise Failure(
            f"resume not shown in {run}: the last start began with the first step; give more "
            "--steps, so that a kill comes after a checkpoint",
            exit_code=ExitCode.DIFFERENT,
        )


def final_digest(run: Path, steps: int) -> str:
    """Return the digests of weights, optimizer and validations after `steps` steps.

    Raises:
        Failure: the last step has no digest or validation, or the weights did not change.
    """
    digests, metrics = (_entries(run / name) for name in ("digests.jsonl", "metrics.jsonl"))
    validations = [entry for entry in metrics if entry["kind"] == "validation"]
    for name, entries in (("digest", digests), ("validation", validations)):
        if not entries or entries[-1]["step"] != steps:
            raise Failure(f"no {name} of step {steps} in {run}")
    first, last = digests[0], digests[-1]
    if first["model"] == last["model"]:
        raise Failure(
            f"the weights after {steps} steps equal the initial ones: nothing was trained"
        )
    figures = [
        {name: value for name, value in entry.items() if name != "time_unix_s"}
        for entry in validations
    ]
    validated = hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()
    return f"{last['model'][:16]} {last['optimizer'][:8]} {validated[:8]}"


def training_arguments(
    task: str, shards: int, steps: int, folder: Path, device: Sequence[str]
) -> list[str]:
    """Return the arguments of `trainbox train` for one case of the drill."""
    options = (
        f"--shards {shards} --max-steps {steps} --log-steps 1 --no-rehearsal --nnodes 1 "
        f"--checkpoint-steps {_CHECKPOINT_STEPS}"
    )
    folders = ["--runs-dir", str(folder), "--run", RUN]
    return ["train", task, *options.split(), *folders, *device]


def _entries(path: Path) -> list[dict[str, Any]]:
    return list(EntryReader(path).read())
