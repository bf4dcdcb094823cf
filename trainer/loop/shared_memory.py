"""Check that loader workers have enough shared memory for their batches."""

import os
import shutil
from dataclasses import dataclass

from trainbox.contract.errors import StorageFailure
from trainer.data.batches import evaluation_batch_count
from trainer.loop.state import Job

_SHM = "/dev/shm"  # noqa: S108 - the system's name of it
_PREFETCHED = 2  # batches that each worker of torch prepares in advance
_IN_USE = 2  # batches in use by the training: the current and the next one
_ROOMY = 2  # times the smallest need is enough for all batches that may be in shared memory
_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class LoaderBatches:
    """The batches that one rank's loader passes through shared memory."""

    batches: int
    batch_bytes: int


def least_bytes(
    train: LoaderBatches, validation: LoaderBatches, workers: int, between: bool, pinned: bool
) -> int:
    """Return the bytes that the `workers` of one rank need at the same time.

    Each worker prepares batches, which stay in shared memory until they are used. If a validation
    comes `between` training steps, all training batches that were prepared in advance are there.
    Batches that are `pinned` for a GPU leave shared memory as soon as they are ready.
    """
    made = [loader.batch_bytes * min(workers, loader.batches) for loader in (train, validation)]
    if pinned or not between:
        return max(made)
    return train.batch_bytes * min(_PREFETCHED * workers + _IN_USE, train.batches) + made[1]


def check_shared_memory(job: Job, train_example_bytes: int, validation_example_bytes: int) -> None:
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
    train = LoaderBatches(
        (schedule.total_steps - step) * len(schedule.micros), micro_batch_size * train_example_bytes
    )
    batches = evaluation_batch_count(evaluation.size, evaluation.batch_size) // job.world.world_size
    validation = LoaderBatches(
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
            f"{-(-needed // _MIB)} MiB for batches: "
            f"{_remedy(_ROOMY * needed + shm.used, fewer)}"
        )


def shared_memory_full() -> StorageFailure:
    """Return the failure for a loader worker that has found shared memory full."""
    total = shutil.disk_usage(_SHM).total
    return StorageFailure(
        f"{_SHM} ({total // _MIB} MiB) is too small for the batches of the loader workers: "
        f"{_remedy(_ROOMY * total, 0)}"
    )


def _remedy(room: int, workers: int) -> str:
    """Return the remedy for `room` bytes of shared memory or `workers` loader workers."""
    gib = -(-room // _GIB)
    return (
        f"start the container with --shm-size={gib}g (Compose: SHM_SIZE={gib}gb) or "
        f"--ipc=host, or add --workers {workers}"
    )
