"""Checkpoints are complete or absent, whatever happens to the disk or the process."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import clean_environment
from tests.support.here import files_of
from trainbox.errors import Failure, StorageFailure
from trainbox.files.sidecar import read_sidecar, sidecar_text
from trainer.records.checkpoint import RunCheckpoints
from trainer.records.checkpoint_files import CheckpointFiles


class Saver:
    """Checkpoints in their own folder, and their reports."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.reports = folder / "checkpoints", list[str]()
        self.checkpoints = RunCheckpoints(
            self.folder, keep, True, self.reports.append, run_id="0123"
        )

    def save(
        self,
        step: int,
        state: dict[str, Any] | None = None,
        best: int | None = None,
        **metrics: float,
    ) -> None:
        """Save, and wait until the checkpoint is durable."""
        self.checkpoints.save(step, state or simple(step), metrics, best)
        self.checkpoints.wait()

    def path(self, step: int, suffix: str = ".pt") -> Path:
        return self.folder / f"step-{step:08d}{suffix}"

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def simple(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((100,), float(value))}, "progress": {"step": int(value)}}


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    yield (saver := Saver(tmp_path))
    saver.checkpoints.finish()


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event. Until it is set, no save writes its tensors."""
    released, save = threading.Event(), torch.save

    def wait_and_save(*arguments: Any, **options: Any) -> None:
        assert released.wait(60)
        save(*arguments, **options)

    monkeypatch.setattr(torch, "save", wait_and_save)
    yield released
    released.set()


def _value(saver: Saver, step: int) -> tuple[float, int]:
    """Return the weight and the step in a checkpoint of `simple`."""
    state = saver.checkpoints.files.load(step)
    assert state["model"]["weight"].unique().numel() == 1
    return state["model"]["weight"][0].item(), state["progress"]["step"]


def test_the_sidecar_describes_the_file(saver: Saver) -> None:
    saver.save(7, simple(7), best=5, loss=0.5)
    sidecar = read_sidecar(saver.path(7, ".json"))
    data = saver.path(7).read_bytes()
    assert sidecar.pop("saved_at_unix_s") > 1.7e9
    assert sidecar == {
        "step": 7,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "run_id": "0123",
        "metrics": {"loss": 0.5},
        "best_step": 5,
    }
    assert saver.names() == ["step-00000007.json", "step-00000007.pt"]


def test_views_tied_and_transposed_tensors_keep_their_values(saver: Saver) -> None:
    base = torch.arange(12.0).view(3, 4)
    state = {
        "model": {
            "whole": base,
            "tied": base,
            "transposed": base.T,
            "slice": base[:, 1],
            "wide": torch.ones(1).expand(5),
        }
    }
    saver.save(1, state, best=1)
    for found in (
        saver.checkpoints.files.load(1)["model"],
        load_file(saver.folder.parent / "model.safetensors"),
    ):
        assert {name: tensor.tolist() for name, tensor in found.items()} == {
            name: tensor.tolist() for name, tensor in state["model"].items()
        }


def test_training_continues_while_the_save_is_written(
    saver: Saver, writer: threading.Event
) -> None:
    state = simple(1)
    saver.checkpoints.prepare(state)
    saver.checkpoints.save(1, state, {}, None)  # returns before anything is written
    state["model"]["weight"].fill_(2)
    state["progress"]["step"] = 2
    assert saver.checkpoints.files.steps() == []
    writer.set()
    saver.checkpoints.wait()
    assert _value(saver, 1) == (1, 1)


def test_the_next_save_waits_for_the_current_one(saver: Saver, writer: threading.Event) -> None:
    """The first save is written from the buffers that the copy of the next one overwrites."""
    saver.checkpoints.save(1, simple(1), {}, None)
    threading.Timer(0.2, writer.set).start()
    saver.checkpoints.save(2, simple(2), {}, None)
    saver.checkpoints.wait()
    assert [_value(saver, step) for step in (1, 2)] == [(1, 1), (2, 2)]


def test_a_best_to_write_later_is_written_before_the_next_checkpoint(saver: Saver) -> None:
    """A resume from a checkpoint finds the weights of its best step."""
    state, best = simple(1), saver.folder.parent / "model.safetensors"
    saver.checkpoints.save(1, state, {"loss": 0.5}, 1, later=True)
    state["model"]["weight"].fill_(2)
    saver.checkpoints.wait()
    assert not saver.folder.exists()
    saver.save(3, best=1)
    assert saver.checkpoints.files.steps() == [1, 3]
    assert _value(saver, 1) == (1, 1)
    assert json.loads(saver.path(1, ".json").read_text())["metrics"] == {"loss": 0.5}
    assert load_file(best)["weight"][0] == 1


def test_only_the_newest_best_is_written_later(saver: Saver) -> None:
    saver.checkpoints.save(1, simple(1), {}, 1, later=True)
    saver.checkpoints.save(2, simple(2), {}, 2, later=True)
    saver.checkpoints.finish()
    assert saver.checkpoints.files.steps() == [2]
    saver.checkpoints.save(3, simple(3), {}, 3, later=True)
    saver.save(4, best=4)
    assert saver.checkpoints.files.steps() == [2, 4]


def test_after_an_error_a_best_in_memory_is_written_only_if_it_may_be(saver: Saver) -> None:
    """A source file may have changed since the last save."""
    saver.checkpoints.save(1, simple(1), {}, 1, later=True)
    saver.checkpoints.may_write_held = lambda: False
    saver.checkpoints.finish()
    assert not saver.folder.exists()
    saver.checkpoints.finish()
    assert not saver.folder.exists()


def test_a_best_in_memory_that_cannot_be_written_after_an_error_is_reported(saver: Saver) -> None:
    saver.folder.write_text("a file")
    saver.checkpoints.save(1, simple(1), {}, 1, later=True)
    saver.checkpoints.finish()
    (report,) = saver.reports
    assert report.startswith("the newest best checkpoint is lost: ")


def test_a_best_in_memory_that_is_not_finite_is_refused_at_once(saver: Saver) -> None:
    infinite = simple(1) | {"model": {"weight": torch.full((2,), torch.inf)}}
    with pytest.raises(Failure, match="'weight' are not finite at step 1"):
        saver.checkpoints.save(1, infinite, {}, 1, later=True)
    saver.checkpoints.finish()
    assert not saver.folder.exists()


def test_a_best_in_memory_is_due_after_ten_seconds(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.save(1)
    begin_s, passed_s = time.monotonic(), [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: begin_s + passed_s[0])
    saver.checkpoints.save(2, simple(2), {}, 2, later=True)
    assert not saver.checkpoints.due(5)
    passed_s[0] = 11.0
    assert saver.checkpoints.due(5)


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", 3, False, lambda _: None)
    checkpoints.prepare(simple(1))
    checkpoints.save(1, simple(1), {}, 1)
    checkpoints.wait()
    assert list(tmp_path.iterdir()) == []


def test_the_run_uses_the_buffers_of_its_rehearsal(saver: Saver, tmp_path: Path) -> None:
    rehearsed = saver.checkpoints.of_rehearsal(tmp_path / "rehearsal/checkpoints")
    rehearsed.save(1, simple(1), {}, None)
    rehearsed.wait()
    assert rehearsed.files.load(1)["model"]["weight"][0] == 1
    (before,) = saver.checkpoints.snapshot._buffers
    saver.checkpoints.prepare(simple(2))
    saver.save(2)
    assert saver.checkpoints.snapshot._buffers == [before]
    assert saver.checkpoints.files.load(2)["model"]["weight"][0] == 2
    assert rehearsed.files.load(1)["model"]["weight"][0] == 1


def test_only_temporary_files_of_an_interrupted_save_are_removed(saver: Saver) -> None:
    saver.save(1)
    saver.path(2, ".pt.tmp").write_bytes(b"half")
    saver.path(4, ".json.tmp").write_bytes(b"{")
    kept = {
        "backbone.pt": b"the user's own",
        "notes.tmp": b"too",
        "step-00000003.pt": b"tensors without a sidecar",
        "step-00000005.pt.damaged": b"set aside before",
    }
    for name, data in kept.items():
        (saver.folder / name).write_bytes(data)
    saver.checkpoints.files.remove_leftovers()
    assert saver.names() == sorted([*kept, "step-00000001.json", "step-00000001.pt"])


def test_a_foreign_file_with_a_temporary_name_is_set_aside(saver: Saver, tmp_path: Path) -> None:
    """A FIFO would block the next save, and a save through a link would overwrite its target."""
    saver.save(1)
    (tmp_path / "precious").write_text("the user's own")
    saver.path(2, ".pt.tmp").symlink_to(tmp_path / "precious")
    os.mkfifo(saver.path(3, ".pt.tmp"))
    saver.path(4, ".json.tmp").mkdir()
    saver.checkpoints.files.remove_leftovers()
    assert [report.split()[0] for report in sorted(saver.reports)] == [
        str(saver.path(step, suffix))
        for step, suffix in ((2, ".pt.tmp"), (3, ".pt.tmp"), (4, ".json.tmp"))
    ]
    for step in (2, 3, 4):
        saver.save(step)
    assert saver.checkpoints.files.newest() == 4
    assert (tmp_path / "precious").read_text() == "the user's own"
    saver.path(5, ".pt.tmp").symlink_to(tmp_path / "precious")
    saver.save(5)
    assert saver.checkpoints.files.newest() == 5
    assert (tmp_path / "precious").read_text() == "the user's own"


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _replace(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def _sidecar(damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: damage(path.with_suffix(".json"))


def _change_sidecar(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    return _sidecar(lambda sidecar: sidecar.write_text(sidecar_text(change(read_sidecar(sidecar)))))


# fmt: off
_DAMAGES = [
    pytest.param(_truncate, "[0-9]+ bytes instead of [0-9]+", id="truncated"),
    pytest.param(lambda path: path.write_bytes(path.read_bytes()[::-1]),
     "sha256 [0-9a-f]{12}... instead of", id="other bytes"),
    pytest.param(lambda path: path.unlink(), "its tensors cannot be read: No such file",
     id="no tensors"),
    pytest.param(_replace(os.mkfifo), "its tensors cannot be read: not a regular file",
     id="a FIFO"),
    pytest.param(_sidecar(Path.unlink), "its sidecar step-00000003.json is missing",
     id="no sidecar"),
    pytest.param(_sidecar(lambda path: os.truncate(path, 2**40)),
     "its sidecar cannot be used: more than", id="huge sidecar"),
    pytest.param(_sidecar(_replace(os.mkfifo)), "its sidecar cannot be used: not a regular",
     id="a FIFO as sidecar"),
    pytest.param(_sidecar(lambda path: path.write_text('{"step": 3, "run_id": "0123"}')),
     "its sidecar cannot be used: it is of another program", id="too little"),
    pytest.param(_sidecar(lambda path: path.write_text(path.read_text().replace("{}", '{"a": 1}'))),
     "its sidecar cannot be used: it was edited or damaged", id="an edited metric"),
    pytest.param(_change_sidecar(lambda old: old | {"step": "3"}), "its sidecar is of step '3'",
     id="step is a text"),
    pytest.param(_change_sidecar(lambda old: old | {"run_id": "4567"}),
     "its sidecar is of another run, with the id '4567' instead of '0123'", id="another run"),
]
# fmt: on


@pytest.mark.parametrize(("damage", "reason"), _DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_for_the_previous_one(
    saver: Saver, damage: Callable[[Path], Any], reason: str
) -> None:
    for step in (1, 2, 3):
        saver.save(step)
    damage(saver.path(3))
    assert saver.checkpoints.files.newest() == 2
    assert _value(saver, 2) == (2, 2)
    (report,) = saver.reports
    assert re.fullmatch(
        rf"checkpoint {saver.path(3)} is damaged \({reason}.*\): set aside, using step 2", report
    )
    assert not any(
        name.startswith("step-00000003") and not name.endswith(".damaged") for name in saver.names()
    )
    assert any(name.endswith(".damaged") for name in saver.names())
    assert saver.checkpoints.files.newest() == 2
    assert len(saver.reports) == 1
    saver.save(3)
    assert saver.checkpoints.files.newest() == 3


def _change_content(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Replace the tensors, and update their sidecar."""
    torch.save(change(torch.load(path, weights_only=True)), path)
    data = path.read_bytes()
    _change_sidecar(
        lambda old: old | {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    )(path)


# fmt: off
_CHANGES = [
    ({"run_id": "4567", "step": 3},
     "its content is of another run, with the id '4567' instead of '0123'"),
    ({"run_id": "0123", "step": 8}, "its content is of step 8"),
    (None, "its content is of step None"),
]
# fmt: on


@pytest.mark.parametrize(("change", "reason"), _CHANGES)
def test_a_checkpoint_whose_content_does_not_match_its_name_is_set_aside(
    saver: Saver, change: Any, reason: str
) -> None:
    saver.save(2)
    saver.save(3)
    _change_content(saver.path(3), lambda state: state | {"checkpoint": change})
    assert saver.checkpoints.files.newest() == 2
    assert re.search(
        rf"step-00000003.pt is damaged \({reason}\): set aside, using step 2", saver.reports[0]
    )


def test_files_set_aside_do_not_replace_earlier_ones(saver: Saver) -> None:
    saver.save(1)
    for _ in range(2):
        saver.save(2)
        _truncate(saver.path(2))
        assert saver.checkpoints.files.newest() == 1
    assert [name for name in saver.names() if "damaged" in name] == [
        f"step-00000002.{suffix}.damaged{number}"
        for suffix in ("json", "pt")
        for number in ("", ".2")
    ]


def test_a_run_whose_checkpoints_are_all_damaged_fails_and_does_not_restart(saver: Saver) -> None:
    for step in (1, 2):
        saver.save(step)
        _truncate(saver.path(step))
    before = files_of(saver.folder)
    for _ in range(2):  # and again at the next start
        with pytest.raises(StorageFailure) as failure:
            saver.checkpoints.files.newest()
        assert re.fullmatch(
            rf"no valid checkpoint in {saver.folder} \(step-00000002.pt: [0-9]+ bytes .*; "
            r"step-00000001.pt: .*\): restore the "
            "missing or damaged files from a backup, or start a new run with --run NAME",
            str(failure.value),
        )
        assert files_of(saver.folder) == before
    for path in saver.folder.iterdir():
        path.rename(path.with_name(path.name + ".damaged"))
    with pytest.raises(StorageFailure, match=r"\(4 file\(s\) set aside as damaged\): restore"):
        saver.checkpoints.files.newest()


def test_a_run_without_sidecars_fails_and_keeps_the_tensors(saver: Saver) -> None:
    for step in range(1, 6):
        saver.save(step)
    for step in (3, 4, 5):
        saver.path(step, ".json").unlink()
    before = files_of(saver.folder)
    assert len(before) == 3
    saver.checkpoints.files.remove_leftovers()
    with pytest.raises(StorageFailure, match="step-00000005.json is missing; step-00000004.pt"):
        saver.checkpoints.files.newest()
    assert files_of(saver.folder) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_and_nothing_is_written(
    saver: Saver, value: float
) -> None:
    saver.save(1, best=1)
    bad = {
        "model": {
            "count": torch.arange(3),
            "fine": torch.ones(3),
            "layer.weight": torch.tensor([1.0, value]),
        }
    }
    saver.checkpoints.save(2, bad, {}, 2)
    with pytest.raises(Failure, match="'layer.weight' are not finite at step 2") as failure:
        saver.checkpoints.wait()
    assert failure.value.exit_code == 6
    assert saver.names() == ["step-00000001.json", "step-00000001.pt"]
    assert load_file(saver.folder.parent / "model.safetensors")["weight"].equal(
        torch.full((100,), 1.0)
    )
    saver.checkpoints.wait()  # raised only once


def test_best_weights_of_a_later_step_are_replaced(saver: Saver) -> None:
    """A killed save has replaced them, but its checkpoint is not complete."""
    saver.save(3, best=3)
    files = saver.checkpoints.files
    files.write_best(5, {"weight": torch.ones(2)})
    files.restore_best(3)
    assert torch.equal(load_file(files.best)["weight"], simple(3)["model"]["weight"])


_NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "saved"), [(float("-inf"), True), (_NAN, False), (complex(_NAN, 0), False)]
)
def test_a_buffer_may_have_infinities_as_a_mask(saver: Saver, value: complex, saved: bool) -> None:
    state = {"model": {"mask": torch.tensor([0.0, value])}, "buffers": ["mask"]}
    saver.checkpoints.save(1, state, {}, None)
    with contextlib.nullcontext() if saved else pytest.raises(Failure, match="'mask'"):
        saver.checkpoints.wait()
    assert (saver.folder / "step-00000001.pt").exists() == saved


_FULL_DISK = """
mount -t tmpfs -o size=8m tmpfs runs || exit 99
"$@"
code=$?
cd runs/r
sha256sum checkpoints/*.pt
find . -name '*.tmp'
cat checkpoints/*.json
exit $code
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"),
    reason="a private mount namespace needs root and unshare",
)
@pytest.mark.slow
def test_a_full_disk_exits_with_code_4_and_keeps_the_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    if subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", tmp_path / "runs"], capture_output=True
    ).returncode:
        pytest.skip("mounting is not permitted, even in a private namespace")
    train = [sys.executable, "-P", "-m", "trainer", "train", "--device", "cpu", "--run", "r"]
    train += ["--max-steps", "40", "--checkpoint-steps", "5", "--keep", "20"]
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", _FULL_DISK, "sh", *train],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 4, ended.stderr
    messages = [line for line in ended.stderr.splitlines() if line.startswith("trainbox:")]
    assert len(messages) == 1
    assert "cannot write runs/r/checkpoints: No space left on device (" in messages[0]
    assert "MiB free): free some space" in messages[0]
    assert "Traceback" not in ended.stderr
    assert ".tmp" not in ended.stdout
    written = dict(
        reversed(line.split()) for line in ended.stdout.splitlines() if line.endswith(".pt")
    )
    assert len(written) >= 2
    sidecars = ended.stdout[ended.stdout.index("\n{\n") :].split("\n{\n")[1:]
    assert {json.loads("{" + sidecar)["sha256"] for sidecar in sidecars} == set(written.values())


def test_weights_that_no_run_has_saved_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    files = CheckpointFiles(tmp_path / "checkpoints", lambda _text: None)
    with pytest.raises(ValueError, match=r"a run did not save it: its step is ''"):
        files.check_best()
