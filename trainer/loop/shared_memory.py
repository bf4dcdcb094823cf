"""Check that loader workers have enough shared memory for their batches."""

import os
import shutil
from dataclasses import dataclass

from trainer.data.batches import evaluation_batch_count
from trainer.errors import StorageFailure
from trainer.loop.state import Job

_SHM = "/dev/shm"  # noqa: S108 - the system's name of it
_AHEAD = 2  # batches that each worker of torch prepares in advance
_HELD = 2  # batches that the training holds: the current one and the next one
_ROOMY = 2  # times the smallest need is enough for all batches that may be in shared memory
_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Handed:
    """The number and the size of the batches that the loader of one rank hands over."""

    batches: int
    batch_bytes: int


def least_bytes(
    train: Handed, validation: Handed, workers: int, between: bool, pinned: bool
) -> int:
    """Return the bytes that the `workers` of one rank need at the same time.

    Each worker makes a batch, which stays in shared memory until it was used. If a validation comes
    `between` training steps, all batches that were prepared in advance are there. Batches that are
    `pinned`, for a GPU, leave shared memory as soon as they are made.
    """
    made = [handed.batch_bytes * min(workers, handed.batches) for handed in (train, validation)]
    if pinned or not between:
        return max(made)
    return train.batch_bytes * min(_AHEAD * workers + _HELD, train.batches) + made[1]


def check_room(job: Job, train_example_bytes: int, validation_example_bytes: int) -> None:
    """Check that the loader workers on this machine have enough shared memory.

    The arguments are the sizes of one example of each dataset in bytes.

    Raises:
        StorageFailure: There is not enough free shared memory.
    """
    if not job.workers:
        return
    try:
        shm = shutil.disk_usage(_SHM)
    except OSError:  # this system does not use /dev/shm
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

    # Compare the need of all ranks with the free memory. The error recommends a number of workers.
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
    """Return the failure for a loader worker that has found shared memory full."""
    total = shutil.disk_usage(_SHM).total
    return StorageFailure(
        f"{_SHM}, {total // _MIB} MiB, is too small for what the loader workers hand over: "
        f"{_cure(_ROOMY * total, 0)}"
    )


def _cure(room: int, workers: int) -> str:
    """Return the remedy for `room` bytes of shared memory or `workers` loader workers."""
    gib = -(-room // _GIB)
    return (
        f"start the container with --shm-size={gib}g (Compose: SHM_SIZE={gib}gb) or "
        f"--ipc=host, or add --workers {workers}"
    )
