"""The commit of a script's project, also without git."""

import shutil
import subprocess
from pathlib import Path

import pytest

from entrypoint.system.revision import revision

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of a repository with a commit, on a machine without git."""
    monkeypatch.setenv("PATH", "")
    (tmp_path / ".git/refs/heads").mkdir(parents=True)
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".git/refs/heads/main").write_text(f"{_COMMIT}\n")
    (tmp_path / "src").mkdir()
    return tmp_path


def test_without_git_the_commit_is_known_and_the_changes_are_not(project: Path) -> None:
    assert revision(project / "src") == f"{_COMMIT}-unchecked"
    (project / ".git/refs/heads/main").rename(project / ".git/packed")
    assert revision(project) is None  # no commit yet
    packed = f"# pack-refs\n{'f' * 40} refs/heads/other\n{_COMMIT} refs/heads/main\n^{'e' * 40}\n"
    (project / ".git/packed-refs").write_text(packed)
    assert revision(project) == f"{_COMMIT}-unchecked"
    (project / ".git/HEAD").write_text(f"{'a' * 40}\n")
    assert revision(project) == f"{'a' * 40}-unchecked"


@pytest.mark.parametrize("head", [b"", b"\xff", b"ref: ../../secret", b"ref: refs"])
def test_a_damaged_repository_has_no_commit(project: Path, head: bytes) -> None:
    (project.parent / "secret").write_text("a text\n")
    (project / ".git/HEAD").write_bytes(head)
    assert revision(project) is None


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_also_knows_changes(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert revision(tmp_path) is None
    (tmp_path / "train.py").write_text("1\n")
    git("add", "train.py")
    git("commit", "-q", "-m", "First")
    commit = git("rev-parse", "HEAD")
    assert revision(tmp_path) == commit
    (tmp_path / "train.py").write_text("2\n")
    assert revision(tmp_path) == f"{commit}-dirty"
