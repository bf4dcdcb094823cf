"""The files and the steps of a script, as the drill sees them in its run folder."""

import json
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest

from entrypoint.drill.written_files import (
    Reads,
    records_reads,
    reported_steps,
    versions,
)
from entrypoint.script.working_copies import version_of


def test_only_the_files_of_the_script_count(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.json", "manifest.json", "manifest.json.tmp", "metrics.jsonl", "lock"):
        (run / name).touch()
    for folder in ("logs", "tensorboard", "weights/logs", "../work/__pycache__", "../work/logs"):
        (run / folder).mkdir(parents=True)
        (run / folder / "a").touch()
    (run / "model.pt").touch()
    found = versions(tmp_path)
    files = ["run/model.pt", "run/tensorboard/a", "run/weights/logs/a", "work/logs/a"]
    assert sorted(found) == files
    (run / "model.pt").write_text("x")
    assert versions(tmp_path) != found
    assert version_of(tmp_path / "none") is None and versions(tmp_path / "none") == {}


def test_the_steps_are_whole_numbers_that_the_script_has_reported(tmp_path: Path) -> None:
    """A hardware event may have a later step, which a kill undid. A partial line does not count."""
    assert reported_steps(tmp_path) == []
    entries = [{"kind": "health", "step": 9}, {"step": "4"}, {"step": True}, {"loss": 1}]
    entries += [{"step": 2}, {"kind": "train", "step": 1}]
    lines = "".join(f"{json.dumps(entry)}\n" for entry in entries)
    (tmp_path / "metrics.jsonl").write_text(f'{lines}{{"kind": "tr')
    assert reported_steps(tmp_path) == [2, 1]


def _map(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[0]


def _append(path: Path) -> None:
    with path.open("a") as file:
        file.write("x")


def _replace(path: Path) -> None:
    path.with_suffix(".new").write_text("new")
    path.with_suffix(".new").replace(path)


def _replace_and_read(path: Path) -> None:
    _replace(path)
    path.read_text()


def _read_and_replace(path: Path) -> None:
    path.read_text()
    _replace(path)


@pytest.mark.parametrize(
    ("use", "is_read"),
    [
        (Path.read_bytes, True),
        (_map, True),
        (_read_and_replace, True),
        (Path.stat, False),
        (lambda path: [*path.parent.iterdir()], False),
        (_append, False),
        (_replace, False),
        (_replace_and_read, False),
        (Path.unlink, False),
    ],
)
def test_what_reads_a_file(tmp_path: Path, use: Callable[[Path], object], is_read: bool) -> None:
    if not records_reads(tmp_path):
        pytest.skip("the file system does not record reads")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/a.pt").write_text("old")
    reads = Reads(tmp_path, versions(tmp_path))
    use(tmp_path / "run/a.pt")
    reads.close()
    assert reads.found == ({"run/a.pt"} if is_read else set())
