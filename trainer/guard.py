"""The check, at each digest and each checkpoint, that a resumed run would get the same bits."""

from trainer.state import Job


def check_unchanged(job: Job) -> None:
    """Compare the source files that are loaded by now with the manifest's; all processes must call this.

    Raises:
        Changed: a file is not the one that the run was started with.
        WrongUse: the processes have loaded different files.
    """
    if job.sources is not None:
        job.sources.compare_and_add(job.process.from_each(job.sources.newly_loaded()))
