"""Call schedule() for the steps of a training before the first one."""

import math
import time

from trainbox.errors import WrongUse
from trainer.load_task import defines
from trainer.loop.state import Job
from trainer.loop.step import schedule_factor

_MOST_S = 0.1
_MOST_STEPS = 2000
_SAME = 0.01


def check_schedule(job: Job) -> list[str]:
    """Call schedule() twice for each step on rank 0; if there are many steps, for some of them.

    Return a note if it seems to return learning rates instead of factors: its highest value is the
    learning rate.

    Raises:
        WrongUse: It returned no number, or two different ones for the same step.
    """
    if not job.world.is_first:
        return []
    until_s, total, highest = time.monotonic() + _MOST_S, job.schedule.total_steps, 0.0
    for step in (*range(0, total, -(-total // _MOST_STEPS)), total - 1):
        one, other = (schedule_factor(job, step) for _ in range(2))
        if one != other:
            raise WrongUse(
                f"task {type(job.task).__name__}: schedule() returned {one} and then "
                f"{other} at step {step}: compute the factor from the arguments alone"
            )
        if time.monotonic() > until_s:
            return []
        highest = max(highest, one)
    rate = job.config.learning_rate
    is_rate = math.isclose(highest, rate, rel_tol=_SAME) and rate < 1
    if not (is_rate and defines(job.task, "schedule")):  # a short warm-up may end at any factor
        return []
    return [
        f"schedule() returns at most {highest:g}, so the learning rate is at most "
        f"{rate * highest:g}: return a factor on --lr {rate:g}, which is 1 for all of it"
    ]
