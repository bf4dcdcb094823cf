"""The command `verify`: check the arguments without torch, then repeat or compare runs."""

from pathlib import Path

import click

from trainbox.contract.errors import WrongUse
from trainer.cli.invocation import Verb, check_run, read_device, report_environment
from trainer.cli.options import verification_options
from trainer.cli.parameters import COUNT
from trainer.system.signals import StopRequest


@click.command(cls=Verb)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("other", required=False, type=click.Path(path_type=Path))
@click.option(
    "--steps", type=COUNT, metavar="N", help="Repeat the first N steps. Default: the whole run."
)
@verification_options
def verify(
    run: Path,
    other: Path | None,
    steps: int | None,
    data_dir: Path,
    device: str,
    only_check: bool,
    device_on_stdin: bool,
) -> None:
    """Repeat RUN and compare the digests, or compare RUN with the run OTHER without training.

    If they differ, the exit code is 8. The message names the first recorded step and the first
    tensor that differ.

    \b
    Examples:
      trainbox verify runs/digits-7d2c1a90
      trainbox verify runs/digits-7d2c1a90 --steps 100
      trainbox verify runs/digits-7d2c1a90 runs/digits-7d2c1a90-replay
    """
    if other is not None:
        _compare(run, other)
        return
    device = read_device(device, device_on_stdin)
    check_run("verify", run, "digests.jsonl")
    if only_check:
        report_environment()
        return
    stop = StopRequest.install()
    from trainer.session.verify import verify_run

    verify_run(run, steps, stop, device, data_dir)


def _compare(one: Path, other: Path) -> None:
    """Print that two runs have the same bits, with their differences in settings.

    Raises:
        WrongUse: A folder is not a run, or both are the same folder.
        Failure: The digests differ, or a run's files contradict each other.
    """
    from trainer.records.compare import (  # their patterns take milliseconds to compile
        listed_changes,
        manifest_differences,
    )
    from trainer.records.evidence import Evidence, verdict

    for run in (one, other):
        for name in ("digests.jsonl", "manifest.json"):
            if not (run / name).is_file():
                raise WrongUse(f"verify {run}: {name} is missing: give the folders of two runs")
    if one.samefile(other):
        raise WrongUse(
            f"verify {one} {other}: both are the same folder: give the folders of two runs"
        )
    runs = [Evidence.of(run) for run in (one, other)]
    from trainer.records.evidence_files import check_files

    a, b = (check_files(run) for run in runs)
    same = verdict(a, b, listed_changes(manifest_differences(a.manifest, b.manifest)))
    # Entries have a time: equal files are copies, not two trainings.
    copied = bool(a.metrics) and a.metrics == b.metrics
    note = f"; {other} is a copy of {one}: this is one training, compared with itself"
    click.echo(same + (note if copied else ""))
