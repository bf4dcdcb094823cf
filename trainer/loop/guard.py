"""Check at each digest and checkpoint that a resumed run would get the same bits."""

from trainbox.contract.errors import WrongUse
from trainer.loop.attributes import describe_change
from trainer.loop.state import Job


def check_unchanged(job: Job) -> None:
    """Compare the plain attributes and the loaded source files with those at the start.

    All ranks must call this, and all raise the same error. With --fast, a changed attribute is only
    logged.

    Raises:
        Changed: A source file differs from the file with which the run was started.
        WrongUse: An attribute that checkpoints leave out has changed, or the ranks have loaded
            different files.
    """
    changes = {name: describe_change(name, pair) for name, pair in job.attributes.changed().items()}
    loaded = job.sources.newly_loaded() if job.sources is not None else {}
    found = job.world.from_each([changes, loaded])
    if changes := {name: text for changes, _ in found for name, text in changes.items()}:
        if job.config.deterministic:
            raise WrongUse(
                f"task {type(job.task).__name__}: by step {job.state.progress.step} it has "
                f"changed {next(iter(changes.values()))}"
            )
        _report(job, changes.keys() - job.attributes.reported)
    if job.sources is not None:
        job.sources.compare_and_add([loaded for _, loaded in found])


def _report(job: Job, names: set[str]) -> None:
    """Log the changed attributes `names`, which were not reported before."""
    if names:
        job.attributes.reported |= names
        job.run.report(
            f"step {job.state.progress.step}: task {type(job.task).__name__} has changed "
            f"{', '.join(sorted(names))}, which "
            "checkpoints leave out: a resumed run may get different bits"
        )
