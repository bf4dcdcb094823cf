"""Train with a mirror: restore a lost run from it, and wait for its last copy at the end."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from trainer.parallel.world import World
from trainer.records.mirror import Mirror
from trainer.records.mirror_restore import restore_newer
from trainer.records.mirror_storage import Storage
from trainer.records.run_log import RunLog
from trainer.system.signals import StopRequest

# While rank 0 works, the ranks exchange a value this often, so no collective times out.
_TURN_S = 30.0


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
    opened: list[Mirror] = []

    def restore() -> None:
        storage = Storage(url, run.path.name)
        damaged = restore_newer(
            storage, run.path, resume != "never", lambda: bool(stop), run.report
        )
        opened.append(Mirror(storage, run.path, run.report, damaged))

    while_first_works(world, restore)
    mirror = opened[0] if opened else None
    try:
        yield mirror
        while_first_works(
            world, partial(mirror.finish, stopped=lambda: bool(stop)) if mirror else _nothing
        )
    finally:
        if mirror is not None:
            mirror.abandon()


def while_first_works(world: World, work: Callable[[], None]) -> None:
    """Run `work` on rank 0. The other ranks wait, longer than a collective may take."""
    if world.world_size == 1:
        work()
        return
    with ThreadPoolExecutor(1) as pool:
        working = [pool.submit(work)] if world.is_first else []
        while not world.from_first(not wait(working, _TURN_S).not_done):
            pass
        for future in working:
            future.result()


def _nothing() -> None:
    """Do nothing, on a rank without a mirror."""
