"""A run that was copied again and again while it trained resumes from a damaged copy."""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.here import Here, training_here
from tests.support.kinds import slow_after
from trainbox.files.sidecar import checkpoint_path, steps_in
from trainbox.folders import lease
from trainer.records.jsonl import read_entries

_SETTINGS: dict[str, Any] = {"max_steps": 60, "checkpoint_steps": 2, "log_steps": 1, "keep": 3}


def _copy_changes(folder: Path, copy: Path) -> Iterator[None]:
    """Make `copy` like `folder`, as rsync and rclone do, and yield after each file."""
    for path in sorted(folder.rglob("*")):
        other = copy / path.relative_to(folder)
        with contextlib.suppress(FileNotFoundError):  # the training has removed it meanwhile
            if path.is_dir():
                other.mkdir(parents=True, exist_ok=True)
            elif not other.exists() or path.stat().st_mtime_ns != other.stat().st_mtime_ns:
                shutil.copy2(path, other)
                yield
    for path in copy.rglob("*"):
        if not (folder / path.relative_to(copy)).exists():
            path.unlink()
            yield


def _usable(copy: Path) -> int:
    """Return the number of complete checkpoints with an entry in digests.jsonl."""
    folder = copy / "checkpoints"
    recorded = {e["step"] for e in read_entries(copy / "digests.jsonl") if "saved" in e}
    return len({*steps_in(folder)} & {*steps_in(folder, ".pt")} & recorded)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Here, list[Path]]]:
    """Train a run, and return three states of its copy from the middle of a pass."""
    states: list[Path] = []
    ended = threading.Event()
    with training_here(tmp_path_factory.mktemp("trained")) as here:

        def copy_again_and_again() -> None:
            copy, changes = here.folder / "copy", 0
            while not ended.is_set():
                for _ in _copy_changes(here.path(), copy):
                    changes += 1
                    # The first pass ends with the weights.
                    has_all = (copy / "model.safetensors").exists()
                    if changes % 7 == 0 and has_all and _usable(copy) > 1:
                        states.append(here.folder / f"states/{changes}")
                        shutil.copytree(copy, states[-1])

        thread = threading.Thread(target=copy_again_and_again)
        thread.start()
        try:
            here.train(**_SETTINGS)
        finally:
            ended.set()
            thread.join()
        yield here, [states[0], states[len(states) // 2], states[-1]]


def _newest(run: Path, suffix: str) -> Path:
    folder = run / "checkpoints"
    return checkpoint_path(folder, max(steps_in(folder, suffix)), suffix)


def _halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "none": lambda run: None,
    "half a checkpoint": lambda run: _halve(_newest(run, ".pt")),
    "no checkpoint": lambda run: _newest(run, ".pt").unlink(),
    "half a sidecar": lambda run: _halve(_newest(run, ".json")),
    "no sidecar": lambda run: _newest(run, ".json").unlink(),
    "half a line": lambda run: os.truncate(
        run / "metrics.jsonl", (run / "metrics.jsonl").stat().st_size - 9
    ),
}


@pytest.mark.parametrize("damage", slow_after(2, [*_DAMAGE]))
def test_a_damaged_copy_resumes_to_the_same_bits(
    trained: tuple[Here, list[Path]], damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_S", 0.1)  # each copy has the lease of the training
    here, states = trained
    for state in states:
        run = here.path(f"{state.name} {damage}")
        shutil.copytree(state, run)
        _DAMAGE[damage](run)
        assert "resume     from step " in here.train(run.name, **_SETTINGS)
        assert here.digest(run.name) == here.digest()
