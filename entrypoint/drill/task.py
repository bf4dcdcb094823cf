"""The drill of a task: kills and other numbers of processes do not change its training.

The drill repeats a small `trainbox train` with random kills, and compares the digests.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

from entrypoint.drill import schedule
from entrypoint.drill.schedule import KillSchedule, task_schedules
from entrypoint.drill.training import Due, Training
from trainbox.contract.entries import EntryReader
from trainbox.contract.errors import ExitCode, Failure
from trainbox.contract.hints import command
from trainbox.contract.temporary import keep, temporary_folder

_CHECKPOINT_STEPS = 5


@dataclass(frozen=True)
class DrillResult:
    """The result of a training.

    `killed_after` has the steps after which the training was killed. `digest` covers weights,
    optimizer and validations at the end.
    """

    case: KillSchedule
    killed_after: tuple[int, ...]
    digest: str


def drill_task(
    task: str, shards: int, steps: int, device: Sequence[str], most: int, draw: random.Random
) -> Iterator[str]:
    """Train `task` with each schedule; yield the table line by line.

    Raises:
        Failure: one of the trainings failed, with its exit code.
        Failure: the digests differ.
    """
    yield f"{task}\n  {'processes':<18} {'':<34} weights          optimizer metrics"
    outcomes: list[DrillResult] = []
    with temporary_folder("drill-") as folder:
        try:
            for number, case in enumerate(task_schedules(most)):
                case_folder = folder / f"case-{number}"
                arguments = training_arguments(task, shards, steps, case_folder, device)
                outcomes.append(run_case(case, arguments, case_folder, steps, draw))
                yield row(outcomes[-1], outcomes[0])
        except Failure as failure:
            keep(folder)
            failed = f"drill {task}: the case {case}: {failure} (kept: {folder})"
            raise Failure(failed, exit_code=failure.exit_code) from failure
        digests = [outcome.digest for outcome in outcomes]
        if different := [number for number, found in enumerate(digests) if found != digests[0]]:
            keep(folder)
            raise Failure(
                f"drill {task}: {len(different)} of {len(outcomes)} trainings differ in their "
                "bits; to find the first difference: "
                + command("verify", f"{folder}/case-0/run {folder}/case-{different[0]}/run"),
                exit_code=ExitCode.DIFFERENT,
            )
    yield f"  the same bits in all {len(outcomes)} trainings"


def run_case(
    case: KillSchedule, arguments: list[str], folder: Path, steps: int, draw: random.Random
) -> DrillResult:
    """Train `case` in `folder`, and kill each start but the last one after a random step.

    `arguments` are those of `trainbox`.

    Raises:
        Failure: a start failed or left no digest.
    """
    training = Training(
        folder,
        lambda count: [argument.replace("{processes}", str(count)) for argument in arguments],
    )

    def due(_number: int) -> Due:
        begin = training.starts[-1].reported[-1] if training.starts else 0
        after = draw.randint(begin + 1, begin + max(1, (steps - begin) // 2))
        return lambda now: now.step >= after

    training.train(case.processes, due, [SIGKILL] * (len(case.processes) - 1))
    if len(case.processes) > 1 and not training.kills:
        raise Failure("the training ended before it could be killed: give more --steps")
    killed = tuple(start.reported[-1] for start in training.starts if start.kill)
    return DrillResult(case, killed, final_digest(training.run, steps))


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
    arguments = [
        "train",
        task,
        "--shards",
        str(shards),
        "--max-steps",
        str(steps),
        "--log-steps",
        "1",
    ]
    arguments += ["--no-rehearsal", "--nnodes", "1", "--checkpoint-steps", str(_CHECKPOINT_STEPS)]
    arguments += ["--runs-dir", str(folder), "--run", "run", "--mirror="]
    return [*arguments, *device]


def row(outcome: DrillResult, first: DrillResult) -> str:
    """Return the row of a case: processes, kills, digest, and whether it equals the first's."""
    kills = (
        f"killed after step {', '.join(map(str, outcome.killed_after))}"
        if outcome.killed_after
        else "undisturbed"
    )
    verdict = "same" if outcome.digest == first.digest else "DIFFERENT"
    return schedule.row(outcome.case, kills, outcome.digest, verdict)


def _entries(path: Path) -> list[dict[str, Any]]:
    return list(EntryReader(path).read())
