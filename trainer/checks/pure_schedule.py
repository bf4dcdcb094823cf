"""Call schedule() for the steps of a training before the first one."""

import time

from trainbox.errors import WrongUse
from trainer.loop.state import Job
from trainer.loop.step import schedule_factor

_MOST_S = 0.1
_MOST_STEPS = 2000


def check_schedule(job: Job) -> None:
    """Call schedule() twice for each step on rank 0; if there are many steps, for some of them.

    Raises:
        WrongUse: It returned no number, or two different ones for the same step.
    """
    if not job.world.is_first:
        return
    until_s, total = time.monotonic() + _MOST_S, job.schedule.total_steps
    for step in (*range(0, total, -(-total // _MOST_STEPS)), total - 1):
        one, other = (schedule_factor(job, step) for _ in range(2))
        if one != other:
            raise WrongUse(
                f"task {type(job.task).__name__}: schedule() returned {one} and then "
                f"{other} at step {step}: compute the factor from the arguments alone"
            )
        if time.monotonic() > until_s:
            return
