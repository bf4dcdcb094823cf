"""Call schedule() for the steps of a training before the first one."""

import itertools
import math
import time

from trainbox.errors import WrongUse
from trainer.load_task import defines
from trainer.loop.state import Job
from trainer.loop.step import schedule_factor

_MOST_S = 0.1
_MOST_STEPS = 2000
# A scheduler of torch that schedule() keeps may change its factor only every 100th call.
_FEWEST_REPEATED = 200
_SAME = 0.01


def check_schedule(job: Job) -> list[str]:
    """Call schedule() twice for each step on rank 0; if there are many steps, for some of them.

    The second calls follow after the first calls for all steps. Two calls in a row would get the
    same factor of a scheduler of torch that changes it rarely.

    Return a note if it seems to return learning rates instead of factors: its highest value is the
    learning rate.

    Raises:
        WrongUse: It returned no number, or two different ones for the same step.
    """
    if not job.world.is_first:
        return []
    begin_s, total, factors = time.monotonic(), job.schedule.total_steps, dict[int, float]()
    steps = [*range(0, total, -(-total // _MOST_STEPS)), total - 1]
    for step in steps:
        factors.setdefault(step, schedule_factor(job, step))
        if time.monotonic() > begin_s + _MOST_S / 2:
            break
    is_whole = len(factors) == len({*steps})
    backwards = itertools.cycle(reversed(factors))
    for step in itertools.islice(backwards, max(len(factors), _FEWEST_REPEATED)):
        one, other = factors[step], schedule_factor(job, step)
        if one != other:
            raise WrongUse(
                f"task {type(job.task).__name__}: schedule() returned {one} and then "
                f"{other} at step {step}: compute the factor from the arguments alone, and use "
                "trainbox.scheduler_factor for a scheduler of torch"
            )
        if time.monotonic() > begin_s + _MOST_S:
            return []
    rate, highest = job.config.learning_rate, max(factors.values())
    is_rate = is_whole and math.isclose(highest, rate, rel_tol=_SAME) and rate < 1
    if not (is_rate and defines(job.task, "schedule")):  # a short warm-up may end at any factor
        return []
    return [
        f"schedule() returns at most {highest:g}, so the learning rate is at most "
        f"{rate * highest:g}: return a factor on --lr {rate:g}, which is 1 for all of it"
    ]
