"""The verb `run`, which launches a user's own script, and `plan run`."""

import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from entrypoint.cli.planning import Launch, make_launch
from entrypoint.cli.verb import ScriptCommand, verb
from entrypoint.driver.gpus import Gpu
from entrypoint.launch.plan import LaunchPlan, plan_script
from entrypoint.launch.request import LaunchRequest, detect_cluster
from entrypoint.script.accelerate import refuse_launcher
from entrypoint.script.on_resume import for_rank
from entrypoint.script.python import choose_python
from entrypoint.script.target import Target, find_script
from entrypoint.system.cgroup import file_text
from entrypoint.system.container import warn_of_loss
from trainbox.disclosure import suggested_commands
from trainbox.errors import WrongUse
from trainbox.folders.write_failures import show
from trainbox.options.run_name import check_run_name
from trainbox.processes.programs import SCRIPT_RANK, command_of
from trainbox.processes.streams import message

_SCRIPT_LAST = {"allow_interspersed_args": False}
_EXAMPLE = "train.py -- --epochs 3"


@verb("run", ScriptCommand, example=_EXAMPLE, context_settings=_SCRIPT_LAST)
def run(**options: Any) -> None:
    """Run your own SCRIPT on the GPUs found here.

    A single process is started as in a shell, and several by torchrun. The script is a Python file,
    or any executable file. TRAINBOX_RUN is the folder to write to, and {run} in ARGS is replaced by
    it. SIGTERM means "save and exit". The exit code is the script's own; 75 means "stopped: start
    the same command again".

    \b
    Examples:
      trainbox run train.py -- --epochs 3                      all visible GPUs
      trainbox run --gpus 2 -m my_package.train -- --lr 0.01   a module, on two GPUs
      trainbox run --processes 2 train.py                      two CPU processes over gloo
      trainbox run --no-torchrun train.py                      DataParallel: one process
      trainbox run --python ~/envs/gpt/bin/python train.py     another Python than the active one
      trainbox run --restarts 20 train.py                      start again after a lost GPU or node
      trainbox run --restarts 9 --restart-on any train.py      start again after each failure
      trainbox run --restarts 9 --hang-minutes 30 train.py     start again after a hang
      trainbox run --on-resume "--resume {run}/last.pt" train.py -- --out {run}
      trainbox plan run train.py                               print the plan, start nothing
    """
    from entrypoint.script.script_folder import ScriptFolder
    from entrypoint.script.script_run import ScriptRun
    from entrypoint.script.script_run import run as run_script

    launch, target, path = _planned(options)
    names = ("restarts", "restart_on", "hang_minutes", "prefix", "trial")
    of_the_run = {name: options[name] for name in names}
    plan = launch.plan
    text = options["on_resume"]
    of_the_run["on_resume"] = None if text is None else for_rank(text, path)
    if not options["trial"]:
        warn_of_loss(options["runs_dir"])
    opened = ScriptFolder(path, target, plan.node_rank == 0, options["trial"])
    with contextlib.closing(opened) as folder:
        sys.exit(run_script(ScriptRun(plan, target, folder, watched=launch.watch(), **of_the_run)))


@verb("plan run", ScriptCommand, example=_EXAMPLE, context_settings=_SCRIPT_LAST)
def plan_run(**options: Any) -> None:
    """Print as JSON what `trainbox run` would launch with the same arguments; start nothing.

    \b
    Example:
      trainbox plan run --gpus 3 train.py -- --epochs 3
    """
    launch, _, _ = _planned(options)
    show(json.dumps(dataclasses.asdict(launch.plan), indent=2))


def _planned(options: dict[str, Any]) -> tuple[Launch, Target, Path]:
    """Return the launch, what it runs, and the run folder.

    Raises:
        Failure: the script does not exist, or the request cannot be launched.
    """
    target = find_target(options["module"], list(options["arguments"]), options["python"])
    _report_late_options(target, options["arguments"])
    name, restarts = options["run_name"], options["restarts"]
    check_run_name(name)
    if options["restart_on"] == "any" and not restarts:
        raise WrongUse("--restart-on any without a number of restarts: add --restarts N")
    if options["hang_minutes"] and sys.platform != "linux":
        raise WrongUse("--hang-minutes needs Linux, which lists the CPU time of processes: drop it")
    path = (options["runs_dir"] / (name or target.run_name())).absolute()
    started = target
    if options["trial"] and not target.is_module:  # in a copy of the current folder
        started = dataclasses.replace(target, name=suggested_commands.from_here(Path(target.name)))
    command = (*command_of(SCRIPT_RANK), *started.command(path))
    if (text := options["on_resume"]) is not None:
        command = (*command_of(SCRIPT_RANK, for_rank(text, path)), *started.command(path))

    def decide(request: LaunchRequest, gpus: tuple[Gpu, ...]) -> LaunchPlan:
        plan = plan_script(request, gpus, detect_cluster(os.environ), options["torchrun"])
        if restarts and plan.nnodes > 1:
            raise WrongUse(
                f"--restarts {restarts} and {plan.nnodes} nodes: a node cannot know whether the "
                "others start again, and would wait for them: let the scheduler restart the job"
            )
        return dataclasses.replace(plan, env={**plan.env, "TRAINBOX_RUN": str(path)})

    return make_launch(command, options, decide, target.has_our_python), target, path


def _report_late_options(target: Target, words: Sequence[str]) -> None:
    """Report an option of ours that is after the script, and of which the script has no word.

    The script gets it, and may ignore it. After `--`, an option is meant for the script.
    """
    own = {name: param for param in _shown_options() for name in param.opts}
    before = words[: words.index("--")] if "--" in words else words
    text = "" if target.is_module else file_text(Path(target.name))
    for word, after in itertools.zip_longest(before, before[1:]):
        name = word.partition("=")[0]
        known = name.strip("-") in text or name.strip("-").replace("-", "_") in text
        if name.startswith("--") and name in own and text and not known:
            value = f" {after}" if word == name and after and not own[name].is_flag else ""
            message(
                f"{word}{value} after {target.name} is for the script: for Trainbox, write it "
                f"before {target.name}"
            )
            return


def _shown_options() -> list[click.Option]:
    params = click.get_current_context().command.params
    return [param for param in params if isinstance(param, click.Option) and not param.hidden]


def find_target(module: str | None, arguments: list[str], python: str | None = None) -> Target:
    """Return the target of a command with these arguments, of which the first one is the script.

    Raises:
        WrongUse: the script or its Python does not exist, or cannot be run.
    """
    if module is not None:
        if module.endswith(".py"):
            raise WrongUse(f"-m {module}: -m takes the name of a module: leave out -m for a file")
        if "/" in module:
            dotted = ".".join(part for part in module.split("/") if part not in ("", "."))
            raise WrongUse(f"-m {module}: -m takes the name of a module: write -m {dotted}")
        chosen = choose_python(python, "", os.environ)
        return Target(module, tuple(_without_dashes(arguments)), True, chosen)
    if not arguments:
        example = suggested_commands.command("run", "train.py -- --epochs 3")
        raise WrongUse(f"no script is named: name it, as in `{example}`")
    refuse_launcher(arguments)
    script, *rest = arguments
    return find_script(script, _without_dashes(rest), python, os.environ)


def _without_dashes(arguments: list[str]) -> list[str]:
    """Return the arguments without a leading `--`, which ends the options of Trainbox."""
    return arguments[1:] if arguments[:1] == ["--"] else arguments
