"""Decide from what was seen after a kill whether the training has resumed."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from entrypoint.drill.training import Start, Training

# A start is clearly shorter than the undisturbed training if it takes at most 75 % of its seconds,
# and at least 0.2 s less.
_SHORTER, _SHORTER_S = 0.75, 0.2
_INSTANT_S = 0.05
_LEFT_OUT = 2  # a start that continues must leave out at least this many of the reported steps
# A start has trained everything again if it takes at least 90 % of the undisturbed training's
# seconds, and writes a file at least 90 % as often. The undisturbed training must have written the
# file at least 3 times.
_ALL, _OFTEN = 0.9, 3
_MEASURABLE_S = 0.5  # in a shorter training, the seconds show nothing
# The notes on a kill that is unusual, and what they mean.
IGNORED, FINISHED = "ignored", "finished"
STARTED_OVER, NOTHING_READ = "started over", "nothing read"
_LOAD = "let the script load its checkpoint from the run folder ({run} or TRAINBOX_RUN)"
_LONGER = "let the script continue from its step; if it does, train longer, or report the steps"
_NOT_SAVED = "save during the training, and not only at SIGTERM"
MEANINGS = {
    IGNORED: "the script did not stop at SIGTERM: let it save and exit",
    FINISHED: "the training was finished at the kill, or did not stop at SIGTERM",
    STARTED_OVER: f"the steps began again after the kill: {_NOT_SAVED}",
    NOTHING_READ: f"the next start read no file that was written before the kill: {_NOT_SAVED}",
}


class Repeated(NamedTuple):
    """How much of the undisturbed training, which took `whole_s` seconds, a start has repeated.

    Attributes:
        share: the larger of its shares of the seconds and of the writes.
        is_all: whether it has trained everything again, also if it reports other steps.
    """

    share: float
    whole_s: float
    is_all: bool = False


def judge(
    continued: bool | None, repeated: Repeated, read: frozenset[str] | None
) -> tuple[bool, str]:
    """Return whether a start has resumed, and a sentence: the evidence, or what is missing.

    Args:
        continued: whether the reported steps continued after the kill; None if they do not show it.
        repeated: how much of the undisturbed training the start has repeated.
        read: the files from before the kill that the start has read; None if this is not known.
    """
    if continued:
        return True, "the reported steps continued after a kill"
    if continued is not None:
        return False, (
            f"the reported steps began again with the first one, or continued too far: {_LOAD}"
        )
    if read is None:
        reads = "this file system does not record reads"
    elif read:
        more = f" and {len(read) - 1} more" if len(read) > 1 else ""
        reads = f"it read {min(read)}{more}, written before the kill"
    else:
        reads = "it read no file written before the kill"
    figures = (
        f"after a kill, the script repeated {100 * repeated.share:.0f} % of the undisturbed "
        f"training, which took {repeated.whole_s:.1f} s; {reads}"
    )
    # A script can read its checkpoint, or a log, and train from the first step all the same.
    whole_s = repeated.whole_s
    shorter = repeated.share <= min(_SHORTER, 1 - _SHORTER_S / max(whole_s, _SHORTER_S))
    has_resumed = whole_s >= _MEASURABLE_S and shorter and read != frozenset()
    cure = "" if has_resumed else f": {_LOAD if read == frozenset() else _LONGER}"
    return has_resumed, figures + cure


def resumption(
    training: Training, undisturbed: Start, is_final: Callable[[Path], bool]
) -> tuple[bool, str, list[str | None]]:
    """Return whether a start of `training` has resumed after a kill, why, and a note on each kill.

    `is_final` returns whether a copy of the compared file that was made at a kill is the same as
    the file at the end.
    """
    starts = training.starts
    finished = [start.output is not None and is_final(start.output) for start in starts]
    judged = list[tuple[Start, bool, bool | None, Repeated]]()
    notes = list[str | None]()
    for number, (killed, after) in enumerate(itertools.pairwise(starts), 1):
        before, later = _steps(starts[:number]), _steps(starts[number:])
        continued = _continued(before, after.steps, later, undisturbed.steps)
        if killed.ignored:
            notes.append(IGNORED)
        elif finished[number - 1]:
            notes.append(FINISHED)
        elif continued is False:
            notes.append(STARTED_OVER)
        else:
            notes.append(NOTHING_READ if continued is None and after.read == frozenset() else None)
        # The seconds and writes of a start that was itself killed show nothing, only its steps do.
        is_whole = finished[number] or after is starts[-1]
        if not finished[number - 1] and (continued is not None or is_whole):
            judged.append((after, is_whole, continued, _repeated(after, undisturbed)))
    if not judged:
        return False, _not_killed(training, undisturbed), notes
    # A script may train everything again, and report only the steps that its log does not have.
    if any(is_whole and continued and again.is_all for _, is_whole, continued, again in judged):
        judged = [(start, True, None, again) for start, is_whole, _, again in judged if is_whole]
    found = [judge(continued, again, start.read) for start, _, continued, again in judged]
    shown = [reason for resumed, reason in found if resumed]
    return bool(shown), (shown or [found[-1][1]])[-1], notes


def _steps(starts: Sequence[Start]) -> list[int]:
    return [step for start in starts for step in start.steps]


def _continued(
    before: Sequence[int], new: Sequence[int], later: Sequence[int], undisturbed: Sequence[int]
) -> bool | None:
    """Return whether a start continued after a kill, by its reported steps; None if unclear.

    A start without steps has continued if the last step was reported before the kill. A start has
    not continued if it begins with the first steps again, or if the steps go beyond the undisturbed
    training: then the script counts on from its log, but trains everything again. Otherwise it has
    continued if it left out at least 2 of the steps from before the kill, and at least half of
    them. One step is not enough, because a script that reports by the clock begins with another
    step at each start.

    Args:
        before: the steps of all starts up to the kill.
        new: the steps of the start after the kill.
        later: the steps of this start and of all later starts.
        undisturbed: the steps of the undisturbed training.
    """
    last = max(undisturbed, default=0)
    if not new:
        return True if not later and max(before, default=-1) >= last else None
    if new[:2] == undisturbed[:2] or max(later) > last:
        return False if len(before) > 1 else None
    # Each start may report the first step, such as with the size of the model.
    begin = min((step for step in new if step not in undisturbed[:1]), default=new[0])
    left_out = [step < begin for step in {*before}]
    return True if sum(left_out) >= max(_LEFT_OUT, len(left_out) / 2) else None


def _repeated(start: Start, undisturbed: Start) -> Repeated:
    """Return how much of the undisturbed training the start has repeated.

    The share is the larger one of two shares. The first one is the share of the seconds since the
    first write of a file that both have written, such as a checkpoint. So the imports do not count,
    nor data that only the first start prepares. If the training writes this file only at its end,
    all seconds count. The second one is the share of the writes of files that are written more than
    once, because a script may also prepare data after its first write.
    """
    both = start.writes_s.keys() & undisturbed.writes_s.keys()
    first = min(both, key=lambda name: start.writes_s[name][0], default=None)
    begin_s = 0.0, 0.0
    if first and undisturbed.last_s - undisturbed.writes_s[first][0] >= _INSTANT_S:
        begin_s = start.writes_s[first][0], undisturbed.writes_s[first][0]
    whole_s = undisturbed.last_s - begin_s[1]
    of_seconds = (start.last_s - begin_s[0]) / whole_s
    writes = [
        (len(start.writes_s[name]), whole)
        for name in both
        if (whole := len(undisturbed.writes_s[name])) > 1
    ]
    of_writes = sum(n for n, _ in writes) / sum(whole for _, whole in writes) if writes else 0.0
    is_all = (
        whole_s >= _MEASURABLE_S
        and of_seconds >= _ALL
        and any(whole >= _OFTEN and n >= _ALL * whole for n, whole in writes)
    )
    return Repeated(max(of_seconds, of_writes), whole_s, is_all)


def _not_killed(training: Training, undisturbed: Start) -> str:
    if len(training.starts) > 1:
        return (
            f"{training.file} was the same at the kill and at the end: train longer, or compare a "
            "file that the training changes until its end"
        )
    return (
        "no start was killed before its training was finished (undisturbed, it wrote files from "
        f"{undisturbed.first_s:.1f} s to {undisturbed.last_s:.1f} s): write checkpoints to the run "
        "folder ({run} or TRAINBOX_RUN), or train longer"
    )
