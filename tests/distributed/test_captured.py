"""Captured steps on one to three processes, of all built-in tasks, through kills and resumes.

A stand-in for CUDA graphs, tests/support/recorded_graph.py, records the steps.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import wait_until
from tests.support.kinds import slow_but
from tests.support.ranks import Ranks
from tests.support.task_digests import CASES, write_data

STAND_IN = "tests.support.recorded_graph"
# A task whose steps cannot be captured, and why.
EAGER = {
    "teacher_student, gnc": "eager: GuessAndCheck is neither fused nor capturable",
}
_AUGMENTED = ("digits_augmented", "--shards", "3", "--accumulation", "2", "--clip-norm", "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


def _train(ranks: Ranks, processes: int, *words: str, capture: str = "auto") -> Any:
    return ranks.train(processes, *words, "--rehearsal", "--capture", capture, module=STAND_IN)


def _row(out: str) -> str:
    (row,) = [line for line in out.splitlines() if line.startswith("step  ")]
    return row.removeprefix("step").strip()


# One of each kind of step: batch norm, several optimizers, no capture, attention.
_FAST = ("digits_augmented, 2 epochs", "ssvae", "teacher_student, gnc", "text")


@pytest.mark.parametrize("case", slow_but(_FAST, CASES))
def test_each_task_has_the_bits_of_eager_steps(ranks: Ranks, data: Path, case: str) -> None:
    task, fields, options = CASES[case]
    if "--processes" in options:
        pytest.skip("the next test has several processes")
    words = [task, *options, "--data-dir", str(data)]
    if "--max-steps" in words:
        words[words.index("--max-steps") + 1] = "9"
    for name, value in fields.items():
        words += ["--set", f"{name}={value}"]
    captured = _train(ranks, 1, *words, "--run", "captured")
    eager = _train(ranks, 1, *words, "--run", "eager", capture="off")
    assert _row(captured.out) == EAGER.get(case, "captured as CUDA graphs")
    assert captured.digest == eager.digest != ""


@pytest.mark.parametrize("processes", slow_but([2], [1, 2, 3]))
def test_each_number_of_processes_has_the_same_bits(ranks: Ranks, processes: int) -> None:
    words = (*_AUGMENTED, "--max-steps", "12", "--log-steps", "3")
    captured = _train(ranks, processes, *words, "--run", "captured")
    assert _row(captured.out) == "captured as CUDA graphs"
    assert captured.digest == _train(ranks, 1, *words, "--run", "eager", capture="off").digest


@pytest.mark.parametrize("number", slow_but([signal.SIGKILL], [signal.SIGTERM, signal.SIGKILL]))
def test_a_resume_on_another_number_of_processes_has_the_same_bits(
    ranks: Ranks, number: signal.Signals
) -> None:
    words = (*_AUGMENTED, "--max-steps", "60", "--checkpoint-steps", "4", "--log-steps", "1")
    options = ("--run", "stopped", "--rehearsal", "--capture", "auto")
    started = ranks.start(2, "train", *words, *options, module=STAND_IN)
    wait_until(lambda: len(ranks.entries("stopped", "train")) >= 9, started)
    started.send_signal(number)
    started.wait()
    resumed = _train(ranks, 3, *words, "--run", "stopped")
    assert "from step" in resumed.out
    assert _row(resumed.out) == "captured as CUDA graphs"
    assert resumed.digest == _train(ranks, 1, *words, "--run", "eager", capture="off").digest
