"""`trainbox bench`: the speed of many short trainings."""

import os
import shlex
import sys
from pathlib import Path

from entrypoint.bench import report, tables
from entrypoint.bench.runs import ANOTHER_FOLDER, Bench, write_files
from entrypoint.cli.training import gpus_for_trainings, parsed_training
from entrypoint.cli.verb import verb
from entrypoint.launch.request import detect_cluster
from entrypoint.system.cgroup import usable_cpus
from trainbox.disclosure.secret_rule import shown_variable
from trainbox.errors import ExitCode, Failure
from trainbox.folders.write_failures import show, writing
from trainbox.processes.streams import message

# The options of `train` that the bench sets itself.
_OWN_OPTIONS = (
    *("run", "runs-dir", "resume", "max-steps", "epochs", "eval-every"),
    *("checkpoint-minutes", "measure-seconds", "strategy"),
    *("nnodes", "node-rank", "rdzv-endpoint", "rdzv-id"),
)


@verb(
    "bench",
    options_metavar="[OPTIONS]",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def bench(
    arguments: tuple[str, ...],
    counts: tuple[int, ...] | None,
    processes: tuple[int, ...] | None,
    gpu_ids: str | None,
    device: str | None,
    strategies: str,
    batch_sizes: tuple[int, ...] | None,
    workers: tuple[int, ...] | None,
    rounds: int,
    seconds: float,
    out: Path | None,
) -> None:
    """Measure the training speed of TASK on 1, 2, 4 or more GPUs, by batch size and workers.

    Each case is a real `trainbox train`. In each round, every case is measured once. Other options
    of `train` apply to all cases.

    \b
    Examples:
      trainbox bench mnist --gpus 1,2,4 --strategies dp,ddp --batch-size 64,128
      trainbox bench mnist --gpus 1,2 --set in_memory=false --workers 0,4,8
      trainbox bench digits --processes 1,2 --device cpu --out tables
    """
    training = parsed_training("bench", arguments, _OWN_OPTIONS)
    cpus = usable_cpus()
    detect_cluster(os.environ)  # several tasks of a job would measure each other
    most = max(counts) if counts else None
    gpus = gpus_for_trainings(most, gpu_ids, device, on_cpu=bool(processes))
    cpu, numbers = tables.choose_counts(counts, processes, gpus, cpus)
    named = tables.check_strategies(strategies, cpu)
    table = tables.lines(numbers, named, batch_sizes or (None,), workers or (None,))
    if out is not None:
        with writing(out, ANOTHER_FOLDER):  # before the first training
            out.mkdir(parents=True, exist_ok=True)
            (out / "bench.md").touch()
    unit = "process" if cpu else "GPU"
    shared = [*arguments, *tables.own_defaults(training, cpu, max(1, cpus // max(numbers)))]
    runs = Bench(
        tables.cases(table),
        lambda case, folder: tables.training_arguments(case, shared, cpu, folder, seconds),
        lambda case: tables.describe(case, unit),
    )
    runs.run(rounds)
    found = tables.rows(table, runs.outcomes)
    given = [(name, value) for name in ("TASK", "SET") if (value := os.environ.get(name))]
    outside = [f"{name}={shown_variable(name, value)}" for name, value in given]
    facts = {
        "command": shlex.join([*outside, "trainbox", *sys.argv[1:]]),
        "unit": unit,
        "rounds": rounds,
        "seconds": seconds,
        **runs.facts,
    }
    text = report.markdown(found, facts)
    show(text)
    if out is not None:
        write_files(out, text, report.as_json(found, runs.outcomes, facts))
    if runs.stopped_by:
        message(f"{runs.stopped_by} received: the tables show the cases measured before it")
        sys.exit(ExitCode.PREEMPTED)
    failed = [outcome for outcome in runs.outcomes.values() if outcome.failure]
    if len(failed) == len(runs.outcomes):
        raise Failure(
            f"bench: no case was measured: {failed[0].failure}", exit_code=failed[0].exit_code
        )
