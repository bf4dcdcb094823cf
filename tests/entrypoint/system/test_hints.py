"""The launcher's messages recommend commands in the form that works for the user."""

import re
from pathlib import Path

import pytest

from trainbox.commands.command_page import check_names
from trainbox.disclosure.suggested_commands import command, from_here, runs_dir
from trainbox.errors import WrongUse

COMPOSE = "docker compose run --rm --no-deps train"
_ROOT = Path(__file__).parents[3]


_ASKED = (
    ("health", ""),
    ("bench", "--help"),
    ("verify", "r"),
    ("verify", "a b"),
    ("run", "a.py"),
    ("run", "a.py -- --lr 1"),
)
# fmt: off
_COMMANDS = {
    "": ("trainbox health", "trainbox bench --help", "trainbox verify r", "trainbox verify a b",
         "trainbox run a.py", "trainbox run a.py -- --lr 1"),
    "make": ("make health", 'make bench ARGS="--help"', "make verify RUN=r",
             'make verify RUN=a ARGS="b"', "make run SCRIPT=a.py",
             'make run SCRIPT=a.py ARGS="--lr 1"'),
    COMPOSE: (*(f"{COMPOSE} {verb} {arguments}".rstrip() for verb, arguments in _ASKED[:4]),
              "docker compose run --rm --no-deps run a.py",
              "docker compose run --rm --no-deps run a.py -- --lr 1"),
}
# fmt: on


@pytest.mark.parametrize("typed", _COMMANDS)
def test_a_command_has_the_form_that_was_typed(monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    monkeypatch.setenv("TRAINBOX_COMMAND", typed)
    assert tuple(command(*asked) for asked in _ASKED) == _COMMANDS[typed]
    assert runs_dir() == ("RUNS_DIR" if typed else "--runs-dir")


def test_messages_recommend_the_make_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINBOX_COMMAND", "make")
    with pytest.raises(WrongUse, match=r'`make train ARGS="--help"` lists the settings'):
        check_names(["TRAINBOX_API_KEY"], {"TRAINBOX_EPOCHS"})


def test_every_recommended_command_comes_from_hints() -> None:
    """Help pages are exempt, because they document `trainbox`. An f-string is a message."""
    spelled = re.compile(r'f"[^"]*trainbox (train|run|plan|sweep|drill|bench|verify|health)\b')
    files = [path for path in (_ROOT / "entrypoint").rglob("*.py") if path.name != "hints.py"]
    assert [path.name for path in files if spelled.search(path.read_text())] == []


def test_a_path_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    shown = [from_here(Path(name)) for name in ("a/b.py", "../b.py", "../here/b.py", "/b.py")]
    assert shown == ["a/b.py", str(tmp_path.resolve() / "b.py"), "b.py", "/b.py"]
