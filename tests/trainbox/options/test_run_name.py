"""The name of a run: one for each command, and the same one with and without `trainbox run`."""

import json
import subprocess
import sys

import pytest

from entrypoint.script.target import Target
from tests.support.commands import Trainbox, clean_environment
from trainbox.options.run_name import array_task, run_name, script_label
from trainer.sweep.script_template import Script

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


@pytest.mark.parametrize(
    "scheduler",
    ["SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "SGE_TASK_ID", "LSB_JOBINDEX"],
)
def test_each_task_of_an_array_trains_in_its_own_folder(forked: Trainbox, scheduler: str) -> None:
    """The script skips what is done, as a script does that resumes."""
    (forked.folder / "train.py").write_text(
        "import os, pathlib, sys\n"
        "done = pathlib.Path(os.environ['TRAINBOX_RUN'], 'result')\n"
        f"if not done.exists(): done.write_text(os.environ['{scheduler}'])\n"
        "print(done.read_text())\n"
    )
    first, second, again = (
        forked("run", "--device", "cpu", "train.py", env={scheduler: task})
        for task in ("1", "2", "1")
    )
    assert (first.out, second.out, again.out) == ("1\n", "2\n", "1\n"), second.err
    runs = sorted(path.name for path in (forked.folder / "runs").iterdir())
    name = run_name("train.py", False, [], {})
    assert runs == [f"{name}-array-1", f"{name}-array-2"]


@pytest.mark.parametrize(
    ("env", "task"),
    [
        ({"SLURM_ARRAY_TASK_ID": "0"}, 0),
        ({"SGE_TASK_ID": "undefined"}, None),
        ({"LSB_JOBINDEX": "0"}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        ({"SLURM_ARRAY_TASK_ID": ""}, None),
        ({"SLURM_ARRAY_TASK_ID": "3", "SGE_TASK_ID": "undefined"}, 3),
    ],
)
def test_the_number_of_a_task_of_an_array(env: dict[str, str], task: int | None) -> None:
    assert array_task(env) == task
