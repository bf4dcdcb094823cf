"""Decide at which steps the ranks vote, write log entries and record digests.

The answers are the same on all ranks, because the ranks agree on them in their votes. The reasons
are in docs/decisions/0018-what-follows-time.md.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from trainbox.stop import steps_to_vote
from trainer.loop.state import Job

_LOG_STEPS = 50  # steps between log entries without --log-steps
# The ranks agree on the number of steps to their next vote before they know how long these steps
# take. A stop is answered at the second vote after it, so after about 50 ms. If steps suddenly
# become slow, the delay is at most twice this number of steps.
_MOST_VOTE_STEPS = 10

# All records together take at most the first share of the time: log entries, digests, and the
# records of validations. --eval-every sets the number of validations, so their records may take all
# of this share. Log entries and digests then still have the second share.
_MOST_SHARE, _LEAST_SHARE = 0.05, 0.01
# They are measured over 16 entries, so the steps of the first entries do not depend on time. Slow
# entries are measured until they have taken a second.
_WINDOW, _WINDOW_S = 16, 1.0


@dataclass
class Interval:
    """The number of steps between two entries, which doubles if entries take too much time.

    Because it only doubles, the steps of a slow run's entries are a part of a fast run's, and the
    two runs can be compared.

    Attributes:
        fixed: Whether the user has chosen the number of steps, so it never doubles.
        factor: The power of two that multiplies the number of steps; all ranks have the same one.
        wish: The factor that this rank votes for.
        share: The share of the time that the entries take, as last measured.
    """

    fixed: bool
    factor: int = 1
    wish: int = 1
    share: float = 0.0
    since_s: float = field(default_factory=time.perf_counter)
    _entries: int = 0
    _spent_s: float = 0.0

    def add(self, seconds: float, now_s: float) -> bool:
        """Count an entry, and return whether `share` was measured again."""
        self._entries, self._spent_s = self._entries + 1, self._spent_s + seconds
        if self._entries < _WINDOW and self._spent_s < _WINDOW_S:
            return False
        self.share = self._spent_s / (now_s - self.since_s)
        self.since_s, self._entries, self._spent_s = now_s, 0, 0.0
        return True

    def double(self) -> None:
        """Vote from now on for an interval that is twice as long."""
        if self.wish <= self.factor:
            self.wish, self.share = 2 * self.factor, self.share / 2


class Pace:
    """The steps of one training at which something follows the step."""

    def __init__(self, job: Job) -> None:
        self._job = job
        config = job.config
        self.log = Interval(config.log_steps is not None)
        self.digests = Interval(config.digest_steps is not None)
        self.validations = Interval(fixed=False)
        self._log_steps = config.log_steps or _LOG_STEPS
        self._digest_steps = config.digest_steps or job.schedule.steps_per_epoch
        # The number of steps between two votes, and the step of the next one.
        self._vote_steps, self._next_vote = 1, job.state.progress.step + 1
        self._last_vote = (job.state.progress.step, time.monotonic())

    def log_due(self, step: int) -> bool:
        """Return whether `step` has a log entry."""
        factor, epoch_steps = self.log.factor, self._job.schedule.steps_per_epoch
        return (
            step % (self._log_steps * factor) == 0
            or step % (epoch_steps * factor) == 0
            or step == self._job.end_step
        )

    def digests_due(self, step: int) -> bool:
        """Return whether `step` has an entry of digests."""
        return step % (self._digest_steps * self.digests.factor) == 0 or step == self._job.end_step

    @contextlib.contextmanager
    def measured(self, interval: Interval) -> Iterator[None]:
        """Measure an entry of `interval`, unless the user has chosen its steps.

        If all records together take too much of the time, the log entries or the digests get a
        longer interval: whichever of the two takes more time.
        """
        if interval.fixed:
            yield
            return
        device = self._job.world.device
        if device.type == "cuda":
            # An entry would wait for the steps before it, which are not part of its cost.
            torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        yield
        now_s = time.perf_counter()
        if interval.add(now_s - begin_s, now_s) and interval is not self.validations:
            shares = self.log.share, self.digests.share
            most = max(_MOST_SHARE - self.validations.share, _LEAST_SHARE)
            if sum(shares) > most and interval.share == max(shares):
                interval.double()

    def vote_due(self, step: int) -> bool:
        """Return whether the ranks vote after `step`."""
        return step >= self._next_vote

    def vote(self, stop: bool, save: bool) -> tuple[bool, bool]:
        """Return whether any rank wished to stop, and whether any wished to save.

        On several ranks, this is the result of the previous vote, whose exchange overlaps the steps
        since then. All ranks must call this. They also agree on the intervals and on the step of
        their next vote. A single rank votes after each step, and gets its own wishes at once.
        """
        if self._job.world.world_size == 1:
            self.log.factor, self.digests.factor = self.log.wish, self.digests.wish
            return stop, save
        step = self._job.state.progress.step
        stop_now, save_now, least, log, digests = self._job.world.vote(
            stop, save, -self._wished_vote_steps(step), self.log.wish, self.digests.wish
        )
        self._vote_steps = max(1, -least)
        self._next_vote = step + self._vote_steps
        self.log.factor = max(self.log.factor, log)
        self.digests.factor = max(self.digests.factor, digests)
        return bool(stop_now), bool(save_now)

    def _wished_vote_steps(self, step: int) -> int:
        """Return the number of steps to the next vote, by the speed of this rank."""
        before, since = self._last_vote
        self._last_vote = step, time.monotonic()
        if step == before:
            return self._vote_steps
        seconds = (self._last_vote[1] - since) / (step - before)
        return steps_to_vote(seconds, self._vote_steps, _MOST_VOTE_STEPS)
