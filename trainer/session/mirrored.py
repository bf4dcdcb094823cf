"""Train with a mirror: restore a lost run from it, and wait for its last copy at the end."""

import contextlib
from collections.abc import Iterator

from trainer.parallel.world import World
from trainer.run.mirror import Mirror
from trainer.run.mirror_restore import restore_newer
from trainer.run.mirror_storage import Storage
from trainer.run.run_log import RunLog
from trainer.system.signals import StopRequest


@contextlib.contextmanager
def mirrored(
    url: str | None, run: RunLog, world: World, resume: str, stop: StopRequest
) -> Iterator[Mirror | None]:
    """Yield the mirror of the run at `url` on rank 0, and None on the others or without a URL.

    Before the body, restore checkpoints that are newer than those of the run's folder. After it,
    wait for the last copy. All ranks must call this.

    Raises:
        Failure: The run cannot be restored.
    """
    if url is None:
        yield None
        return
    mirror = None
    with world.wait_for_all("the restore from the mirror"):
        if world.is_first:
            storage = Storage(url, run.path.name)
            damaged = restore_newer(
                storage, run.path, resume != "never", lambda: bool(stop), run.report
            )
            mirror = Mirror(storage, run.path, run.report, damaged)
    try:
        yield mirror
        with world.wait_for_all("the copies to the mirror"):
            if mirror is not None:
                mirror.finish(stopped=lambda: bool(stop))
    finally:
        if mirror is not None:
            mirror.abandon()
