"""Decide from what was seen after a kill whether the training has resumed."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM

from entrypoint.drill.training import Start, Training

# A training is clearly shorter than another one with this share of its seconds, and this many less.
_SHORTER, _SHORTER_S = 0.75, 0.2
_INSTANT_S = 0.05
_MEASURABLE_S = 0.5  # in a shorter training, the seconds show nothing
TOO_LATE, STARTED_OVER, NOTHING_READ = "too late", "started over", "nothing read"
# What a script has done instead of saving at SIGTERM.
IGNORED, FINISHED = "ignored", "finished"


@dataclass(frozen=True)
class Evidence:
    """What was seen of the start after a kill.

    `continued` is whether the reported steps continued after the kill, or began again with the
    first one. It is None if the script reported too few of them. `whole_s` are the seconds of the
    undisturbed training between its first and its last written file, and `rest_s` those of the
    start. `read` has the files of the killed start that the start has read, or is None if the file
    system does not record reads. `largest` is the largest of the killed start's files.
    """

    continued: bool | None
    rest_s: float = 0.0
    whole_s: float = 0.0
    read: frozenset[str] | None = None
    largest: str | None = None


def judge(seen: Evidence) -> tuple[bool, str]:
    """Return whether the start has resumed, and what shows it or speaks against it."""
    if seen.continued is not None:
        return seen.continued, (
            "the reported steps continued after a kill"
            if seen.continued
            else "the reported steps began again with the first one, or continued too far"
        )
    if seen.largest is None:
        reads = "no file was written before the kill"
    elif seen.read is None:
        reads = "this file system does not record reads"
    elif seen.read:
        first = seen.largest if seen.largest in seen.read else min(seen.read)
        more = f" and {len(seen.read) - 1} more" if len(seen.read) > 1 else ""
        reads = f"it read {first}{more}, written before the kill"
    else:
        reads = "it read no file written before the kill"
    figures = (
        f"after the last kill, the script trained for {seen.rest_s:.1f} s, and undisturbed for "
        f"{seen.whole_s:.1f} s; {reads}"
    )
    if seen.whole_s < _MEASURABLE_S:
        return seen.read is not None and seen.largest in seen.read, figures
    # A script can read its checkpoint, or a log, and train from the first step all the same.
    shorter = seen.rest_s <= min(_SHORTER * seen.whole_s, seen.whole_s - _SHORTER_S)
    return shorter and seen.read != frozenset(), figures


@dataclass(frozen=True)
class Resumption:
    """Whether a start of a training has resumed after a kill, why, and a note on each kill."""

    resumed: bool
    reason: str
    notes: tuple[str | None, ...]


def resumption(
    training: Training, undisturbed: Start, is_final: Callable[[Path], bool]
) -> Resumption:
    """Return whether a start of `training` has resumed after a kill.

    `is_final` returns whether a copy of the compared file that was made at a kill is the same as
    the file at the end.
    """
    starts, steps = training.starts, max(undisturbed.reported, default=0)
    found, notes = list[tuple[bool, str]](), list[str | None]()
    for kill, (before, after) in zip(training.kills, itertools.pairwise(starts), strict=False):
        continued = _continued(before.reported, after.reported, starts[-1].reported, steps)
        read = frozenset(after.reads.found) if training.records_reads else None
        late = kill.output is not None and is_final(kill.output)
        if kill.ignored:
            notes.append(IGNORED)
        elif late:
            notes.append(FINISHED if kill.by == SIGTERM else TOO_LATE)
        elif continued is False:
            notes.append(STARTED_OVER)
        else:
            notes.append(NOTHING_READ if continued is None and read == frozenset() else None)
        if late:
            continue
        if after is not starts[-1]:
            # It was killed itself, so that only its steps can show anything.
            found += [judge(Evidence(continued))] if continued is not None else []
            continue
        found.append(
            judge(Evidence(continued, *_seconds(after, undisturbed), read, after.reads.largest))
        )
    if not found:
        return Resumption(False, _not_killed(training, undisturbed), tuple(notes))
    shown = [reason for resumed, reason in found if resumed]
    return Resumption(bool(shown), (shown or [found[-1][1]])[-1], tuple(notes))


def _continued(
    before: Sequence[int], after: Sequence[int], final: Sequence[int], steps: int
) -> bool | None:
    """Return whether the steps of a start continued after those `before` its kill.

    `after` and `final` begin with these. A script that counts on from its log, and trains
    everything again, reports more steps than the undisturbed training. A script that has
    trained everything before the kill reports no more steps.
    """
    new = after[len(before) :]
    if not before or not new:
        return True if before and len(final) == len(before) else None
    if new[0] > before[0]:
        return max(final) <= steps
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
    if training.kills:
        return (
            f"{training.file} was the same at the kill and at the end: compare a file that the "
            "training changes until its end"
        )
    return (
        "no start was killed before its training was finished (undisturbed, it wrote files from "
        f"{undisturbed.first_s:.1f} s to {undisturbed.last_s:.1f} s): write checkpoints to the run "
        "folder ({run} or TRAINBOX_RUN), or train longer"
    )
