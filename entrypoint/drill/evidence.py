"""Decide from what was seen after a kill whether the training has resumed."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from entrypoint.drill.training import Start, Training

# A training is clearly shorter than another one with this share of its seconds, and this many less.
_SHORTER, _SHORTER_S = 0.75, 0.2
_INSTANT_S = 0.05
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


def judge(
    continued: bool | None, rest_s: float, whole_s: float, read: frozenset[str] | None
) -> tuple[bool, str]:
    """Return whether the start has resumed, and what shows it, or what does not and the cure.

    `continued` is whether the reported steps continued after the kill, or None if the script
    reported too few of them. `rest_s` and `whole_s` are the seconds that the start and the
    undisturbed one trained. `read` is that of the start.
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
        f"after the last kill, the script trained for {rest_s:.1f} s, and undisturbed for "
        f"{whole_s:.1f} s; {reads}"
    )
    # A script can read its checkpoint, or a log, and train from the first step all the same.
    shorter = rest_s <= min(_SHORTER * whole_s, whole_s - _SHORTER_S)
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
    found, notes = list[tuple[bool, str]](), list[str | None]()
    for number, (killed, after) in enumerate(itertools.pairwise(starts), 1):
        before, later = _steps(starts[:number]), _steps(starts[number:])
        continued = _continued(before, after.steps, later, max(undisturbed.steps, default=0))
        late = killed.output is not None and is_final(killed.output)
        if killed.ignored:
            notes.append(IGNORED)
        elif late:
            notes.append(FINISHED)
        elif continued is False:
            notes.append(STARTED_OVER)
        else:
            notes.append(NOTHING_READ if continued is None and after.read == frozenset() else None)
        # A start that was killed itself can show something by its steps only.
        if not late and (continued is not None or after is starts[-1]):
            seconds = _seconds(after, undisturbed)
            found.append(judge(continued, *seconds, after.read))
    if not found:
        return False, _not_killed(training, undisturbed), notes
    shown = [reason for resumed, reason in found if resumed]
    return bool(shown), (shown or [found[-1][1]])[-1], notes


def _steps(starts: Sequence[Start]) -> list[int]:
    return [step for start in starts for step in start.steps]


def _continued(
    before: Sequence[int], new: Sequence[int], later: Sequence[int], steps: int
) -> bool | None:
    """Return whether the steps of a start, `new`, continued after those `before` its kill.

    `later` begins with `new`, and has the steps of all later starts. A script that counts on from
    its log, and trains everything again, reports more steps than the undisturbed training. A script
    that has trained everything before the kill reports no more steps.
    """
    if not before or not new:
        return True if before and not later else None
    if new[0] > before[0]:
        return max(later) <= steps
    return False if len(before) > 1 else None


def _seconds(start: Start, undisturbed: Start) -> tuple[float, float]:
    """Return the seconds that the start and the undisturbed one trained.

    They begin with the first write of the same file, such as a checkpoint. So neither the time of
    the imports counts, nor data that only the first start has prepared. If this file is the last
    one, all seconds count.
    """
    both = start.written_s.keys() & undisturbed.written_s.keys()
    first = min(both, key=lambda name: start.written_s[name], default=None)
    if first is None or undisturbed.last_s - undisturbed.written_s[first] < _INSTANT_S:
        return start.last_s, undisturbed.last_s
    return (
        start.last_s - start.written_s[first],
        undisturbed.last_s - undisturbed.written_s[first],
    )


def _not_killed(training: Training, undisturbed: Start) -> str:
    if len(training.starts) > 1:
        return (
            f"{training.file} was the same at the kill and at the end: compare a file that the "
            "training changes until its end"
        )
    return (
        "no start was killed before its training was finished (undisturbed, it wrote files from "
        f"{undisturbed.first_s:.1f} s to {undisturbed.last_s:.1f} s): write checkpoints to the run "
        "folder ({run} or TRAINBOX_RUN), or train longer"
    )
