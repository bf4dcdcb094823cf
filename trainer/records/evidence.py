"""Read the record of a run for `verify`, and compare two records, without torch.

Reading is strict: a changed, truncated or damaged record is an error. No line is skipped.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainbox.contract.config import parse_config
from trainbox.contract.errors import ExitCode, Failure, WrongUse
from trainbox.contract.files import parse_object, read_text
from trainer.records.compare import (
    edited_settings,
    first_difference,
    first_validation_difference,
    listed_changes,
)

_DIGESTS = ("model", "optimizer", "order")
_KINDS = ("start", "step", "checkpoint", "resume")
_CHECKPOINT = re.compile(r"step-(\d{8,})\.(?:pt|json)")


@dataclass(frozen=True)
class Evidence:
    """The record of one run. `digests` and `validations` have one entry per step, in order."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    digests: Sequence[dict[str, Any]]
    metrics: Sequence[dict[str, Any]]
    checkpoints: tuple[int, ...]  # the steps of the files in checkpoints/
    best_step: int | None = None  # the step of model.safetensors, set by `check_files`

    @classmethod
    def of(cls, run: Path, name: str | None = None) -> "Evidence":
        """Read the folder of a run.

        Raises:
            WrongUse: A file is missing or damaged.
            Failure: metrics.jsonl is missing, a resume did not restore the digests, or config.json
                was edited.
        """
        # Read the settings, and check that they were not edited.
        config, manifest = config_and_manifest(run)
        if edited := edited_settings(manifest, config):
            raise Failure(
                f"DIFFERENT SETTINGS: {run}/config.json was edited after the run was started "
                f"({listed_changes(edited)}): restore it",
                exit_code=ExitCode.DIFFERENT,
            )
        # Also check the settings that the manifest does not have.
        parse_config(json.dumps(config), run / "config.json")
        # Read the digests and the metrics.
        digests = _one_per_step(
            run / "digests.jsonl", _entries(run / "digests.jsonl", _digest_problem)
        )
        if not (run / "metrics.jsonl").exists():
            raise Failure(
                f"{run}/metrics.jsonl is missing, so no validation can be compared: restore it",
                exit_code=ExitCode.DIFFERENT,
            )
        metrics = _entries(run / "metrics.jsonl", _metrics_problem)
        steps = [entry["step"] for entry in metrics if entry["kind"] == "validation"]
        if steps != sorted(set(steps)):
            raise WrongUse(
                f"{run}/metrics.jsonl is damaged (its validations are at steps {steps}): restore it"
            )
        # List the checkpoints.
        names = [
            match
            for path in (run / "checkpoints").glob("*")
            if (match := _CHECKPOINT.fullmatch(path.name))
        ]
        return cls(
            name or str(run),
            run,
            config,
            manifest,
            digests,
            metrics,
            tuple(sorted({int(match[1]) for match in names})),
        )

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
            ("checkpoints/", max(self.checkpoints, default=0)),
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


def verdict(run: Evidence, again: Evidence, manifests: str, until: int | None = None) -> str:
    """Return the `SAME BITS` line of two runs, compared up to step `until` or to their ends.

    `manifests` lists the manifest entries that differ, and may be empty.

    Raises:
        Failure: The digests, validations, best steps or ends differ.
        WrongUse: The runs have no digest of a trained step in common, or one record is incomplete.
    """
    one, other = run.name, again.name
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
    if difference := first_difference(run.digests, again.digests):
        raise Failure(
            f"DIFFERENT BITS: {one} against {other}: {difference}{entries}",
            exit_code=ExitCode.DIFFERENT,
        )
    if validation := _validation_difference(run, again, until):
        raise Failure(
            f"DIFFERENT BITS: {one} against {other}: the weights are the same, and "
            f"{validation}{entries}",
            exit_code=ExitCode.DIFFERENT,
        )
    if until is None:
        for each in (run, again):
            each.refuse_incomplete()
        if run.end != again.end:
            raise Failure(
                f"DIFFERENT ENDS: {one} ends at step {run.end} and {other} at step "
                f"{again.end}: the same bits up to step {common[-1]}, the last step that both "
                f"have{entries}",
                exit_code=ExitCode.DIFFERENT,
            )
        if run.best_step != again.best_step:
            raise Failure(
                f"DIFFERENT BEST WEIGHTS: the model.safetensors of {one} is of step "
                f"{run.best_step}, that of {other} of step {again.best_step}{entries}",
                exit_code=ExitCode.DIFFERENT,
            )
    last = next(entry["model"] for entry in reversed(run.digests) if entry["step"] == common[-1])
    return (
        f"SAME BITS: {one} and {other}, {len(common)} digests up to step {common[-1]}, weights "
        f"{last[:16]}{entries}"
    )


def _validation_difference(run: Evidence, again: Evidence, until: int | None) -> str | None:
    """Describe the first validation that is missing in one run or differs, or return None.

    A run may have stopped at a step before the validation of that step.
    """
    ends = min(until or run.end, run.end, again.end)
    for step in sorted(run.validations.keys() ^ again.validations.keys()):
        if step < ends or (until is None and step == run.end == again.end):
            incomplete = run if step in again.validations else again
            return f"the metrics.jsonl of {incomplete.name} has no validation at step {step}"
    return first_validation_difference(run.metrics, again.metrics)


def _text_in(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise WrongUse(
            f"{path} cannot be read ({error.strerror}): name the folder of a run"
        ) from error
    except ValueError as error:
        raise WrongUse(f"{path} is damaged ({error}): restore it") from error


def config_and_manifest(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the objects in config.json and manifest.json of a run.

    Raises:
        WrongUse: A file is missing or damaged.
    """
    config, manifest = _object_in(run / "config.json"), _object_in(run / "manifest.json")
    if problem := _manifest_problem(manifest):
        raise WrongUse(f"{run}/manifest.json is damaged ({problem}): restore it")
    return config, manifest


def _object_in(path: Path) -> dict[str, Any]:
    try:
        return parse_object(_text_in(path))
    except ValueError as error:
        raise WrongUse(f"{path} is damaged ({error}): restore it") from error


def _entries(
    path: Path, problem_of: Callable[[dict[str, Any], dict[str, Any] | None], str | None]
) -> list[dict[str, Any]]:
    """Return the entries of a .jsonl file.

    `problem_of(entry, entry before)` returns what is wrong with an entry, or None.

    Raises:
        WrongUse: A line is not an entry, or it has a problem.
    """
    entries: list[dict[str, Any]] = []
    lines = _text_in(path).split("\n")
    complete = lines.pop() == ""  # the last line ends with a newline
    for number, line in enumerate(lines if complete else [*lines, ""], 1):
        try:
            entry = parse_object(line)
            problem = problem_of(entry, entries[-1] if entries else None)
        except ValueError as error:
            problem = str(error) if complete or number <= len(lines) else "incomplete"
        if problem:
            raise WrongUse(
                f"line {number} of {path} is damaged ({problem}): restore the file, or, if "
                "the run was killed, repair the file by resuming the run with the same command"
            )
        entries.append(entry)
    return entries


def _step_problem(entry: Mapping[str, Any]) -> str | None:
    step = entry.get("step")
    if type(step) is not int or step < 0:  # true is an int
        return f"step {step!r} is not a whole number from 0"
    return None if isinstance(entry.get("kind"), str) else "it has no kind"


def _digest_problem(entry: dict[str, Any], before: dict[str, Any] | None) -> str | None:
    """Return what is wrong with an entry of digests.jsonl after the entry `before`, or None."""
    if problem := _step_problem(entry):
        return problem
    tensors = entry.get("tensors")
    wrong = [name for name in _DIGESTS if not _is_digest(entry.get(name), 64)]
    if isinstance(tensors, dict):
        wrong += [
            f"tensors.{name}" for name, digest in tensors.items() if not _is_digest(digest, 16)
        ]
    else:
        wrong += ["tensors"]
    if entry["kind"] not in _KINDS:
        wrong += ["kind"]
    if wrong:
        return f"{wrong[0]} is missing or malformed"
    # A resume records the digests of its first step. They may already be recorded.
    if before and entry["step"] < before["step"] + (entry["kind"] != "resume"):
        return f"step {entry['step']} comes after step {before['step']}"
    return None


def _is_digest(value: object, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def _metrics_problem(entry: dict[str, Any], _before: dict[str, Any] | None) -> str | None:
    return _step_problem(entry)


def _one_per_step(path: Path, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first entry of each step.

    A step has a second entry if the run was resumed there.

    Raises:
        Failure: The second entry of a step has other digests.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for number, entry in enumerate(entries, 1):
        before = by_step.setdefault(entry["step"], entry)
        for name in (*_DIGESTS, "tensors"):
            if entry[name] != before[name]:
                raise Failure(
                    f"DIFFERENT BITS: line {number} of {path}: the resume at step "
                    f"{entry['step']} has a different digest of {name} than the entry before it: "
                    "restore the file, or train the run again",
                    exit_code=ExitCode.DIFFERENT,
                )
    return list(by_step.values())


def _manifest_problem(manifest: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the entries that `verify` and `evaluate` read, or None."""
    for name, kind, called in (
        ("data", dict, "an object"),
        ("sources", dict, "an object"),
        ("classes", list, "a list"),
    ):
        if not isinstance(manifest.get(name, kind()), kind):
            return f"{name} is not {called}"
    resumes = manifest.get("resumes", [])
    if not isinstance(manifest.get("settings"), dict):
        return "it has no settings"
    if not isinstance(resumes, list) or not all(isinstance(start, dict) for start in resumes):
        return "resumes is not a list of objects"
    for plan in (manifest.get("plan"), *(start.get("plan") for start in resumes)):
        if not (
            isinstance(plan, dict)
            and isinstance(plan.get("strategy"), str)
            and type(plan.get("world_size")) is int
        ):
            return "a plan has no strategy or world_size"
    if not all(type(start.get("step")) is int for start in resumes):
        return "a resume has no step"
    return None
