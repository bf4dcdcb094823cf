"""The copies of the user's folder."""

import shutil
from pathlib import Path

import pytest

from entrypoint.script import working_copies
from entrypoint.script.working_copies import UserFolder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    for name in (
        "train.py",
        "data/a.txt",
        ".git/HEAD",
        ".venv/pyvenv.cfg",
        "a/__pycache__/b.pyc",
        "tmp/drill/x",
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)
    (project / "train.py").chmod(0o755)
    (project / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/c.txt").write_text("c")
    (project / "link").symlink_to(tmp_path / "elsewhere")
    (project / "loop").symlink_to(project)
    (project / "broken").symlink_to("nothing")
    return project


def _names(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if "loop" not in path.parts
    )


def test_a_copy_has_what_a_script_needs(project: Path, tmp_path: Path) -> None:
    (project / "loop").unlink()
    user = UserFolder(project, project / "tmp/drill")
    user.excluded.add("data/a.txt")
    user.copy(tmp_path / "work")
    assert _names(tmp_path / "work") == [
        "a",
        "data",
        "link",
        "link/c.txt",
        "out",
        "tmp",
        "train.py",
    ]
    assert (tmp_path / "work/train.py").stat().st_mode & 0o111
    # A script that writes through a link of the user writes into the copy.
    (tmp_path / "work/link/c.txt").write_text("new")
    assert (tmp_path / "elsewhere/c.txt").read_text() == "c"
    assert (user.changed(), user.messages) == ([], [])
    (project / "new.pt").write_text("x")
    (project / "data/a.txt").write_text("longer")
    (project / "train.py").unlink()
    assert user.changed() == ["data/a.txt", "new.pt", "train.py"]


def test_what_is_too_large_is_left_out_and_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working_copies, "_MOST_FILES", 12)
    (project / "images").mkdir()
    for number in range(20):
        (project / f"images/{number}.png").touch()
    user = UserFolder(project, project / "tmp/drill")
    user.copy(tmp_path / "work")
    assert sorted(message.split(" is ")[0] for message in user.messages) == ["images", "loop"]
    assert _names(tmp_path / "work")[-3:] == ["out", "tmp", "train.py"]


def test_what_is_not_writable_is_linked(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = project / "data"
    monkeypatch.setattr(
        "os.access", lambda path, mode: mode != 2 or not Path(path).is_relative_to(data)
    )
    UserFolder(project, project / "tmp/drill").copy(tmp_path / "work")
    assert (tmp_path / "work/data").is_symlink()
    assert (tmp_path / "work/data/a.txt").read_text() == "data/a.txt"
    assert not (tmp_path / "work/.git").exists()


def test_the_paths_in_arguments_lead_to_the_copy(project: Path) -> None:
    user, copy = UserFolder(project, project / "tmp/drill"), Path("/copy")
    assert user.replaced(f"--data={project}/data", copy) == "--data=/copy/data"
    assert user.replaced(str(project), copy) == "/copy"
    assert user.replaced(f"{project}-2/data", copy) == f"{project}-2/data"


def test_a_trial_links_what_is_too_large_for_its_copy(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working_copies, "_MOST_FILES", 12)
    (project / "loop").unlink()
    (project / ".cache").mkdir()
    (project / "images").mkdir()
    for number in range(20):
        (project / f"images/{number}.png").touch()
    user, copy = UserFolder(project), tmp_path / "work"
    user.copy(copy)
    assert [message.partition(" is ")[0] for message in user.messages] == ["images"]
    assert (copy / "images").is_symlink() and (copy / ".cache").is_symlink()
    assert not (copy / "data").is_symlink() and not (copy / "train.py").is_symlink()
    user.remove_unchanged(copy)
    assert not copy.exists()
    assert len([*(project / "images").iterdir()]) == 20


def test_a_file_that_another_process_removes_does_not_end_a_trial(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "loop").unlink()
    user = UserFolder(project)
    copy2 = shutil.copy2

    def removed(path: Path, copy: Path) -> None:
        if path.name == "a.txt":
            path.unlink()
        copy2(path, copy)

    monkeypatch.setattr(shutil, "copy2", removed)
    user.copy(tmp_path / "work")
    assert (tmp_path / "work/train.py").exists()
    assert not (tmp_path / "work/data/a.txt").exists()


def test_a_copy_keeps_what_the_script_has_written(project: Path, tmp_path: Path) -> None:
    (project / "loop").unlink()
    user, copy = UserFolder(project), tmp_path / "work"
    user.copy(copy)
    (copy / "data/a.txt").write_text("changed by the script")
    (copy / "out/best.pt").write_text("x")
    user.remove_unchanged(copy)
    written = sorted(str(path.relative_to(copy)) for path in copy.rglob("*.*"))
    assert written == ["data/a.txt", "out/best.pt"]
    # The next start has the newer version of each file.
    (project / "train.py").write_text("changed by the user")
    user.copy(copy)
    assert (copy / "data/a.txt").read_text() == "changed by the script"
    assert (copy / "train.py").read_text() == "changed by the user"
    assert (project / "data/a.txt").read_text() == "data/a.txt"


@pytest.mark.parametrize("names", [("lock", "logs/rank-0.log"), ("study.journal",)])
@pytest.mark.parametrize("at", ["runs/r", "runs/s/trial-00000", "r"])
def test_runs_of_trainbox_are_linked_and_may_change(
    project: Path, tmp_path: Path, names: tuple[str, ...], at: str
) -> None:
    (project / "loop").unlink()
    (project / "runs").mkdir()

    def start(run: Path) -> None:
        for name in names:
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).touch()
        (run / "model.safetensors").write_text("x")

    start(project / at)
    user, copy = UserFolder(project, project / "tmp/drill"), tmp_path / "work"
    user.copy(copy)
    assert (copy / at).is_symlink() and (copy / at / "model.safetensors").exists()
    (project / at / "model.safetensors").write_text("longer")
    start(project / f"{at}-new")
    (project / "runs/events.out.tfevents.1").touch()
    assert user.changed() == []
    (project / "runs/best.pt").touch()
    assert user.changed() == ["runs/best.pt"]
