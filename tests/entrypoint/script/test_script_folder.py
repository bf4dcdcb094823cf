"""Run folders that are damaged, odd or gone: the user reads why, and no code is lost."""

import contextlib
import dataclasses
import json
import shutil
import signal
from pathlib import Path

import pytest

from entrypoint.launch.stopping import Fault
from entrypoint.script.script_folder import ScriptFolder
from entrypoint.script.script_run import _fault
from entrypoint.script.target import Target
from tests.support.commands import Trainbox

ONE = ("run", "--run", "r")
CONFIG = '{"kind": "script", "script": "train.py", "is_module": false}'


def opened(path: Path) -> ScriptFolder:
    return ScriptFolder(path, Target("train.py", ()), writes=True)


def test_a_removed_current_folder_does_not_hide_the_code(forked: Trainbox) -> None:
    script, here = forked.folder / "train.py", forked.folder / "here"
    script.write_text("import os, sys; os.rmdir(os.getcwd()); sys.exit(9)")
    here.mkdir()
    inside = dataclasses.replace(forked, folder=here)
    ended = inside(*ONE, "--runs-dir", str(forked.folder / "runs"), str(script))
    assert ended.code == 9, ended.err
    assert f"run        {forked.folder}/runs/r\n" in ended.err


@pytest.mark.parametrize(
    ("printed", "recorded"),
    [
        ('{"step": 1, "loss": NaN}', {"loss": None}),
        ('{"step": 1, "loss": [0.5, -Infinity, 1e999]}', {"loss": [0.5, None, None]}),
        ('{"step": 1, "val": {"auc": NaN, "f1": 1}}', {"val": {"auc": None, "f1": 1}}),
    ],
)
def test_values_that_are_not_finite_are_recorded_as_null(
    forked: Trainbox, printed: str, recorded: dict[str, object]
) -> None:
    (forked.folder / "train.py").write_text(f"print({printed!r})")
    ended = forked(*ONE, "--device", "cpu", "train.py")
    assert (ended.code, ended.out) == (0, f"{printed}\n")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (line,) = (forked.folder / "runs/r/metrics.jsonl").read_text().splitlines()
    entry = json.loads(line, parse_constant=refuse)
    assert entry == {"step": 1, "kind": "train", "time_unix_s": entry["time_unix_s"], **recorded}


def test_a_run_shows_the_arguments_of_its_newest_start(forked: Trainbox) -> None:
    """A result of --lr 0.9 must not stand beside --lr 0.1."""
    text = "import sys; print('{\"step\": 1, \"acc\": ' + sys.argv[-1] + '}')"
    (forked.folder / "train.py").write_text(text)
    said = [
        "other arguments" in forked(*ONE, "--device", "cpu", "train.py", "--", "--lr", lr).err
        for lr in ("0.1", "0.9", "0.9")
    ]
    assert said == [False, True, False]
    (run,) = json.loads(forked("runs", "--json").out)
    assert (run["settings"], run["metric"]) == ({"lr": "0.9"}, {"acc": 0.9})
    starts = json.loads((forked.folder / "runs/r/manifest.json").read_text())["starts"]
    assert [start["arguments"][-1] for start in starts] == ["0.1", "0.9", "0.9"]


_KILLS_THE_COMMAND = """
import os, signal, sys, time
if sys.argv[1] == "1":
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
"""


def test_a_start_that_was_killed_with_the_command_is_recorded(forked: Trainbox) -> None:
    (forked.folder / "train.py").write_text(_KILLS_THE_COMMAND)
    ends = [forked(*ONE, "--device", "cpu", "train.py", "--", word).code for word in "12"]
    assert ends == [-signal.SIGKILL, 0]
    starts = json.loads((forked.folder / "runs/r/manifest.json").read_text())["starts"]
    assert [(start["arguments"], start.get("exit_code")) for start in starts] == [
        (["1"], None),
        (["2"], 0),
    ]


def test_a_command_that_starts_nothing_changes_no_start(forked: Trainbox) -> None:
    (forked.folder / "train.py").write_text(_KILLS_THE_COMMAND)
    command = (*ONE, "--trial", "--device", "cpu", "train.py", "--", "1")
    assert forked(*command).code == -signal.SIGKILL
    shutil.rmtree(forked.folder / "runs/r/work", ignore_errors=True)
    (forked.folder / "runs/r/work").touch()
    assert forked(*command).code == 4
    (start,) = json.loads((forked.folder / "runs/r/manifest.json").read_text())["starts"]
    assert "exit_code" not in start


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_damaged_config_is_named(forked: Trainbox, text: str) -> None:
    (forked.folder / "runs/r").mkdir(parents=True)
    (forked.folder / "runs/r/config.json").write_text(text)
    (forked.folder / "train.py").touch()
    ended = forked(*ONE, "train.py")
    assert (ended.code, "runs/r/config.json is damaged: choose another" in ended.err) == (2, True)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"sources": {}, "starts": 3}',
        '{"sources": [], "starts": []}',
    ],
)
def test_a_damaged_manifest_begins_again(forked: Trainbox, text: str) -> None:
    (forked.folder / "runs/r").mkdir(parents=True)
    (forked.folder / "runs/r/config.json").write_text(CONFIG)
    (forked.folder / "runs/r/manifest.json").write_text(text)
    (forked.folder / "train.py").write_text("raise SystemExit(9)")
    ended = forked(*ONE, "train.py")
    assert ended.code == 9
    assert "trainbox: runs/r/manifest.json was damaged: it begins again\n" in ended.err
    (start,) = json.loads((forked.folder / "runs/r/manifest.json").read_text())["starts"]
    assert start["exit_code"] == 9


@pytest.mark.parametrize("before", ["", '{"step": 1}\n', '{"step": 1}\n{"st', "{"])
def test_an_entry_has_a_line_of_its_own_after_a_kill(tmp_path: Path, before: str) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "metrics.jsonl").write_text(before)
    folder = opened(tmp_path)
    folder.report({"step": 2})
    folder.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[:-1] == before.splitlines()
    assert json.loads(lines[-1])["step"] == 2


def test_lost_entries_are_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = opened(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    for step in range(3):
        folder.report({"step": step})
    folder.close()
    (line,) = capsys.readouterr().err.splitlines()
    lost = f"trainbox: entries are lost: cannot write {tmp_path}/metrics.jsonl: Is a directory "
    assert line.startswith(lost)


def test_a_script_that_cannot_start_leaves_no_folder(forked: Trainbox) -> None:
    path = forked.folder / "train.py"
    path.write_text("def (")
    assert "invalid syntax" in forked("run", "--run", "r", "train.py").err
    assert not (forked.folder / "runs/r").exists()
    path.write_text("")
    assert forked("run", "--run", "r", "train.py").code == 0
    path.write_text("def (")
    assert "invalid syntax" in forked("run", "--run", "r", "train.py").err
    assert (forked.folder / "runs/r/config.json").exists()


def test_the_newest_value_is_found_before_a_damaged_line(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.report({"step": 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("[" * 20_000 + '\n{"torn')
    assert folder.newest("step") == 2
    folder.close()


def test_a_script_whose_folder_another_process_has_taken_ends_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainbox.folders.lease.RENEW_S", 0)
    with contextlib.closing(opened(tmp_path / "r")) as folder:
        assert _fault(folder, lambda: None) is None
        assert _fault(folder, lambda: "it hangs") == Fault("it hangs", 7)
    folder = opened(tmp_path / "r")
    (tmp_path / "r/lock").write_text('{"host": "another"}\n')
    fault = _fault(folder, lambda: "it hangs")
    assert fault is not None and fault.code == 2
    assert "or the file lock was removed or replaced" in fault.what
