"""The verb `verify`."""

import os
import shlex
from pathlib import Path
from typing import Any

import click

from entrypoint.cli.checking import checked_plan
from entrypoint.cli.launching import supervised
from entrypoint.cli.options import data_dir_option, launch_options, refuse_unused
from entrypoint.launch.supervise import UNSAVED_TRAINING
from entrypoint.script.folder import refuse_script
from entrypoint.system.forks import become


@click.command()
@launch_options
@click.option("--steps", metavar="N", help="Repeat the first N steps. Default: the whole run.")
@data_dir_option
@click.option(
    "--print-docker",
    is_flag=True,
    help="Print the docker command that repeats RUN with the same image; start nothing.",
)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("other", required=False, type=click.Path(path_type=Path))
def verify(
    run: Path,
    other: Path | None,
    steps: str | None,
    data_dir: Path,
    print_docker: bool,
    **options: Any,
) -> None:
    """Repeat RUN and compare the bits, or compare RUN with the run OTHER without training.

    If they differ, the exit code is 8. The message names the first recorded step and the first
    tensor that differ, and the manifest entries that differ.

    \b
    Examples:
      trainbox verify runs/digits-7d2c1a90
      trainbox verify runs/digits-7d2c1a90 --steps 100
      trainbox verify runs/digits-7d2c1a90 runs/digits-7d2c1a90-replay
      trainbox verify runs/digits-7d2c1a90 --print-docker | sh
    """
    for folder in (run, other):
        if folder is not None:
            refuse_script(folder)
    if other is not None:
        refuse_unused(f"verify {run} {other}", {"run", "other"})
        become("trainer", "verify", str(run), str(other))
    if print_docker:
        refuse_unused(f"verify {run} --print-docker", {"run", "print_docker", "data_dir"})
        from entrypoint.replay import docker_command, read_run

        user = f"{os.getuid()}:{os.getgid()}"
        click.echo(shlex.join(docker_command(run, *read_run(run), data_dir, user)))
        return
    arguments = [str(run), "--data-dir", str(data_dir)]
    arguments += [] if steps is None else ["--steps", steps]
    supervised(*checked_plan(tuple(arguments), options, verb="verify"), kind=UNSAVED_TRAINING)
