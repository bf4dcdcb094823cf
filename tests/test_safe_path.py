"""Files in the current folder never run instead of Trainbox, a library or the standard library."""

import ast
import os
import site
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

from entrypoint.system.environment import without_ranks
from tests.support.commands import Ended, clean_environment
from trainbox.processes.environment import own_environment, user_environment
from trainbox.processes.programs import ENTRYPOINT, TRAINER, Program, command_of

ROOT = Path(__file__).parents[1]
TRAINBOX = Path(sys.executable).with_name("trainbox")

MODULES = (
    "trainer trainbox entrypoint statistics random json logging tempfile secrets signal ctypes "
    "runpy site sitecustomize"
)
MODULES += (
    " torch numpy click tqdm PIL scipy sklearn safetensors tensorboard optuna matplotlib "
    "torchvision multiprocessing"
)
LEFT_BY_A_LAUNCHER = {
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "old",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


# The exit code 0 must not hide that a module ran.
_LEAVES_A_MARK = """
import os, sys
with open({marks!r}, "a") as file:
    print(__name__, sys.argv, file=file)
os._exit(0)
"""

Run = Callable[..., Ended]


def runner(tmp_path: Path, hostile: Path, names: str, packages: str, **always: str) -> Run:
    """Return a function that runs the real command beside modules of which none may run."""
    text = _LEAVES_A_MARK.format(marks=str(tmp_path / "marks"))
    for name in names.split():
        (hostile / f"{name}.py").write_text(text)
    for name in packages.split():  # packages come before modules
        (hostile / name).mkdir()
        (hostile / name / "__init__.py").write_text(text)

    def run(*arguments: str, **env: str) -> Ended:
        ended = subprocess.run(
            [TRAINBOX, *arguments],
            cwd=tmp_path,
            env=clean_environment(OMP_NUM_THREADS="1", **always | env),
            capture_output=True,
            text=True,
        )
        assert not (tmp_path / "marks").exists(), (tmp_path / "marks").read_text()
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    return run


_TASK = ("digits", "--device", "cpu", "--max-steps", "1")


def test_no_file_of_the_current_folder_runs_and_no_rank_of_another_job_counts(
    tmp_path: Path,
) -> None:
    """The environment has the variables of a launcher that has ended."""
    run = runner(tmp_path, tmp_path, MODULES, "entrypoint trainer torch", **LEFT_BY_A_LAUNCHER)
    assert '"nproc_per_node": 1' in run("plan", *_TASK).out
    assert "--set width=" in run("tasks", "digits").out
    trained = run("train", *_TASK)
    assert (trained.code, "1 process on the CPU" in trained.out) == (0, True), trained.err


@pytest.mark.parametrize(
    ("program", "words"), [(ENTRYPOINT, ["plan", "--device", "cpu"]), (TRAINER, ["tasks"])]
)
def test_a_package_started_by_hand_drops_the_current_folder(
    tmp_path: Path, program: Program, words: list[str]
) -> None:
    """`python -m entrypoint`, without -P."""
    for name in ("logging", "json", "click", "torch"):
        (tmp_path / f"{name}.py").write_text(
            "raise SystemExit('imported from the current folder: ' + __name__)\n"
        )
    command = [part for part in command_of(program, *words) if part != "-P"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_variables_of_a_rank_are_dropped_and_no_others() -> None:
    kept = {
        "PATH": "/bin",
        "RANKS": "1",
        "NODE_RANK": "1",
        "PET_NODE_RANK": "1",
        "WORLD": "2",
        "SLURM_PROCID": "0",
    }
    assert without_ranks(kept | LEFT_BY_A_LAUNCHER) == kept
    assert without_ranks({"TRAINBOX_RUN": "/home/me/runs/train-114745d8"}) == {}
    assert without_ranks({"TRAINBOX_RUN": "decode"}) == {"TRAINBOX_RUN": "decode"}


@pytest.fixture
def run_with_hostile_path(tmp_path: Path) -> Run:
    """Run the command with a PYTHONPATH of hostile modules and of a module `own` of the user."""
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "own.py").write_text(_TASK_ON_THE_PATH)
    (tmp_path / "script.py").write_text(_SCRIPT)
    names = "trainer trainbox click json statistics torch pynvml"
    return runner(tmp_path, hostile, names, "entrypoint", PYTHONPATH="hostile")


_TASK_ON_THE_PATH = """
import os, sys
from trainer.tasks.digits import Digits
assert os.environ["PYTHONPATH"] == "hostile" and "TRAINBOX_PYTHONPATH" not in os.environ
class Mine(Digits):
    pass
"""
# As under plain Python: the folder comes before the library. The variable has one more folder, for
# the Python processes that the script starts.
_SCRIPT = """
import os, sys
here = os.path.abspath("hostile")
assert sys.path[1] == here, sys.path
assert os.environ["PYTHONPATH"] == "hostile"
assert not {"TRAINBOX_PYTHONPATH", "TRAINBOX_PIPES"} & os.environ.keys()
sys.modules["json"] = None  # the user's would end the script
with open(os.path.join(os.environ["TRAINBOX_RUN"], "a.csv"), "w") as file:
    print("x\\n1", file=file)
print("a script with", sys.argv[1:], flush=True)
"""


@pytest.mark.slow
def test_no_module_on_the_path_runs_instead_of_ours(
    run_with_hostile_path: Run,
) -> None:
    """Neither with run folders that have the names of verbs."""
    run = run_with_hostile_path
    ended = run("train", "own:Mine", *_TASK[1:], "--run", "run", "--runs-dir", ".")
    assert (ended.code, "1 process on the CPU" in ended.out) == (0, True), ended.err
    refused = run("verify", "run", "train")
    assert (refused.code, "does not exist" in refused.err) == (2, True), refused.err
    assert '"nproc_per_node": 1' in run("plan", "own:Mine", "--device", "cpu").out
    # A variable of ours in the user's environment, and a PYTHONPATH with our own packages.
    assert "--set width=" in run("tasks", "digits", TRAINBOX_PYTHONPATH="x").out
    path = os.pathsep.join(["hostile", *site.getsitepackages()])
    assert "--set width=" in run("tasks", "digits", PYTHONPATH=path).out
    script = run("run", "--device", "cpu", "--run", "train", "script.py", "--", "plan")
    assert (script.code, "a script with ['plan']" in script.out) == (0, True), script.err
    words = (sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])")
    program = run(*words, TRAINBOX_BUILD_INFO="/no")  # the image starts programs
    assert (program.code, program.out) == (0, "hostile\n"), program.err


@pytest.mark.slow
def test_no_module_on_the_path_runs_in_a_process_of_torchrun_a_sweep_or_a_drill(
    run_with_hostile_path: Run,
) -> None:
    run, cpu = run_with_hostile_path, ("--device", "cpu")
    two = run("train", "own:Mine", *_TASK[1:], "--processes", "2")
    assert "torchrun DDP over gloo, 2 processes" in two.out, two.err
    script = run("run", "--processes", "2", "script.py", "--", "run")
    assert (script.code, script.out.count("a script with ['run']")) == (0, 2), script.err
    swept = run("sweep", "own:Mine", *_TASK[1:], "--processes", "1", "--seeds", "1")
    assert "trials     1, 1 to do" in swept.out, swept.err
    words = ("--seeds", "2", "--metric", "none", "--", "{seed}")
    scripts = run("sweep", "run", *cpu, "script.py", *words)
    assert scripts.code == 0, scripts.err
    drilled = run("drill", "run", "--compare", "a.csv", "--gpus", "0", "script.py")
    assert "undisturbed" in drilled.out, drilled.err
    assert run("health", "--deep", "--processes", "2").code == 0


def test_an_environment_of_our_own_gives_back_the_user_s() -> None:
    for users in ({"A": "1"}, {"A": "1", "PYTHONPATH": "/p:q", "PYTHONSAFEPATH": "1"}):
        own = own_environment(users)
        assert own["PYTHONPATH"].split(os.pathsep) == sys.path
        assert own_environment(own) == own
        assert user_environment(own) == user_environment(users) == users


def _starts(tree: ast.AST) -> Iterator[str]:
    """Yield the lists of arguments that start Python without -P."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.List | ast.Tuple):
            continue
        parts = [
            part.value if isinstance(part, ast.Constant) else ast.unparse(part)
            for part in node.elts
        ]
        for part, following in zip_longest(parts, parts[1:]):
            # `-m --` is torchrun's own option, and torchrun.py gives its ranks -P.
            if (part == "sys.executable" and following != "-P") or (
                part == "-m" and "-P" not in parts and following != "--"
            ):
                yield ast.unparse(node)


# A user's own script runs as under plain Python, and `trainbox run` has an option -m.
_OF_SCRIPTS = (
    *("entrypoint/script/target.py", "entrypoint/script/python.py", "entrypoint/cli/drill.py"),
    *("trainer/sweep/trial_work.py", "trainbox/disclosure/suggested_commands.py"),
)


@pytest.mark.parametrize("folder", ["entrypoint", "trainbox", "trainer", "benchmarks"])
def test_every_start_of_python_keeps_the_current_folder_out(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {start}"
        for path in (ROOT / folder).rglob("*.py")
        for start in _starts(ast.parse(path.read_text(encoding="utf-8")))
        if str(path.relative_to(ROOT)) not in _OF_SCRIPTS
    ]
    assert found == []
