"""Define what a health rule is, and the result of judging one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from entrypoint.health.limits import Limits
from entrypoint.health.verdict import Mode, Result

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Judgement:
    """The result of a rule: texts for the reading and the limit, and an action of `ACTIONS`."""

    result: Result
    read: str
    limit: str = ""
    action: str = ""


# Most rules run in all modes except LIVE and WATCH, which read only a few values. A rule that needs
# several samples does not run in the gate, which takes only one. A rule that would find the
# processes of the training does not run in the monitor.
USUAL = frozenset({Mode.GATE, Mode.CHECK, Mode.DEEP, Mode.MONITOR})
WATCHED = USUAL | {Mode.WATCH}


@dataclass(frozen=True)
class Rule:
    """A health rule for one GPU.

    `judge` gets the limits, the values named in `reads`, and the values named in `also`. A value of
    `also` may be `Unread`. `modes` are the modes in which the rule runs. With `ends_a_run`, a
    CRITICAL during a training (Mode.WATCH) makes the training save and stop. With `may_recover`, it
    does so if the next reading is CRITICAL as well. With `unknown_closes`, no training starts while
    a value of `reads` cannot be read. This is for damage that nothing else would show: sandboxes
    and virtual GPUs fail many other calls on healthy hardware.
    """

    check: str
    reads: tuple[str, ...]
    judge: Callable[[Values, Limits], Judgement]
    source: str = "NVIDIA Health Validation"
    also: tuple[str, ...] = ()
    modes: frozenset[Mode] = USUAL
    ends_a_run: bool = False
    may_recover: bool = False
    unknown_closes: bool = False


def at_threshold(
    count: float, threshold: float, read: str, limit: str, bad: Result, action: str
) -> Judgement:
    """Return `bad` if the count is at the threshold or above, else PASS."""
    if count >= threshold:
        return Judgement(bad, read, limit, action)
    return Judgement(Result.PASS, read, limit)
