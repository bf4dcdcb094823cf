"""Compare the records of two runs for `verify`.

Reading is strict: a changed, truncated or damaged record is an error. No line is skipped.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainbox.disclosure.recorded_values import listed_changes
from trainbox.errors import ExitCode, Failure, StorageFailure, WrongUse
from trainer.records.compare_runs import (
    first_difference,
    first_figure_difference,
    manifest_differences,
)
from trainer.records.jsonl import DIGESTS, digest_problem, read_all_entries
from trainer.records.run_record import Edited, RunRecord


@dataclass(frozen=True)
class Evidence:
    """What a run has recorded, after a check of all its files.

    `digests` and `validations` have one entry per step, in order.
    """

    name: str
    manifest: Mapping[str, Any]
    digests: Sequence[dict[str, Any]]
    metrics: Sequence[dict[str, Any]]
    newest: int = 0  # the step of the newest checkpoint
    best_step: int | None = None  # the step of model.safetensors

    @classmethod
    def of(cls, run: RunRecord, name: str | None = None) -> "Evidence":
        """Read and check all files of a run.

        Raises:
            WrongUse: A line of a record is damaged.
            Failure: A file is missing, or differs from what the run saved.
        """
        # Read the digests and the metrics.
        digests = _first_digests(run.path / "digests.jsonl")
        if not (run.path / "metrics.jsonl").exists():
            raise StorageFailure(
                f"{run.path}/metrics.jsonl is missing, so no validation can be compared: restore it"
            )
        metrics = read_all_entries(run.path / "metrics.jsonl")
        steps = [entry["step"] for entry in metrics if entry["kind"] == "validation"]
        if steps != sorted(set(steps)):
            raise WrongUse(
                f"{run.path}/metrics.jsonl is damaged (its validations are at steps {steps}): "
                "restore it"
            )
        # Check each checkpoint, and the best weights.
        newest, best_step = run.check_all(steps)
        return cls(name or str(run.path), run.manifest, digests, metrics, newest, best_step)

    @property
    def validations(self) -> dict[int, dict[str, Any]]:
        """The validation entries of metrics.jsonl by step."""
        return {entry["step"]: entry for entry in self.metrics if entry["kind"] == "validation"}

    @property
    def end(self) -> int:
        """The step of the last digest, or 0 without any digest."""
        return max((entry["step"] for entry in self.digests), default=0)

    def refuse_incomplete(self) -> None:
        """Raise WrongUse if another file has a later step than digests.jsonl."""
        trained = max(
            (entry["step"] for entry in self.metrics if entry["kind"] != "health"), default=0
        )
        for name, step in (
            ("metrics.jsonl", trained),
            ("checkpoints/", self.newest),
        ):
            if step > self.end:
                raise WrongUse(
                    f"the record of {self.name} is incomplete (digests.jsonl ends at step "
                    f"{self.end}, {name} at step {step}): restore digests.jsonl, or, if the run "
                    f"was killed, resume it or verify its first part with --steps {self.end}"
                )

    def refuse_unfinished(self) -> None:
        """Raise WrongUse if the run does not have its last validation."""
        self.refuse_incomplete()
        if self.end not in self.validations:
            raise WrongUse(
                f"{self.name} is not finished (it ends at step {self.end} without a "
                "validation): resume it with the same command, or verify its first part with "
                f"--steps {self.end}"
            )


@contextlib.contextmanager
def contradictions() -> Iterator[None]:
    """Give an error in the files of a run the exit code of `verify`."""
    try:
        yield
    except (StorageFailure, Edited) as error:
        what = "SETTINGS" if isinstance(error, Edited) else "FILES"
        raise _different(what, str(error)) from error


def compare_runs(one: Path, other: Path) -> str:
    """Return that two runs have the same bits, with their differences in settings.

    Raises:
        WrongUse: A folder is not a run, or both are the same folder.
        Failure: The digests differ, or a run's files contradict each other.
    """
    if one.resolve() == other.resolve():
        raise WrongUse(
            f"verify {one} {other}: both are the same folder: give the folders of two runs"
        )
    with contradictions():
        a, b = (Evidence.of(RunRecord.open(run)) for run in (one, other))
    same = verdict(a, b)
    # Entries have a time: equal files are copies, not two trainings.
    copied = bool(a.metrics) and a.metrics == b.metrics
    note = f"; {other} is a copy of {one}: this is one training, compared with itself"
    return same + (note if copied else "")


def verdict(run: Evidence, again: Evidence, until: int | None = None) -> str:
    """Return the `SAME BITS` line of two runs, compared up to step `until` or to their ends.

    Raises:
        Failure: The digests, validations, best steps or ends differ.
        WrongUse: The runs have no digest of a trained step in common, or one record is incomplete.
    """
    one, other = run.name, again.name
    if run.manifest.get("classes") != again.manifest.get("classes"):
        raise _different(
            "CLASSES",
            f"{one} against {other}: the classes in their manifests differ: restore manifest.json",
        )
    manifests = listed_changes(manifest_differences(run.manifest, again.manifest))
    entries = (
        f"; manifest entries that differ: {manifests}"
        if manifests
        else "; no manifest entry differs"
    )
    common = sorted(
        {entry["step"] for entry in run.digests} & {entry["step"] for entry in again.digests}
    )
    if not any(common):
        trained = next((entry["step"] for entry in run.digests if entry["step"]), None)
        raise WrongUse(
            f"{one} and {other} have no digest of a trained step in common (the first digest of "
            f"{one} is of step {trained}): train with --digest-steps N for more digests"
        )
    if bits := first_difference(run.digests, again.digests):
        raise _different("BITS", f"{one} against {other}: {bits}{entries}")
    if found := _validation_difference(run, again, until):
        what, text = found
        raise _different(
            what, f"{one} against {other}: the weights are the same, and {text}{entries}"
        )
    if until is None:
        for each in (run, again):
            each.refuse_incomplete()
        if run.end != again.end:
            raise _different(
                "ENDS",
                f"{one} ends at step {run.end} and {other} at step {again.end}: the same bits up "
                f"to step {common[-1]}, the last step that both have{entries}",
            )
        if run.best_step != again.best_step:
            raise _different(
                "BEST WEIGHTS",
                f"the model.safetensors of {one} is of step {run.best_step}, and the file of "
                f"{other} of step {again.best_step}{entries}",
            )
    last = next(entry["model"] for entry in reversed(run.digests) if entry["step"] == common[-1])
    return (
        f"SAME BITS: {one} and {other}, {len(common)} digests up to step {common[-1]}, weights "
        f"{last[:16]}{entries}"
    )


def _different(what: str, text: str) -> Failure:
    return Failure(f"DIFFERENT {what}: {text}", exit_code=ExitCode.DIFFERENT)


def _validation_difference(
    run: Evidence, again: Evidence, until: int | None
) -> tuple[str, str] | None:
    """Describe the first validation that is missing in one run or differs, or return None.

    Return what differs (FILES or BITS), and the description.

    A run may have stopped at a step before the validation of that step.
    """
    ends, one, other = min(until or run.end, run.end, again.end), run.validations, again.validations
    for step in sorted({*one, *other}):
        if step in one and step in other:
            if difference := first_figure_difference(one[step], other[step]):
                return "BITS", f"the validation at step {step} differs in {difference}"
        elif step < ends or (until is None and step == run.end == again.end):
            incomplete = again if step in one else run
            return "FILES", (
                f"the metrics.jsonl of {incomplete.name} has no validation at step {step}: if it "
                "was rotated or truncated, restore it"
            )
    return None


def _first_digests(path: Path) -> list[dict[str, Any]]:
    """Return the first entry of each step, in the order of the steps.

    A step has more entries if a checkpoint was saved there or the run was resumed there.

    Raises:
        Failure: The second entry of a step has other digests.
        WrongUse: The file cannot be read, or a line is damaged.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for number, entry in enumerate(read_all_entries(path, digest_problem), 1):
        before = by_step.setdefault(entry["step"], entry)
        for name in (*DIGESTS, "tensors"):
            if entry[name] != before[name]:
                raise _different(
                    "BITS",
                    f"line {number} of {path}: the second entry of step {entry['step']} has a "
                    f"different digest of {name} than the first: restore the file, or train the "
                    "run again",
                )
    return sorted(by_step.values(), key=lambda entry: entry["step"])
