"""Save checkpoints when they are due, and end the training when it is stopped."""

from collections.abc import Mapping
from typing import NoReturn

from trainbox.errors import Preempted, Stopped
from trainer.loop.digests import DigestLog
from trainer.loop.losses import check_running
from trainer.loop.pace import Pace
from trainer.loop.state import Job
from trainer.system.signals import StopRequest


class Saving:
    """The checkpoints of one training, and the ranks' agreement on when to save and to stop."""

    def __init__(self, job: Job, stop: StopRequest, digests: DigestLog, pace: Pace) -> None:
        self._job, self._stop, self._digests, self._pace = job, stop, digests, pace
        self._first_step = job.state.progress.step
        job.checkpoints.may_write_held = job.is_unchanged
        self._due = False  # whether a vote has found that a checkpoint is due

    def prepare(self) -> None:
        """Reserve memory for checkpoints; all ranks must call this after a start's first step.

        By then, the modules that a step needs are imported, and the optimizer has its state.
        """
        job = self._job
        if job.strategy.gathers_states:  # states are copies on the CPU, which need no buffers
            job.strategy.check_optimizer(job.state.optimizer)
        else:
            job.checkpoints.prepare(job.state.capture(job.strategy))

    def save(self, metrics: Mapping[str, float], later: bool = False) -> None:
        """Start to save a checkpoint of this step; all ranks must call this, and rank 0 writes.

        With `later`, the state is only copied to memory. It is written together with the next
        checkpoint, or at the end of the training. A newer best replaces it.

        Raises:
            Failure: A loss since the last log entry is infinite or NaN.
        """
        job = self._job
        if not later:
            job.check_unchanged()
            job.check_hidden_state()
        state = job.state.capture(job.strategy)
        check_running(job, state["running"])
        progress = job.state.progress
        record = self._digests.of_checkpoint()
        # Rank 0 waits for the thread that writes the previous checkpoint.
        with job.world.wait_for_all("the previous checkpoint"):
            job.checkpoints.save(progress.step, state, metrics, progress.best_step, record, later)

    def save_or_stop(self) -> None:
        """Save if a checkpoint is due on any rank; stop if any rank was asked to stop.

        Raises:
            Stopped: A rank was asked to stop; the checkpoint of this step is complete.
        """
        config, step = self._job.config, self._job.state.progress.step
        if self._pace.vote_due(step):
            stop_now, save_now = self._pace.vote(
                bool(self._stop), self._job.checkpoints.due(config.checkpoint_minutes)
            )
            if stop_now:
                self.save_and_stop()
            self._due |= save_now
        every = config.checkpoint_steps
        if self._due or (every and step % every == 0):
            self._due = False
            self.save({})

    def stopped(self) -> bool:
        """Return during a validation whether any rank was asked to stop; all must call this."""
        stop_now, save_now = self._pace.vote(bool(self._stop), False)
        # On several ranks, this is the result of the vote before, so remember a save that is due.
        self._due |= save_now
        return stop_now

    def save_and_stop(self) -> NoReturn:
        """Save a checkpoint, wait for the file and for the other ranks, and end the training.

        Raises:
            Preempted: The checkpoint has new steps.
            Stopped: This start has trained no step.
        """
        job = self._job
        self.save({})
        with job.world.wait_for_all("the last checkpoint"):
            job.checkpoints.wait()
        job.world.leave()
        step = job.state.progress.step
        at = f"stopped by {self._stop.cause} at step {step} of {job.schedule.total_steps}"
        if step == self._first_step:
            raise Stopped(f"{at}, where this start began: resume with the same command")
        raise Preempted(f"{at}, checkpoint saved: resume with the same command")
