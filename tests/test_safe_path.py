"""Files in the current folder never run instead of Trainbox, a library or the standard library."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

from entrypoint.system.commands import check_packages, command_of, without_ranks
from tests.support.commands import clean_environment
from tests.support.paths import files_of
from trainbox.contract.errors import WrongUse

ROOT = Path(__file__).parents[1]
TRAINBOX = Path(sys.executable).with_name("trainbox")

MODULES = (
    "trainer trainbox entrypoint statistics random json logging tempfile secrets signal ctypes "
    "runpy site sitecustomize"
)
MODULES += (
    " torch numpy click tqdm PIL sklearn safetensors tensorboard optuna matplotlib torchvision "
    "multiprocessing"
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


Run = Callable[..., str]


@pytest.fixture
def run_among_hostile_files(tmp_path: Path) -> Run:
    """Run the real command in a folder of modules that leave a mark and fail.

    Its environment has the variables of a launcher that has ended.
    """
    fails = (
        "open({mark!r}, 'w').close()\nraise SystemExit('imported from the current folder: ' "
        "+ __name__)\n"
    )
    for name in MODULES.split():
        (tmp_path / f"{name}.py").write_text(fails.format(mark=str(tmp_path / f"ran-{name}")))
    for name in ("entrypoint", "trainer", "torch"):  # packages come before modules
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            fails.format(mark=str(tmp_path / f"ran-{name}-package"))
        )

    def run(*arguments: str) -> str:
        ended = subprocess.run(
            [TRAINBOX, *arguments],
            cwd=tmp_path,
            env=clean_environment(**LEFT_BY_A_LAUNCHER, OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert [path.name for path in tmp_path.glob("ran-*")] == []
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run


_TASK = ("digits", "--device", "cpu", "--max-steps", "1")


def test_no_file_of_the_current_folder_runs_and_no_rank_of_another_job_counts(
    run_among_hostile_files: Run,
) -> None:
    run = run_among_hostile_files
    assert '"nproc_per_node": 1' in run("plan", *_TASK)
    assert "--set width=" in run("tasks", "digits")
    assert "1 process on the CPU" in run("train", *_TASK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_file_of_the_current_folder_runs_in_torchrun_verify_or_sweep(
    run_among_hostile_files: Run,
) -> None:
    run = run_among_hostile_files
    for name, processes, text in (
        ("one", 1, "1 process on the CPU"),
        ("two", 2, "torchrun DDP over gloo, 2 processes"),
    ):
        words = ("--run", name, "--shards", "2", "--processes", str(processes))
        assert text in run("train", *_TASK, *words)
    assert "SAME BITS" in run("verify", "runs/two", "--device", "cpu")
    assert "SAME BITS" in run("verify", "runs/one", "runs/two")
    assert "trials     1, 1 to do" in run("sweep", *_TASK, "--processes", "1")


@pytest.mark.parametrize(
    ("module", "words"), [("entrypoint", ["plan", "--device", "cpu"]), ("trainer", ["tasks"])]
)
def test_a_package_started_by_hand_drops_the_current_folder(
    tmp_path: Path, module: str, words: list[str]
) -> None:
    """`python -m entrypoint`, without -P."""
    for name in ("logging", "json", "click", "torch"):
        (tmp_path / f"{name}.py").write_text(
            "raise SystemExit('imported from the current folder: ' + __name__)\n"
        )
    command = [part for part in command_of(module, *words) if part != "-P"]
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


def test_the_run_folder_of_a_script_is_not_the_name_of_a_run() -> None:
    assert without_ranks({"TRAINBOX_RUN": "/home/me/runs/train-114745d8"}) == {}
    assert without_ranks({"TRAINBOX_RUN": "decode"}) == {"TRAINBOX_RUN": "decode"}


def test_a_package_that_would_replace_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").touch()
    check_packages([*sys.path, str(tmp_path)])
    with pytest.raises(
        WrongUse,
        match=rf"^{tmp_path}/trainer.py has the name of Trainbox's own package trainer "
        r".*: rename it",
    ):
        check_packages([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [*command_of("entrypoint"), "plan"],
        env=clean_environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith(f"trainbox: {tmp_path}/trainer.py has the name of")


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
    *("entrypoint/script/target.py", "entrypoint/cli/drill.py"),
    *("trainer/sweep/work.py", "trainbox/contract/hints.py"),
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


def test_the_rule_finds_an_unsafe_start() -> None:
    unsafe = [
        "run([sys.executable, '-m', 'trainer'])",
        "(python, '-u', '-m', 'trainer')",
        "[sys.executable, *arguments]",
    ]
    safe = ["[sys.executable, '-P', '-m', 'trainer']", "['torchrun', '-m', '--', 'trainer']"]
    assert [bool(list(_starts(ast.parse(text)))) for text in unsafe + safe] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_other_files_start_modules_with_p() -> None:
    files = [
        ROOT / name
        for name in (
            "Makefile",
            "Dockerfile",
            "docker-compose.yml",
            "docker-compose.cpu.yml",
            ".ci/run",
        )
    ]
    files += files_of(ROOT / "deploy")
    unsafe = re.compile(r"(?:python[\d.]*|PYTHON\))[\"']?\s+-m\b")
    assert [
        f"{path}: {line}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if unsafe.search(line)
    ] == []
    assert os.access(TRAINBOX, os.X_OK)
