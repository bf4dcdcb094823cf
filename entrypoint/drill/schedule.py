"""The starts of a drill's trainings, and the rows of its table."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM, Signals

# The last kill of a training comes between these shares of it.
_LATE, _LATEST = 0.6, 0.8


@dataclass(frozen=True)
class KillSchedule:
    """The numbers of processes of a training's starts; each start but the last is killed."""

    processes: tuple[int, ...]

    def __str__(self) -> str:
        return " -> ".join(map(str, self.processes))


def task_schedules(most: int) -> list[KillSchedule]:
    """Return the schedules of a task's drill on up to `most` processes.

    First come trainings without a kill on 1 to `most` processes. Then come trainings that are
    killed and resume on another number of processes, larger or smaller.
    """
    straight = [KillSchedule((count,)) for count in range(1, most + 1)]
    if most == 1:
        return [*straight, KillSchedule((1, 1, 1))]
    return [*straight, KillSchedule((1, most, max(1, most - 1), 2)), KillSchedule((most, 2, 1))]


def script_schedules(counts: Sequence[int], kills: int) -> list[KillSchedule]:
    """Return the schedules of a script's drill on the numbers of processes `counts`.

    First come trainings without a kill on each number. Then comes a training that is killed and
    resumes on the first number. With several numbers, two more trainings go through them upwards
    and downwards.
    """
    straight = [KillSchedule((count,)) for count in counts]
    paths: list[Sequence[int]] = [counts[:1]]
    if len(counts) > 1:
        paths += [counts, counts[::-1]]
    starts = kills + 1
    return straight + [
        KillSchedule(tuple(itertools.islice(itertools.cycle(path), starts))) for path in paths
    ]


def kill_shares(kills: int, draw: random.Random) -> list[float]:
    """Return for each kill a random share of the training.

    The last kill is late, so that a start that resumes is clearly shorter than the whole training.
    Each of the others has an equal part of the time before.
    """
    early = [_LATE * (number + draw.random()) / (kills - 1) for number in range(kills - 1)]
    return [*early, draw.uniform(_LATE, _LATEST)]


def kill_signals(kills: int, number: int) -> list[Signals]:
    """Return the signals of the kills of the killed training `number`, which alternate.

    The first training begins with SIGKILL, the second with SIGTERM, and so on.
    """
    return [(SIGKILL, SIGTERM)[(number + kill) % 2] for kill in range(kills)]


def row(case: KillSchedule, kills: str, digest: str, verdict: str, width: int = 34) -> str:
    """Return the row of a training in a drill's table, with `width` columns for the kills."""
    return f"  {case!s:<18} {kills:<{width}} {digest}  {verdict}"
