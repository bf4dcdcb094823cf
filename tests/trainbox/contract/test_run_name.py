"""The name of a run: one for each command, and the same one with and without `trainbox run`."""

import json
import subprocess
import sys

import pytest

from entrypoint.script.target import Target
from tests.support.commands import Trainbox, clean_environment
from trainbox.contract.run_name import run_name, script_label
from trainer.sweep.script import Script

_PRINTS = "import trainbox; print(trainbox.run_folder())"


@pytest.mark.parametrize(
    ("script", "is_module", "label"),
    [
        ("project/train.py", False, "train"),
        ("train.v2.py", False, "train.v2"),
        ("my_package.train", True, "train"),
        ("my_package", True, "my_package"),
        ("my_package/__main__.py", False, "my_package"),
        ("./run it!.sh", False, "run-it"),
        (".py", False, "py"),
        ("\u00e4\u00f6.py", False, "script"),
    ],
)
def test_the_label_of_a_script(script: str, is_module: bool, label: str) -> None:
    assert script_label(script, is_module) == label
    assert Script(script, is_module, ()).label == label
    name = Target(script, ("--lr", "1"), is_module).run_name()
    assert name == run_name(script, is_module, ["--lr", "1"])
    assert name.startswith(f"{label}-")


@pytest.mark.parametrize("words", [["train.py"], ["train.py", "--lr", "1"], ["-m", "pack.fit"]])
def test_python_and_trainbox_run_have_the_same_folder(forked: Trainbox, words: list[str]) -> None:
    (forked.folder / "pack").mkdir()
    for name in ("train.py", "pack/fit.py"):
        (forked.folder / name).write_text(_PRINTS)
    alone = subprocess.run(
        [sys.executable, *words],
        cwd=forked.folder,
        env=clean_environment(TRAINBOX_RUNS_DIR="my_runs"),
        check=True,
        capture_output=True,
        text=True,
    )
    words = [*words[:2], "--", *words[2:]] if words[0] == "-m" else words
    plan = forked("plan", "run", *words, env={"TRAINBOX_RUNS_DIR": "my_runs"})
    assert json.loads(plan.out)["env"]["TRAINBOX_RUN"] == alone.stdout.strip()
