"""The training loop.

Read this file first, and then `step.py`. Each turn of the loop is one optimizer step and what
follows it, such as a log entry or a checkpoint.
"""

from collections.abc import Callable, Mapping

from trainer.data.batches import TimedBatches, training_batches
from trainer.loop.captured import one_step
from trainer.loop.digests import DigestLog
from trainer.loop.log import TrainingLog
from trainer.loop.pace import Pace
from trainer.loop.saving import Saving
from trainer.loop.state import Job
from trainer.loop.task_checks import collate_of
from trainer.loop.validate import evaluation_due, validate
from trainer.system.signals import StopRequest


def fit(
    job: Job,
    stop: StopRequest,
    validated: Callable[[int, Mapping[str, float]], None] | None = None,
) -> None:
    """Train from the current step of `job.state` to the end of the schedule.

    All ranks call this. `job` has the parts of the training: `world` is this rank's view of the
    process group, `schedule` has the steps and micro-batches, and `state` is the content of a
    checkpoint. `validated` is called with the step and the metrics after each validation.

    Raises:
        Stopped: `stop` was requested on a rank, and a checkpoint of this step is saved.
        Failure: A loss, a gradient or a weight is infinite or NaN. No checkpoint contains it.
        StorageFailure: A checkpoint or the metrics could not be written.
        OutOfMemory: The first steps of this call do not fit in memory. The caller builds a new job
            with smaller micro-batches.
    """
    world, schedule, state = job.world, job.schedule, job.state
    progress = state.progress
    first_step = progress.step
    # Read this rank's micro-batches from the current step. The order of the examples depends only
    # on the seed and the epoch. The time that the training waits for them is logged.
    micro_batches = TimedBatches(
        training_batches(
            job.train, schedule, first_step, world.device, job.workers, collate_of(job.task)
        )
    )
    train_one_step = one_step(job, micro_batches)
    # `pace` has the steps of the log entries, the digests and the votes.
    log, digests, pace = TrainingLog(job, micro_batches), DigestLog(job), Pace(job)
    saving = Saving(job, stop, digests, pace)

    # Record the digests of the start, and start the clock.
    digests.record("resume" if first_step else "start")
    state.watch.start(first_step)
    while True:
        # After every `--eval-every` epochs and the last step, validate. A validation saves a
        # checkpoint if it is the best or the last, and may end the training early. If a stop is
        # requested meanwhile, save a checkpoint and stop.
        if evaluation_due(job) and not validate(job, saving, log, pace, validated):
            saving.save_and_stop()
        if progress.step >= job.end_step or progress.ended_early:
            break

        # A profile or a measurement of the speed may begin or end before a step.
        for before_step in job.before_step:
            before_step(progress.step - first_step, micro_batches.seconds)

        # Train one step. If it has a log entry, its gradient's norm is computed for the entry.
        logged = pace.log_due(progress.step + 1)
        norm = train_one_step(needs_norm=logged)

        # Count the step on the progress bar, log the losses, and record digests of the weights. If
        # all records take too much of the time, `pace` makes one of these rarer.
        job.run.advance()
        if logged and norm is not None:
            with pace.measured(pace.log):
                log.write(norm)
        if pace.digests_due(progress.step):
            with pace.measured(pace.digests):
                digests.record("step")

        # After the first step of this call, the optimizer has its state. Reserve the memory for
        # checkpoints, so that the first save pauses the training no longer than later ones.
        if progress.step == first_step + 1:
            saving.prepare()

        # If the ranks vote now, save if a checkpoint is due, and stop if any was asked to stop.
        saving.save_or_stop()

    # A thread writes the last checkpoint, and another one draws the last pictures. Wait until the
    # disk has the checkpoint, then for the pictures, and raise an error of the task's code.
    with world.wait_for_all("the last checkpoint and pictures"):
        job.checkpoints.wait()
        progress.train_seconds = state.watch.seconds
        job.run.board.finish_pictures()
