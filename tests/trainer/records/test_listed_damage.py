"""What `trainbox runs` says of a damaged run, and what a start of this run does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from entrypoint.runs.read import stored_runs
from tests.support.here import Here, StopAfter
from trainbox.errors import ExitCode, Preempted, StorageFailure, WrongUse

_Change = Callable[[Path], object]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def _on_each(change: _Change, pattern: str) -> _Change:
    def change_each(run: Path) -> None:
        for path in run.glob(pattern):
            change(path)

    return change_each


def _of_another_run(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    other = manifest | {"run_id": "other", "settings": manifest["settings"] | {"seed": 9}}
    (run / "manifest.json").write_text(json.dumps(other))


def _set_aside(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        path.rename(f"{path}.damaged")
    (run / "first_checkpoint.json").unlink()


def _empty_checkpoints(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        path.unlink()


def _delete_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def _delete_checkpoints_and_weights(run: Path) -> None:
    _delete_checkpoints(run)
    (run / "model.safetensors").unlink()


_LOSSES: dict[str, tuple[str, _Change]] = {
    "nothing": ("", lambda _run: None),
    "last sidecar": ("", lambda run: (run / "checkpoints/step-00000012.json").unlink()),
    "last tensors": ("", lambda run: (run / "checkpoints/step-00000012.pt").unlink()),
    "last tensors cut": ("", lambda run: _cut(run / "checkpoints/step-00000012.pt")),
    "last entry cut": ("", lambda run: _cut(run / "digests.jsonl")),
    "a rename": ("", _on_each(lambda path: path.rename(f"{path}.tmp"), "checkpoints/*.json")),
    "all sidecars": (
        "step-00000012.json is missing",
        _on_each(Path.unlink, "checkpoints/*.json"),
    ),
    "all tensors": (
        "step-00000012.pt is missing",
        _on_each(Path.unlink, "checkpoints/*.pt"),
    ),
    "all tensors cut": (
        "step-00000012.pt has another size",
        _on_each(_cut, "checkpoints/*.pt"),
    ),
    "set aside": ("checkpoints has no checkpoint", _set_aside),
    "checkpoints and best weights": (
        "checkpoints has no checkpoint",
        _delete_checkpoints_and_weights,
    ),
    "digests": ("digests.jsonl is missing", lambda run: (run / "digests.jsonl").unlink()),
    "digests emptied": (
        "digests.jsonl lacks step 12",
        lambda run: (run / "digests.jsonl").write_text(""),
    ),
}


@pytest.mark.parametrize("loss", _LOSSES)
def test_a_run_is_damaged_if_the_same_command_cannot_resume_it(here: Here, loss: str) -> None:
    here.train(epochs=2, keep=5)
    assert here.steps() == [6, 12]
    why, lose = _LOSSES[loss]
    lose(here.path())
    (found,) = stored_runs(here.folder / "runs", False)
    assert (found.state, found.why) == (("damaged", why) if why else ("complete", ""))
    if not why:
        here.train(epochs=2, keep=5)
        return
    with pytest.raises(StorageFailure) as refused:
        here.train(epochs=2, keep=5)
    assert refused.value.exit_code == ExitCode.STORAGE


@pytest.mark.parametrize("delete", [_empty_checkpoints, _delete_checkpoints])
def test_a_complete_run_needs_no_checkpoints_beside_its_best_weights(
    here: Here, delete: _Change
) -> None:
    here.train(epochs=2)
    delete(here.path())
    (found,) = stored_runs(here.folder / "runs", False)
    assert (found.state, found.why) == ("complete", "")
    assert here.command("evaluate", "runs/r")[0] == 0


@pytest.mark.parametrize("delete", [_empty_checkpoints, _delete_checkpoints])
def test_a_stopped_run_without_its_checkpoints_is_damaged(here: Here, delete: _Change) -> None:
    with pytest.raises(Preempted):
        here.train(epochs=2, stop=StopAfter(8))
    assert (here.path() / "model.safetensors").exists()
    delete(here.path())
    (found,) = stored_runs(here.folder / "runs", False)
    assert (found.state, found.why) == ("damaged", "checkpoints has no checkpoint")


def test_a_manifest_of_another_run_is_named(here: Here) -> None:
    here.train(epochs=2)
    _of_another_run(here.path())
    (found,) = stored_runs(here.folder / "runs", False)
    assert (found.state, found.why) == ("damaged", "manifest.json is of another run")
    with pytest.raises(WrongUse, match=r"manifest\.json is of another run"):
        here.train(epochs=2)
