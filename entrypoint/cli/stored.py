"""The verbs for runs that are stored: `verify`, `evaluate`, `predict`, `export` and others."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entrypoint.cli.launching import become_trainer, supervised
from entrypoint.cli.planning import prepare
from entrypoint.cli.verb import Verb, refuse_unused, verb
from entrypoint.launch.children import EVALUATION, PREDICTION, UNSAVED_TRAINING
from entrypoint.script.script_folder import KIND
from trainbox.disclosure.suggested_commands import command as command_line
from trainbox.disclosure.suggested_commands import near_runs, such_as
from trainbox.errors import WrongUse
from trainbox.files.regular_files import object_if_valid, open_regular
from trainbox.folders.record_folder import CONFIG, MANIFEST
from trainbox.task_names.task_spec import is_task


@verb("verify", Verb)
def verify(**values: Any) -> None:
    """Repeat RUN and compare the bits, or compare RUN with the run OTHER without training.

    If they differ, the exit code is 8. The message names the first recorded step and the first
    tensor that differ, and the manifest entries that differ.

    \b
    Examples:
      trainbox verify runs/digits-7d2c
      trainbox verify runs/digits-7d2c --steps 100
      trainbox verify runs/digits-7d2c runs/other
    """
    run, other = values["run"], values["other"]
    if other is not None:
        for folder in (run, other):
            _refuse_script("verify", folder)
        refuse_unused(f"verify {run} {other}", {"run", "other"})
        check_folder("verify", run)
        check_folder("verify", other)
        become_trainer("verify", {"run": run, "other": other})
    check_run("verify", run, "digests.jsonl")
    supervised(prepare("verify", values), UNSAVED_TRAINING)


@verb("evaluate", Verb)
def evaluate(**values: Any) -> None:
    """Evaluate a checkpoint of RUN, also while RUN trains.

    The figures are compared with the figures that the training recorded. If they differ and nothing
    has changed since, the exit code is 8.

    \b
    Examples:
      trainbox evaluate runs/digits-7d2c
      trainbox evaluate runs/digits-7d2c --checkpoint last --predictions out.csv
      trainbox evaluate runs/digits-7d2c --data test --out results
      trainbox evaluate runs/digits-7d2c --data-dir other-data --gpus 2
    """
    check_run("evaluate", values["run"])
    supervised(prepare("evaluate", values), EVALUATION)


@verb("predict", Verb)
def predict(**values: Any) -> None:
    """Predict FILES with the weights of RUN, and write a row for each to standard output.

    FILES are files, or folders that are searched for the files of the task.

    \b
    Examples:
      trainbox predict runs/images-7d2c a.jpg b.jpg
      trainbox predict runs/images-7d2c new/ > predictions.csv
      trainbox predict runs/images-7d2c new/ --format jsonl --gpus 2
    """
    run, files = values["run"], values["files"]
    if not (run / CONFIG).exists() and (files[-1] / CONFIG).is_file():
        line = command_line("predict", shlex.join(map(str, (files[-1], run, *files[:-1]))))
        raise WrongUse(f"predict {run}: the run comes before the files: `{line}`")
    check_run("predict", run)
    check_files(values["files"])
    supervised(prepare("predict", values), PREDICTION)


@verb("export", Verb)
def export(**values: Any) -> None:
    """Export the model of RUN as a file that needs no Trainbox, with a card.

    The file is loaded again, and its outputs are compared with the model's outputs on validation
    examples. If they differ, the exit code is 8 and no file is written.

    \b
    Examples:
      trainbox export runs/digits-7d2c
      trainbox export runs/digits-7d2c --checkpoint last --out exported
      trainbox export runs/digits-7d2c --to onnx --licence CC-BY-4.0
    """
    check_run("export", values["run"])
    become_trainer("export", values)


@verb("config", Verb)
def config(**values: Any) -> None:
    """Print the settings of a run as JSON, if nobody has edited them.

    The file RUN/config.json is also a file for --config.

    \b
    Examples:
      trainbox config runs/digits-7d2c
      trainbox train --config runs/digits-7d2c/config.json --run again
    """
    check_folder("config", values["run"])
    become_trainer("config", values)


@verb("tasks", Verb)
def tasks(**values: Any) -> None:
    """List the built-in tasks, or the fields of the task NAME (also file.py:Class)."""
    become_trainer("tasks", values)


@verb("sweep show", Verb)
def sweep_show(**values: Any) -> None:
    """Print the results so far of the sweep NAME (its folder, or its name in --runs-dir).

    \b
    Examples:
      trainbox sweep show digits-sweep-7d2c1a90
      trainbox sweep show digits-sweep-7d2c1a90 --csv > trials.csv
      trainbox sweep show digits-sweep-7d2c1a90 --metric macro_f1 --figure f1.svg
    """
    become_trainer("sweep show", values)


def is_script(run: Path) -> bool:
    """Return whether the folder `run` is a run of a script."""
    return (object_if_valid(run / CONFIG) or {}).get("kind") == KIND


def _refuse_script(verb: str, run: Path) -> None:
    """Refuse the folder `run` for the `verb` if it is a run of a script.

    Raises:
        WrongUse: it is. The message of `verify` names the drill, which repeats scripts.
    """
    config = object_if_valid(run / CONFIG) or {}  # the trainer reports what is wrong
    if config.get("kind") != KIND:
        return
    if verb == "compare":
        raise WrongUse(
            f"compare {run}: this is a run of a script, and another one is of a task: compare runs "
            "of one kind"
        )
    if verb != "verify":
        raise WrongUse(
            f"{verb} {run}: this is a run of a script, whose model only the script can build: "
            "write the evaluation into the script, or train a task"
        )
    script = f"{'-m ' if config.get('is_module') else ''}{config.get('script')}"
    raise WrongUse(
        f"verify {run}: this is a run of a script, which only the drill can repeat: use "
        f"`{command_line('drill', f'run {script} --compare FILE')}`"
    )


def check_folder(command: str, run: Path) -> None:
    """Raise WrongUse if the folder `run` does not exist, with the name of the nearest one."""
    of_run = (CONFIG, MANIFEST)
    around = next((f for f in run.parents if all((f / n).is_file() for n in of_run)), None)
    if around is not None and run.exists() and not (run / CONFIG).exists():
        raise WrongUse(f"{command} {run}: this is a part of a run: did you mean {around}?")
    if run.is_file():
        raise WrongUse(f"{command} {run}: this is a file: {near_runs(run)}")
    if not run.is_dir():
        of_task = ""
        if is_task(str(run)):
            line = command_line("train", shlex.quote(str(run)))
            of_task = f"give the folder of a run of this task, as `{line}` prints it"
        raise WrongUse(f"{command} {run}: the folder does not exist: {near_runs(run, of_task)}")


def check_run(command: str, run: Path, *others: str) -> None:
    """Raise WrongUse if `run` is not the run of a task, or one of its files cannot be read."""
    check_folder(command, run)
    _refuse_script(command, run)
    for name in ("config.json", "manifest.json", *others):
        try:
            open_regular(run / name).close()
        except OSError as error:
            raise WrongUse(
                f"{command} {run}: {name} cannot be read ({error.strerror}): give the folder of a "
                f"run{such_as(run) or ', such as runs/digits-7d2c'}"
            ) from error


def check_files(given: Sequence[Path]) -> None:
    """Raise WrongUse if a path is neither a file nor a folder."""
    for path in given:
        try:
            problem = "is not a file or folder" if path.exists() else "does not exist"
            usable = path.is_file() or path.is_dir()
        except OSError as error:
            problem, usable = f"cannot be read ({error.strerror})", False
        if not usable:
            raise WrongUse(f"{path} {problem}: name files, or folders of files")
