"""`--on-resume`: arguments that a script gets only when there is something to resume."""

import re
from pathlib import Path

import pytest

from entrypoint.script.on_resume import for_rank, with_resume
from tests.support.commands import Trainbox
from trainbox.errors import WrongUse

# Fails with --resume and without the file, as most scripts do.
SCRIPT = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--resume")
given = parser.parse_args()
step = json.load(open(given.resume))["step"] if given.resume else 0
print("from step", step, flush=True)
json.dump({"step": step + 1}, open(f"{given.out}/last.pt", "w"))
sys.exit(0 if step == 2 else 75)
"""


@pytest.mark.parametrize("form", ["--resume {run}/last.pt", "--resume={run}/last.pt"])
def test_a_script_that_needs_the_file_resumes_by_the_same_command(
    trainbox: Trainbox, form: str
) -> None:
    (trainbox.folder / "train.py").write_text(SCRIPT)
    words = ("run", "--device", "cpu", "--restarts", "2", "--on-resume", form, "train.py")
    ended = trainbox(*words, "--", "--out", "{run}")
    assert ended.code == 0, ended.err
    assert re.findall("from step (.)", ended.out) == ["0", "1", "2"]
    assert len(re.findall("trainbox: the script gets --resume.*last.pt: the file", ended.err)) == 2


def test_all_files_must_exist_and_other_arguments_are_added_too(tmp_path: Path) -> None:
    option = for_rank("--model {run}/a --state={run}/b --strict 'two words'", tmp_path)
    (tmp_path / "a").touch()
    assert with_resume([option, "python", "x.py", "-e", "3"]) == ["python", "x.py", "-e", "3"]
    (tmp_path / "b").mkdir()
    added = ["--model", f"{tmp_path}/a", f"--state={tmp_path}/b", "--strict", "two words"]
    assert with_resume([option, "python", "x.py"]) == ["python", "x.py", *added]
    assert with_resume(["python", "--on-resume=x"]) == ["python", "--on-resume=x"]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("--resume {run}/last.pt", "/runs/r/last.pt of --on-resume does not exist"),
        (
            "--resume={run}/*.json",
            "/runs/r/*.json of --on-resume does not exist; patterns are not expanded",
        ),
        ("--a=./x.pt --strict {run}/none.pt", " --strict {run}/none.pt: ./x.pt of --on-resume"),
        ("--resume {run}/manifest.json", None),
    ],
)
def test_a_later_start_names_the_file_that_is_missing(
    forked: Trainbox, text: str, end: str | None
) -> None:
    (forked.folder / "train.py").write_text("print('new')")
    words = ("run", "--device", "cpu", "--run", "r", "--on-resume", text, "train.py")
    assert "begins again" not in forked(*words).err
    again = forked(*words)
    lines = [line for line in again.err.splitlines() if "the script begins again" in line]
    assert (again.code, len(lines)) == (0, int(end is not None)), again.err
    if end:
        assert end.replace("{run}", f"{forked.folder}/runs/r") in lines[0]


def test_a_restart_names_the_file_that_is_missing(forked: Trainbox) -> None:
    (forked.folder / "train.py").write_text("raise SystemExit(75)")
    words = (
        "run",
        "--device",
        "cpu",
        "--run",
        "r",
        "--restarts",
        "1",
        "--on-resume",
        "--r {run}/a",
    )
    assert forked(*words, "train.py").err.count("the script begins again without --r /") == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--resume", "names no file"),
        ("--resume last.pt", "names no file"),
        ("--resume '{run}/last.pt", "No closing quotation"),
    ],
)
def test_a_wrong_value_is_refused_before_the_start(text: str, problem: str) -> None:
    with pytest.raises(WrongUse, match=problem):
        for_rank(text, Path("r"))
