"""The commit of a script's project, also without git."""

import shutil
import subprocess
from pathlib import Path

import pytest

from entrypoint.system.revision import revision

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


_LINE = f"{'0' * 40} {_COMMIT} M\xfcller <a@b.example> 1700000000 +0100\tcommit: First\n"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (_LINE.replace(_COMMIT, "f" * 40) + _LINE, f"{_COMMIT}-unchecked"),
        (_LINE + "a line that is damaged", None),
        (None, None),
    ],
)
def test_without_git_the_commit_is_known_and_the_changes_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str | None, expected: str | None
) -> None:
    monkeypatch.setenv("PATH", "")
    (tmp_path / ".git/logs").mkdir(parents=True)
    (tmp_path / "src").mkdir()
    if log is not None:
        (tmp_path / ".git/logs/HEAD").write_bytes(log.encode("latin-1"))
    assert revision(tmp_path / "src") == expected


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_also_knows_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with monkeypatch.context() as without_git:
        without_git.setenv("PATH", "")
        assert revision(tmp_path) == f"{commit}-unchecked"
    (tmp_path / "train.py").write_text("2\n")
    assert revision(tmp_path) == f"{commit}-dirty"
