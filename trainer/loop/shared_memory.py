"""Room for what loader workers hand over: their batches come through the system's shared memory,
which may be small.
"""

import os
import shutil
from dataclasses import dataclass

from trainer.data.batches import evaluation_batch_count
from trainer.errors import StorageFailure
from trainer.loop.state import Job

_SHM = "/dev/shm"  # noqa: S108 - the system's own name
_AHEAD = 2  # torch's: the batches that a worker makes before the first of them is taken
_HELD = 2  # by the training: the batch that it computes with and the next
_ROOMY = 2  # times the least is enough for all that may be there
_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Handed:
    """What comes through one process's loader: so many batches, each of so many bytes."""

    batches: int
    batch_bytes: int


def least_bytes(
    train: Handed, validation: Handed, workers: int, between: bool, pinned: bool
) -> int:
    """What one process's `workers` need at once: each makes a batch.

    A batch stays there until it was used, so while a validation comes `between` training steps, all
    batches that may be ahead are there. Where they are `pinned`, for a GPU, they are taken out as
    soon as they are made.
    """
    made = [handed.batch_bytes * min(workers, handed.batches) for handed in (train, validation)]
    if pinned or not between:
        return max(made)
    return train.batch_bytes * min(_AHEAD * workers + _HELD, train.batches) + made[1]


def check_room(job: Job, train_example_bytes: int, validation_example_bytes: int) -> None:
    """Compare what the loader workers on this machine need with what is free.

    Raises:
        StorageFailure: it is not enough.
    """
    if not job.workers:
        return
    try:
        shm = shutil.disk_usage(_SHM)
    except OSError:  # a system that hands over in another way
        return
    config, schedule, evaluation, step = (
        job.config,
        job.schedule,
        job.evaluation,
        job.state.progress.step,
    )
    assert config.batch_size and config.shards and config.accumulation
    micro_batch_size = config.batch_size // (config.shards * config.accumulation)
    train = Handed(
        (schedule.total_steps - step) * len(schedule.micros), micro_batch_size * train_example_bytes
    )
    batches = evaluation_batch_count(evaluation.size, evaluation.batch_size) // job.world.world_size
    validation = Handed(
        batches, min(evaluation.batch_size, evaluation.size) * validation_example_bytes
    )
    every = config.eval_every * schedule.steps_per_epoch
    between = (step // every + 1) * every < job.end_step
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def need(workers: int) -> int:
        return processes * least_bytes(
            train, validation, workers, between, job.world.device.type == "cuda"
        )

    if (needed := need(job.workers)) > shm.free:
        fewer = next(
            (
                workers
                for workers in range(job.workers - 1, 0, -1)
                if _ROOMY * need(workers) <= shm.free
            ),
            0,
        )
        raise StorageFailure(
            f"{_SHM} has {shm.free // _MIB} MiB free, and the {job.workers * processes} "
            "loader workers need at least "
            f"{-(-needed // _MIB)} MiB to hand batches over: "
            f"{_cure(_ROOMY * needed + shm.used, fewer)}"
        )


def too_small() -> StorageFailure:
    """For when a loader worker has found no room."""
    total = shutil.disk_usage(_SHM).total
    return StorageFailure(
        f"{_SHM}, {total // _MIB} MiB, is too small for what the loader workers hand over: "
        f"{_cure(_ROOMY * total, 0)}"
    )


def _cure(room: int, workers: int) -> str:
    gib = -(-room // _GIB)
    return (
        f"start the container with --shm-size={gib}g (Compose: SHM_SIZE={gib}gb) or "
        f"--ipc=host, or add --workers {workers}"
    )
