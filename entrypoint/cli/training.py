"""The verbs `train`, `plan` and `sweep`."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from entrypoint.cli.planning import Launch, make_launch, prepare
from entrypoint.cli.verb import (
    ScriptCommand,
    Sectioned,
    file_settings,
    given_by_user,
    on_command_line,
    verb,
)
from entrypoint.driver.gpus import Gpu
from entrypoint.launch.plan import LaunchPlan, plan_sweep
from entrypoint.launch.request import LaunchRequest
from entrypoint.system.container import warn_of_loss
from trainbox.commands.command_page import TEMPLATE, Templated
from trainbox.commands.settings_file import FileSettings
from trainbox.disclosure.suggested_commands import command
from trainbox.errors import WrongUse
from trainbox.folders.write_failures import show
from trainbox.options import table
from trainbox.options.config import Config
from trainbox.options.run_name import check_run_name
from trainbox.options.table import config_of, swept_names
from trainbox.processes.programs import TRAINER
from trainbox.processes.streams import message
from trainbox.task_names.field_texts import field_texts
from trainbox.task_names.task_spec import locate, warn_of_overruled_imports


@verb("train", Sectioned)
def train(**values: Any) -> None:
    """Train TASK (default: digits), or resume a stopped run of the same command.

    \b
    Examples:
      trainbox train                                     digits on the hardware found here
      trainbox train mnist --gpus 2 --epochs 5           two GPUs
      trainbox train fashion_mnist --batch-size 512 --lr 0.002 --lr-scaling linear
      trainbox train my_tasks/gestures.py:Gestures --set width=64
      trainbox train --processes 2 --device cpu          two gloo processes, without a GPU
    """
    from entrypoint.cli.launching import supervised  # `plan` does without its modules
    from entrypoint.launch.children import TRAINING, UNSAVED_TRAINING

    # The bench removes the run folder, so nothing resumes.
    launch = _training("train", values)
    if values["measure_seconds"] is not None:
        supervised(launch, UNSAVED_TRAINING)
    warn_of_loss(values["runs_dir"])
    supervised(launch, TRAINING)


@verb("plan", Sectioned)
def plan(**values: Any) -> None:
    """Print as JSON what `train` would launch with the same arguments, and why; start nothing.

    \b
    Examples:
      trainbox plan mnist --gpus 3
      GPU_IDS=0,2 trainbox plan
    """
    show(json.dumps(dataclasses.asdict(_training("plan", values).plan), indent=2))


def _training(command: str, values: dict[str, Any]) -> Launch:
    """Return the launch of a training.

    Raises:
        Failure: a setting is wrong, or the request cannot be launched.
    """
    config = settled(values)
    check_run_name(values["run"])
    launch = prepare(command, values, config=config)
    warn_of_overruled_imports(config.task)
    return launch


def parsed_training(
    verb: str, arguments: Sequence[str], own: Sequence[str] = ()
) -> Mapping[str, Any]:
    """Return the parameters of the trainings that `verb` starts with these arguments of `train`.

    `own` are options that the verb sets itself.

    Raises:
        WrongUse: an argument, a variable or a file has a mistake or a batch per GPU, or the
            command line has one of `own`.
    """
    with train.make_context(verb, list(arguments)) as parsed:
        for key in own:
            if on_command_line(key.replace("-", "_")):
                raise WrongUse(
                    f"{verb} sets --{key} itself for each of its trainings: drop it "
                    f"(`{command(verb, '--help')}`)"
                )
        values: dict[str, Any] = parsed.params
        settled(values)
    if (per_gpu := values["batch_size_per_gpu"]) is not None:
        raise WrongUse(
            f"batch-size-per-gpu {per_gpu} contradicts the {verb}, which decides the batch on each "
            "number of GPUs: set batch-size instead"
        )
    return values


def gpus_for_trainings(
    gpus: int | str | None,
    gpu_ids: str | None,
    device: str | None,
    on_cpu: bool = False,
    of_our_torch: bool = True,
) -> int:
    """Return how many GPUs the trainings of this command may use, and show them only these.

    By default, these are all GPUs, as for a sweep. 0 is the CPU, also if --processes asks for it
    (`on_cpu`). Trainings that are not `of_our_torch` may support other GPUs.

    Raises:
        Failure: the options contradict each other, or GPUs are missing or cannot be used.
    """
    if on_cpu:
        if gpus or gpu_ids or device == "cuda":
            raise WrongUse("--processes is for CPU runs, and GPUs are requested: drop one of them")
        return 0

    options = {"gpus": gpus, "gpu_ids": gpu_ids, "device": device, "processes": None}
    unchecked = {"health": False, "health_limits": None}  # each training checks its GPUs
    plan = make_launch((TRAINER.module,), options | unchecked, _on_slots(1), of_our_torch).plan
    os.environ["CUDA_VISIBLE_DEVICES"] = plan.env["CUDA_VISIBLE_DEVICES"]
    return len(plan.gpus)


def settled(values: dict[str, Any], swept: frozenset[str] = frozenset()) -> Config:
    """Return the settings of a training, and put the texts of the task's fields into `values`.

    A sweep varies the fields `swept`, so their values in the file do not count.

    Raises:
        WrongUse: the task does not exist, or a value of --set is malformed.
    """
    locate(values["task"])
    found = file_settings() or FileSettings(Path(), {}, {})
    if on_command_line("pairs"):  # each field comes from the first source that has it
        values["pairs"] = (*os.environ.get("SET", "").split(), *values["pairs"])
    fields = field_texts(values["pairs"], found.fields, swept)
    values["pairs"] = tuple(f"{name}={text}" for name, text in fields.items())
    return config_of(values, fields)


@verb("sweep", Sectioned)
def sweep(**values: Any) -> None:
    """Train TASK for each combination of settings and each seed, on all GPUs or on N CPU slots
    (--processes N).

    `trainbox sweep show NAME` prints the results so far, and `trainbox sweep run SCRIPT` runs your
    own script.

    \b
    Examples:
      trainbox sweep digits --seeds 20 --grid width=8,16,32 --grid lr=1e-3,3e-3
      trainbox sweep my.py:Gestures --sampler tpe --trials 50 --range lr=1e-4:1e-1:log
      trainbox sweep mnist --seeds 100 --per-gpu 4 --name course
      trainbox sweep mnist --seeds 100 --name course --worker    on a second machine
      trainbox sweep run train.py --seeds 20 -- --seed {seed} --out {run}
      trainbox sweep show course --csv
    """
    from entrypoint.cli.launching import supervised
    from entrypoint.launch.children import TRAINING

    if any(
        given_by_user(name) and values[name] != usual
        for name, usual in (("run", None), ("resume", "auto"))
    ):
        raise WrongUse(
            "--run and --resume are for one training: use --name; a sweep always resumes"
        )
    values |= {"run": None, "resume": None}  # a file may have them for `train`
    check_run_name(values["name"], "--name")
    swept = swept_names(values)
    for option, texts in (("--grid", values["grids"]), ("--range", values["ranges"])):
        for text in texts:
            _refuse_given(f"{option} {text}", text.partition("=")[0].replace("_", "-"))
    launch = prepare("sweep", values, _on_slots(values["per_gpu"]), settled(values, swept))
    warn_of_overruled_imports(values["task"])
    warn_of_loss(values["runs_dir"])
    supervised(launch, TRAINING)


def _refuse_given(swept: str, key: str) -> None:
    for row in table.KEYS_OF_TRAIN:
        if row.key == key and on_command_line(row.parameter):
            raise WrongUse(f"{swept}: --{key} is also given: drop one of the two")


class _SweepRun(Templated, ScriptCommand, Sectioned):
    """The command `sweep run`."""


@verb("sweep run", _SweepRun, example="train.py --seeds 5 -- --seed {seed} --out {run}")
def sweep_run(**values: Any) -> None:
    """Run your own SCRIPT for each combination of values and each seed, each trial as one process
    on one GPU or CPU slot.

    In ARGS, {lr} stands for a value of --grid lr=... or --range lr=..., {seed} for the seed, and
    {run} for the trial's folder.

    The metric of --metric is read from one of three: lines of JSON that the script prints, such as
    {"step": 100, "accuracy": 0.9}; the scalars that it writes for TensorBoard; or its output, with
    --metric-regex.

    \b
    Examples:
      trainbox sweep run train.py --seeds 20 --metric max:accuracy -- --seed {seed}
      trainbox sweep run train.py --grid lr=1e-3,3e-3 --metric min:val/loss -- --lr {lr}
      trainbox sweep run train.py --sampler tpe --trials 50 --range lr=1e-4:1e-1:log \\
        --metric max:acc --metric-regex 'acc: ([-+.\\w]+)' -- --lr {lr} --out {run}
      trainbox sweep run render.py --metric none --grid angle=0,90 -- {angle} --out {run}
    """
    from entrypoint.cli.launching import supervised
    from entrypoint.cli.run import find_target
    from entrypoint.launch.children import SCRIPT_SWEEP
    from entrypoint.script.accelerate import ignored_settings
    from entrypoint.script.on_resume import for_rank
    from entrypoint.script.working_copies import UserFolder

    check_run_name(values["name"], "--name")
    script, module = values["script"], values["module"]
    if (script is None) == (module is None):
        raise WrongUse(
            "sweep run needs one script, or -m MODULE: name it before --, as in "
            "train.py --seeds 5 -- --seed {seed} --out {run}"
        )
    target = find_target(module, [script] if script else [])
    if values["on_resume"] is not None:
        for_rank(values["on_resume"], Path())  # a mistake needs no trial
    words = ("--", *click.get_current_context().meta[TEMPLATE])
    launch = prepare("sweep run", values, _on_slots(values["per_gpu"]), None, *words)
    ignored = ignored_settings(target, os.environ)
    for line in (*UserFolder(Path.cwd()).messages, *filter(None, [ignored])):
        message(line)
    warn_of_loss(values["runs_dir"])
    supervised(launch, SCRIPT_SWEEP)


def _on_slots(per_gpu: int) -> Callable[[LaunchRequest, tuple[Gpu, ...]], LaunchPlan]:
    return lambda request, gpus: plan_sweep(request, gpus, per_gpu)
