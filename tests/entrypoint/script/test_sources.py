"""The commit, the changes and the untracked texts of a script, in the record of its run."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from entrypoint.script.sources import Sources
from tests.support.commands import Trainbox

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def _run(forked: Trainbox, *words: str, **env: str) -> tuple[dict[str, Any], str]:
    ended = forked("run", "--run", "r", *words, env=env)
    assert ended.code == 0, ended.err
    return json.loads((forked.folder / "runs/r/manifest.json").read_text()), ended.err


@pytest.fixture
def project(forked: Trainbox) -> Trainbox:
    """Return a `trainbox` in the repository of a project, in which all is committed."""
    folder = forked.folder
    (folder / "train.py").write_text("import near\n")
    (folder / "near.py").write_text("x = 1\n")
    (folder / "settings.yaml").write_text("lr: 0.1\n")
    _git(folder, "init", "-q")
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "First")
    return forked


def _git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _texts(project: Trainbox) -> dict[str, str]:
    folder = project.folder / "runs/r/sources"
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_a_commit_has_its_digest_and_needs_no_text(project: Trainbox) -> None:
    manifest, _ = _run(project, "train.py")
    assert len(manifest["revision"]) == 40
    script = (project.folder / "train.py").read_bytes()
    assert manifest["sources"] == {"train.py": _digest(script)}
    assert _texts(project) == {}


def test_changes_and_untracked_texts_restore_what_was_started(
    project: Trainbox, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = project.folder
    (folder / "near.py").write_bytes(b"x = 2\r\n# \xff\n \n")
    (folder / "more").mkdir()
    (folder / "more/new.py").write_text("y = 1\n")
    (folder / "weights.bin").write_bytes(b"data")
    (folder / "env").mkdir()
    for name in ("env/pyvenv.cfg", "env/package.py", "big.py"):
        (folder / name).write_text("#" * (2**21 if name == "big.py" else 1))
    manifest, _ = _run(project, "train.py")
    assert manifest["revision"].endswith("-dirty")
    assert set(manifest["sources"]) == {"train.py", "changes.diff", "more/new.py"}
    clone = tmp_path_factory.mktemp("clone")
    _git(clone, "clone", "-q", str(folder), ".")
    _git(clone, "apply", str(folder / "runs/r/sources/changes.diff"))
    assert (clone / "near.py").read_bytes() == (folder / "near.py").read_bytes()
    copy = folder / "runs/r/sources/more/new.py"
    assert copy.read_text() == "y = 1\n"
    assert manifest["sources"]["more/new.py"] == _digest(copy.read_bytes())
    # The second start does not take the records of the first one for sources.
    manifest, err = _run(project, "train.py")
    assert set(manifest["sources"]) == {"train.py", "changes.diff", "more/new.py"}
    assert "changed since" not in err


@pytest.mark.parametrize("git", ["none", "no commit", "ignored"])
def test_a_script_that_no_commit_has_is_copied(project: Trainbox, git: str) -> None:
    folder = project.folder
    if git != "ignored":
        shutil.rmtree(folder / ".git")
    if git == "no commit":
        _git(folder, "init", "-q")
        _git(folder, "add", "train.py")
    (folder / ".gitignore").write_text("own.py\n")
    (folder / "own.py").write_text("print(1)\n")
    manifest, _ = _run(project, "own.py")
    assert manifest["sources"]["own.py"] == _digest(b"print(1)\n")
    assert _texts(project)["own.py"] == "print(1)\n"


def test_a_module_has_the_digest_of_its_file(project: Trainbox) -> None:
    manifest, _ = _run(project, "-m", "near")
    assert manifest["sources"] == {"near.py": _digest(b"x = 1\n")}


def test_texts_of_settings_have_no_secrets(project: Trainbox) -> None:
    (project.folder / "settings.yaml").write_text("lr: 0.1\napi_key: abc-123-def\n")
    (project.folder / "more.yaml").write_text("width: 3\napi_key: abc-123-def\n")
    _run(project, "train.py")
    texts = _texts(project)
    assert "+api_key: " in texts["changes.diff"] and "width: 3\n" in texts["more.yaml"]
    assert "abc-123-def" not in "".join(texts.values())


def test_what_was_changed_between_two_starts_is_named(project: Trainbox) -> None:
    _run(project, "train.py")
    (project.folder / "train.py").write_text("import near  # changed\n")
    manifest, err = _run(project, "train.py")
    changed = ["changes.diff", "revision", "train.py"]
    assert f"changed since an earlier start: {', '.join(changed)}\n" in err
    assert [start.get("changed") for start in manifest["starts"]] == [None, changed]
    _, err = _run(project, "train.py")
    assert "changed since" not in err
    path = project.folder / "runs/r/manifest.json"
    path.write_text(json.dumps(manifest | {"python": "3.8.0"}))
    manifest, err = _run(project, "train.py")
    assert "changed since an earlier start: python\n" in err
    assert manifest["starts"][-1]["changed"] == ["python"]


def test_the_texts_are_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"a.py": b"x" * 600_000, "b.py": b"x" * 600_000, "c.py": b"x"}
    Sources(None, {}, texts).write(tmp_path)
    assert {path.name for path in (tmp_path / "sources").iterdir()} == {"a.py", "c.py"}
    lacks = f"{tmp_path}/sources lacks b.py and longer files (more than 1 MiB)"
    assert lacks in capsys.readouterr().err
