"""Sweeps whose workers train, die and are replaced.

Most sweeps here are forked, workers included; four tests start the real `trainbox sweep`.
"""

import csv
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Ended, Trainbox, clean_environment, finish, logged, wait_until
from tests.support.here import Here, board_of
from tests.support.paths import ROOT
from tests.support.ranks import Ranks, StartedRanks
from tests.trainer.sweep.conftest import claimed
from tests.trainer.sweep.tasks import HELD_STEP
from trainbox.errors import Stopped, WrongUse
from trainbox.folders.lease import Lease
from trainbox.options.config import Config
from trainbox.processes.environment import LaunchFacts
from trainer.records.jsonl import read_entries
from trainer.sweep.call import show
from trainer.sweep.grid import Record, Sweep, Trial, trial_folder
from trainer.sweep.runner import SweepRun
from trainer.sweep.slots import Slot, exit_cause, last_output
from trainer.sweep.study import open_study
from trainer.sweep.trial_work import task_work
from trainer.system.signals import StopRequest

_BRITTLE = "tests.trainer.sweep.tasks:Brittle"
# The same by its file, whose fields the launcher reads without an import of torch.
_BRITTLE_FILE = f"{ROOT}/tests/trainer/sweep/tasks.py:Brittle"
_ENV = {"PYTHONPATH": str(ROOT)}


def _records(folder: Path) -> list[Record]:
    """Return the trials of the sweep "s", or none if it is not started yet."""
    try:
        return open_study(folder / "runs/s", None).records()
    except (FileNotFoundError, WrongUse):
        return []


def _states(folder: Path) -> list[str]:
    return [record.state for record in _records(folder)]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _slots(device: str, slots: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with the slots of a sweep: their names, each with its GPU."""
    return LaunchFacts(device, slots=tuple(slots.items())).variable()


@dataclass
class Sweeps:
    """A function that runs the sweep "s" of a task in forks."""

    ranks: Ranks

    @property
    def folder(self) -> Path:
        return self.ranks.folder

    def start(
        self,
        *arguments: str,
        task: str = _BRITTLE,
        slots: Mapping[str, str] | int = 2,
        env: Mapping[str, str] | None = None,
    ) -> StartedRanks:
        """Start a sweep on slots by name with their GPU, or on so many CPU slots."""
        if isinstance(slots, int):
            slots = {f"CPU slot {number}": "" for number in range(slots)}
        variables = {**_slots("cpu", slots), **(env or {})}
        return self.ranks.start(
            1, "sweep", task, "--name", "s", "--no-rehearsal", *arguments, env=variables
        )

    def __call__(self, *arguments: str, **options: Any) -> Ended:
        """Run a sweep to its end."""
        return self.end(self.start(*arguments, **options))

    def end(self, started: StartedRanks) -> Ended:
        """Wait for the end of a sweep."""
        ended = started.wait()
        return Ended(ended.codes[0], ended.outs[0], ended.errs[0])

    def trained(self) -> list[str]:
        """Return the processes that trained, one for each start of a training."""
        return _lines(self.folder / "trained")

    def at_the_gate(self) -> set[str]:
        """Return the processes that wait at the gate, or have passed it."""
        return set(_lines(self.folder / "at the gate"))


@pytest.fixture
def sweeps(ranks: Ranks) -> Sweeps:
    return Sweeps(ranks)


def test_each_combination_and_seed_is_trained_once_by_few_processes(sweeps: Sweeps) -> None:
    ended = sweeps("--seeds", "2", "--grid", "width=4,8", "--grid", "lr=0.01,0.02")
    assert ended.code == 0, ended.out + ended.err
    run = sweeps.folder / "runs" / "s"
    shown = list(csv.DictReader(io.StringIO((run / "results.csv").read_text())))
    assert [line["trial"] for line in shown] == [str(number) for number in range(8)]
    assert {(line["width"], line["learning_rate"], line["seed"]) for line in shown} == {
        (width, lr, seed) for width in ("4", "8") for lr in ("0.01", "0.02") for seed in ("0", "1")
    }
    assert {line["state"] for line in shown} == {"done"}
    assert len(sweeps.trained()) == 8
    assert 1 <= len(set(sweeps.trained())) <= 2
    for line in shown:
        trial = run / f"trial-{int(line['trial']):05d}"
        config = json.loads((trial / "config.json").read_text())
        assert (config["seed"], config["fields"]) == (
            int(line["seed"]),
            {"width": int(line["width"])},
        )
        assert config["learning_rate"] == float(line["learning_rate"])
        validation = read_entries(trial / "metrics.jsonl")[-1]
        assert float(line["loss"]) == pytest.approx(validation["loss"])
        assert "best       loss" in (trial / "logs" / "rank-0.log").read_text()
    board = board_of(run)
    (picture,) = board.Images("sweep")
    assert picture.encoded_image_string == (run / "results.png").read_bytes()


@pytest.mark.slow
def test_the_end_of_a_sweep_does_not_import_all_of_scipy(tmp_path: Path) -> None:
    """Record invented results, so that the command finds all trials done and starts no worker."""
    folder = tmp_path / "runs/s"
    folder.mkdir(parents=True)
    study = open_study(folder, Sweep(Config(task=_BRITTLE_FILE), {"width": [4]}, seeds=3))
    for loss in (1.0, 2.0, 3.0):
        study.done(claimed(study), {"loss": loss}, 1.0)
    program = (
        "import runpy, sys\n"
        "sys.modules['scipy.stats'] = None\n"
        f"sys.argv = ['trainer', 'sweep', {_BRITTLE_FILE!r}, '--name', 's', '--seeds', '3', "
        "'--grid', 'width=4']\n"
        "runpy.run_module('trainer', run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env=clean_environment(**_ENV),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "    4     3     2   1  -0.4841 to 4.484\n" in ended.stdout
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")


def test_a_trial_has_the_bits_of_a_training_of_its_own(sweeps: Sweeps) -> None:
    ended = sweeps("--grid", "lr=0.01,0.02", "--seeds", "2", "--threads", "1", slots=1)
    assert ended.code == 0, ended.err
    assert len(set(sweeps.trained())) == 1  # the last trial is the fourth of its process
    for number, seed, lr in ((0, "0", "0.01"), (3, "1", "0.02")):
        arguments = ("--seed", seed, "--lr", lr, "--threads", "1", "--run", f"own-{number}")
        sweeps.ranks.train(1, _BRITTLE, *arguments)
        runs = sweeps.folder / "runs"
        own, trial = (
            read_entries(run / "digests.jsonl")[-1]
            for run in (runs / f"own-{number}", runs / f"s/trial-{number:05d}")
        )
        assert own["model"] == trial["model"]


def test_a_killed_worker_costs_one_attempt_of_one_trial(sweeps: Sweeps) -> None:
    ended = sweeps("--seeds", "4", "--set", "dies=2")
    assert ended.code == 0, ended.out + ended.err
    assert ended.out.count("and is retried: its process was killed by SIGKILL") == 2
    assert _states(sweeps.folder) == ["done"] * 4
    assert len(sweeps.trained()) == 6


def test_a_process_with_failed_allocations_is_replaced(sweeps: Sweeps) -> None:
    ended = sweeps("--seeds", "3", "--set", "cramped=true", slots=1)
    assert ended.code == 0, ended.out + ended.err
    assert len(set(sweeps.trained())) == 3


def test_an_exception_of_the_task_is_recorded_without_a_retry(sweeps: Sweeps) -> None:
    grid = ("--seeds", "2", "--grid", "fails=no,no such layer")
    ended = sweeps(*grid, "--retries", "2")
    assert ended.code == 1
    failure = (
        r"task Brittle: build_model\(\) raised RuntimeError: no such layer "
        r"\(.*tasks\.py:\d+\): fix the task; traceback in "
    )
    message = "trainbox: 2 of 4 trials failed: fix the cause, and train them again with "
    assert re.match(f"{message}--retry-failed; trial 1: {failure}", ended.err)
    records = _records(sweeps.folder)
    assert [record.state for record in records] == ["done", "failed", "done", "failed"]
    assert re.match(failure, records[1].message)
    assert len(sweeps.trained()) == 4
    log = (sweeps.folder / "runs/s/trial-00001/logs/rank-0.log").read_text()
    assert log.count("Traceback (most recent call last)") == 1
    assert (sweeps(*grid).code, len(sweeps.trained())) == (1, 4)  # no trial is left
    ended = sweeps(*grid, "--retries", "0", "--retry-failed")
    assert (ended.code, len(sweeps.trained())) == (2, 6)  # no trial of this start succeeds


def test_a_trial_that_ends_its_process_is_recorded_with_the_cause(sweeps: Sweeps) -> None:
    task = "tests.trainer.sweep.tasks:Exits"
    ended = sweeps("--grid", "how=no,abort,0", "--retries", "0", task=task)
    assert ended.code == 1, ended.out + ended.err
    messages = [record.message for record in _records(sweeps.folder)]
    assert messages[0] == ""
    assert re.fullmatch(
        r"its process was killed by SIGABRT in build_model \(.*tasks.py, line \d+\); "
        r"its last lines: run .* terminate called \| what\(\):  no such kernel",
        messages[1],
    )
    assert messages[2].startswith("the task called sys.exit(0) in build_model (")


_REPORT = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/my.py", line 11 in build_model
  File "/app/trainer/loop/build.py", line 119 in build

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


# fmt: off
_OUTPUTS = [
    ("", ""),
    ("one\n\n  two\n", "; its last lines: one | two"),
    ("1\n2\n3\n4\n", "; its last lines: 2 | 3 | 4"),
    ("x" * 900, "; its last lines: " + "x" * 300),
    (_REPORT, " in build_model (/home/me/my.py, line 11)"),
    ("what(): no\n" + _REPORT,
     " in build_model (/home/me/my.py, line 11); its last lines: what(): no"),
    (_REPORT.replace("/home/me", "/usr/lib/python3.11"),
     " in build (/app/trainer/loop/build.py, line 119)"),
]
# fmt: on


@pytest.mark.parametrize(("output", "text"), _OUTPUTS)
def test_the_last_output_of_a_process_names_the_cause(
    tmp_path: Path, output: str, text: str
) -> None:
    (tmp_path / "log").write_text(f"earlier\n{output}", encoding="utf-8")
    assert last_output(tmp_path / "log", len("earlier\n")) == text


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (3, "its process exited with code 3"),
        (-9, "its process was killed by SIGKILL"),
        (-99, "its process was killed by signal 99"),
    ],
)
def test_the_exit_code_of_a_process_gives_the_cause(code: int, cause: str) -> None:
    assert exit_cause(code) == cause


def test_a_trial_that_takes_too_long_fails(sweeps: Sweeps) -> None:
    (sweeps.folder / "gate").touch()
    ended = sweeps("--set", "waits=true", "--trial-minutes", "0.001", "--retries", "0")
    assert ended.code == 1
    assert "1 of 1 trials failed: " in ended.err
    assert "; trial 0: it took longer than --trial-minutes 0.001" in ended.err


def test_a_trial_started_on_another_machine_restarts(sweeps: Sweeps) -> None:
    (sweeps.folder / "hold").touch()
    arguments = ("--log-steps", "1", "--set", "holds=true")
    process = sweeps.start(*arguments)
    _wait_until_held(sweeps.folder, process, 0)
    process.send_signal(signal.SIGTERM)
    assert sweeps.end(process).code == 75
    assert ",pending," in (sweeps.folder / "runs/s/results.csv").read_text()
    (sweeps.folder / "hold").unlink()
    ended = sweeps(*arguments, env={"ATEN_CPU_CAPABILITY": "default"})
    assert ended.code == 0, ended.out + ended.err
    run = sweeps.folder / "runs/s"
    (aside,) = run.glob("trial-00000.aside-*")
    log = (run / "trial-00000/logs/output.log").read_text()
    assert f"restarted from step 0, the old folder is {aside.relative_to(sweeps.folder)}: " in log
    assert "cannot be resumed with the same bits" in log
    assert _steps(sweeps.folder, 0) == [1, 2, 3, 4, 5, 6]


def test_a_trial_that_another_process_trains_waits(sweeps: Sweeps) -> None:
    run = sweeps.folder / "runs/s/trial-00000"
    run.mkdir(parents=True)
    lease = Lease(run)
    process = sweeps.start("--seeds", "3")
    wait_until(lambda: _states(sweeps.folder).count("done") == 2, process)
    assert _states(sweeps.folder) == ["running", "done", "done"]
    lease.release()
    ended = sweeps.end(process)
    assert ended.code == 0, ended.out + ended.err
    assert _states(sweeps.folder) == ["done"] * 3


def test_a_full_disk_ends_the_sweep_and_costs_no_trial(sweeps: Sweeps) -> None:
    (sweeps.folder / "runs/s").mkdir(parents=True)
    (sweeps.folder / "runs/s/trial-00000").write_text("no folder can be made here")
    ended = sweeps("--seeds", "2", slots=1)
    assert ended.code == 4, ended.out + ended.err
    assert "trial-00000" in ended.err
    assert "Traceback" not in ended.err
    (sweeps.folder / "runs/s/trial-00000").unlink()
    assert sweeps("--seeds", "2", slots=1).code == 0
    assert _states(sweeps.folder) == ["done"] * 2


def test_an_exception_in_two_trials_ends_the_sweep_at_once(sweeps: Sweeps) -> None:
    ended = sweeps("--seeds", "4", "--set", "fails=no such layer")
    assert ended.code == 2
    assert re.search(r"trial \d: task Brittle: build_model\(\) raised RuntimeError: no", ended.err)
    assert "failed" not in _states(sweeps.folder)


def test_wrong_use_in_two_trials_ends_the_sweep_at_once(sweeps: Sweeps) -> None:
    ended = sweeps("--seeds", "50", "--set", "bad=true")
    assert ended.code == 2
    assert ended.err.startswith("trainbox: trial ")
    assert ended.err.endswith(": no readings: put them there\n")
    assert _states(sweeps.folder) == ["pending"] * 50
    assert "Traceback" not in ended.out + ended.err


_WRONG = {"code": 2, "message": "no folder data/har: put it there"}
_FAILED = {"code": 1, "message": "no such layer"}
_GOOD = {"code": 0, "metrics": {"loss": 1.0}}


@pytest.fixture
def sweep_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepRun:
    """A sweep without worker processes, in which an earlier start has trained one trial."""
    study = open_study(tmp_path, Sweep(Config(), {"width": [4, 8, 16, 32]}))
    study.done(claimed(study), {"loss": 1.0}, 1.0)
    monkeypatch.setattr(Slot, "restart", lambda self: None)
    slots = [Slot("GPU 0", "GPU-a", ready=True), Slot("GPU 1", "GPU-b", ready=True)]
    work = task_work(study.sweep, tmp_path, True)
    return SweepRun(study, tmp_path, work, slots, 1, None, StopRequest())


def _answered(run: SweepRun, *answers: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the records after the next trials have ended with these answers, on the first slot."""
    slot = run._slots[0]
    for answer in answers:
        slot.trial = run._study.claim()
        run._handle(slot, answer)
    return [(record.state, record.message) for record in run._study.records()]


@pytest.fixture
def restarted(sweep_run: SweepRun, monkeypatch: pytest.MonkeyPatch) -> list[Slot]:
    """The slots of `sweep_run` whose workers were replaced."""
    slots: list[Slot] = []
    monkeypatch.setattr(Slot, "restart", lambda slot: slots.append(slot))  # noqa: PLW0108
    return slots


def test_a_signal_to_the_process_of_a_trial_counts_as_a_failure(
    sweep_run: SweepRun, restarted: list[Slot]
) -> None:
    stopped = {"code": 75, "message": "stopped by SIGTERM at step 1 of 4"}
    assert _answered(sweep_run, stopped)[1][0] == "running"
    assert [waiting.trial.attempts for waiting in sweep_run._waiting] == [1]
    assert len(restarted) == 1
    sweep_run._stop.signal_name = "SIGTERM"
    assert _answered(sweep_run, stopped)[2] == ("pending", "")


@pytest.mark.parametrize(("saved", "code"), [(True, 75), (False, 143)])
def test_a_stop_has_code_75_if_a_trial_has_saved(
    sweep_run: SweepRun, saved: bool, code: int
) -> None:
    sweep_run._stop.signal_name = "SIGTERM"
    stopped = {"code": 75, "saved": saved, "message": "stopped by SIGTERM before step 1"}
    assert _answered(sweep_run, stopped)[1] == ("pending", "")
    with pytest.raises(Stopped) as ended:
        sweep_run.run()
    assert ended.value.exit_code == code


def test_one_wrong_combination_is_recorded_when_another_succeeds(sweep_run: SweepRun) -> None:
    assert _answered(sweep_run, _WRONG)[1][0] == "running"
    failed = ("failed", _WRONG["message"])
    assert _answered(sweep_run, _GOOD, _WRONG) == [("done", ""), failed, ("done", ""), failed]


def test_one_wrong_combination_that_is_the_last_ends_the_sweep(sweep_run: SweepRun) -> None:
    for _ in range(2):
        sweep_run._study.done(claimed(sweep_run._study), {"loss": 1.0}, 1.0)
    _answered(sweep_run, _WRONG)
    with pytest.raises(WrongUse, match=r"^trial 3 \(width=32\): no folder"):
        sweep_run._assign()


@pytest.mark.parametrize("has_results", [False, True])
def test_a_first_trial_without_the_metric_ends_the_sweep_and_a_later_one_fails(
    tmp_path: Path, has_results: bool
) -> None:
    study = open_study(tmp_path, Sweep(Config(), {"width": [4, 8]}, metric="f1"))
    if has_results:
        study.done(claimed(study), {"f1": 0.5}, 1.0)
    slots = [Slot("GPU 0", "GPU-a", ready=True)]
    work = task_work(study.sweep, tmp_path, True)
    run = SweepRun(study, tmp_path, work, slots, 1, None, StopRequest())
    message = "--metric f1: the task has no metric f1: use one of loss"
    if has_results:
        assert _answered(run, _GOOD)[1] == ("failed", message)
    else:
        with pytest.raises(WrongUse, match=rf"^trial 0 \(width=4\): {message}"):
            _answered(run, _GOOD)
        assert [record.state for record in study.records()] == ["pending"] * 2


def _next(run: SweepRun, slot: Slot) -> Trial:
    trial = run._next_for(slot)
    assert trial
    return trial


def test_a_failed_trial_goes_to_another_gpu(sweep_run: SweepRun) -> None:
    first, second = sweep_run._slots
    _answered(sweep_run, _FAILED)
    assert _next(sweep_run, first).number == 2
    again = _next(sweep_run, second)
    assert (again.number, again.attempts) == (1, 1)


def test_a_failed_trial_stays_on_its_gpu_if_no_other_trial_is_left(sweep_run: SweepRun) -> None:
    first, _ = sweep_run._slots
    _answered(sweep_run, _FAILED)
    numbers = [_next(sweep_run, first).number for _ in range(3)]
    assert numbers == [2, 3, 1]
    assert sweep_run._next_for(first) is None


@pytest.mark.slow
def test_trainbox_sweep_is_stopped_by_a_signal_and_resumes(
    trainbox: Trainbox, ranks: Ranks
) -> None:
    """Stop the real launcher, sweep and worker."""
    (trainbox.folder / "hold").touch()
    arguments = ("sweep", _BRITTLE_FILE, "--device", "cpu", "--processes", "1", "--name", "s")
    arguments += ("--seeds", "2", "--log-steps", "1", "--set", "holds=true")
    process = trainbox.start(*arguments, env=_ENV)
    _wait_until_held(trainbox.folder, process, 0)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process)
    assert stopped.code == 75, stopped.err
    _check_stopped(trainbox.folder, stopped, 2, 0)
    (trainbox.folder / "hold").unlink()
    ended = ranks.launch(*arguments, env={"TRAINBOX_KEEP": "2"}).wait()
    assert ended.code == 0, ended
    _check_resumed(trainbox.folder, 2, 0)
    assert "plan       1 CPU process requested -> sweep, 1 slot" in ended.out
    assert "settings   keep 2 (from TRAINBOX_KEEP)" in ended.out
    shown = trainbox("sweep", "show", "s", "--csv").out
    assert (trainbox.folder / "runs/s/results.csv").read_text() == shown
    trained = _lines(trainbox.folder / "trained")
    assert (len(trained), len(set(trained))) == (5, 2)  # the first rehearses with two jobs


def _wait_until_held(folder: Path, process: Any, *trials: int) -> None:
    """Wait until these trials are in the step in which the task `holds`."""
    for number in trials:
        wait_until(lambda n=number: _steps(folder, n)[-1:] == [HELD_STEP - 1], process)  # type: ignore[misc]


def _check_stopped(folder: Path, stopped: Ended, total: int, *held: int) -> None:
    message = f"stopped by SIGTERM with 0 of {total} trials done: repeat the command to resume"
    assert message in stopped.err
    assert _states(folder) == ["pending"] * total
    assert [_steps(folder, number)[-1] for number in held] == [HELD_STEP] * len(held)


def _check_resumed(folder: Path, total: int, *held: int) -> None:
    assert _states(folder) == ["done"] * total
    for number in held:
        log = (folder / f"runs/s/trial-{number:05d}/logs/rank-0.log").read_text()
        assert f"resume     from step {HELD_STEP}, " in log
        assert _steps(folder, number) == [1, 2, 3, 4, 5, 6]


def _steps(folder: Path, trial: int) -> list[int]:
    """Return the steps that the trial has logged."""
    return [entry["step"] for entry in logged(folder / f"runs/s/trial-{trial:05d}", "train")]


def test_a_machine_that_dies_gives_its_trials_to_the_other(sweeps: Sweeps) -> None:
    """The first machine is a `trainbox sweep` that is killed while it waits in its trial."""
    (sweeps.folder / "gate").touch()
    arguments = ("--seeds", "3", "--set", "waits=true")
    command = ("sweep", _BRITTLE_FILE, "--device", "cpu", "--processes", "1", "--name", "s")
    doomed = sweeps.ranks.launch(*command, *arguments)
    wait_until(lambda: len(sweeps.at_the_gate()) == 1, doomed)
    assert _states(sweeps.folder) == ["running", "pending", "pending"]
    (worker,) = sweeps.at_the_gate()
    worker_end = os.pidfd_open(int(worker))
    doomed.send_signal(signal.SIGKILL)
    doomed.wait()
    assert select.select([worker_end], [], [], 60)[0], "the worker outlives its sweep"
    os.close(worker_end)
    (sweeps.folder / "gate").unlink()
    ended = sweeps(*arguments, "--worker", task=_BRITTLE_FILE)
    assert (ended.code, "95 %" in ended.out) == (0, False), ended.err
    assert _states(sweeps.folder) == ["done"] * 3
    assert len(sweeps.trained()) == 3
    assert sweeps(*arguments, task=_BRITTLE_FILE).out.count("3, 0 to do") == 1


def test_two_machines_share_one_sweep(sweeps: Sweeps) -> None:
    gate = sweeps.folder / "gate"
    gate.touch()
    arguments = ("--seeds", "8", "--set", "waits=true")
    joined = sweeps.start(*arguments, "--worker")
    first = sweeps.start(*arguments)
    wait_until(lambda: len(sweeps.at_the_gate()) == 4, first)
    gate.unlink()
    for ended in (sweeps.end(joined), sweeps.end(first)):
        assert ended.code == 0, ended.out + ended.err
    assert _states(sweeps.folder) == ["done"] * 8
    assert len(sweeps.trained()) == 8
    assert set(sweeps.trained()) == sweeps.at_the_gate()


def test_trainbox_sweep_finds_a_dead_worker_whose_child_lives_on(ranks: Ranks) -> None:
    command = ("sweep", _BRITTLE_FILE, "--device", "cpu", "--processes", "1", "--name", "s")
    ended = ranks.launch(*command, "--set", "leaves=true", "--retries", "0").wait()
    assert ended.code == 1
    assert "trial 0 failed on CPU slot 0: its process was killed by SIGKILL" in ended.out
    assert "1 of 1 trials failed: " in ended.errs[0]
    assert "; trial 0: its process was killed by SIGKILL" in ended.errs[0]
    child = int((ranks.folder / "child").read_text())
    assert (
        not Path(f"/proc/{child}").exists()
        or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text()
    )


def test_the_pruner_ends_a_trial_that_is_worse_than_the_median(sweeps: Sweeps) -> None:
    rates = ("0.05", "0.04", "0.03", "0.02", "0.01", "0.00001")  # five trials without pruning
    grid = ("--grid", f"lr={','.join(rates)}", "--metric", "min:loss", "--pruner", "median")
    ended = sweeps(*grid, "--epochs", "2", slots=1)
    assert ended.code == 0, ended.out + ended.err
    assert _states(sweeps.folder) == ["done"] * 5 + ["pruned"]
    validations = [
        len(logged(sweeps.folder / f"runs/s/trial-{number:05d}", "validation"))
        for number in range(6)
    ]
    assert validations == [2] * 5 + [1]


def test_a_drawn_sweep_names_the_command_that_repeats_the_best(
    sweeps: Sweeps,
) -> None:
    drawn = ("--sampler", "tpe", "--trials", "3", "--range", "lr=1e-5:1e-1:log")
    ended = sweeps(*drawn, "--metric", "min:loss", slots=1)
    assert ended.code == 0, ended.out + ended.err
    records = _records(sweeps.folder)
    assert [(record.state, record.seed) for record in records] == [("done", 0)] * 3
    assert len({record.point["learning_rate"] for record in records}) == 3
    best = min(records, key=lambda record: record.metrics["loss"]).point["learning_rate"]
    assert f"\nbest:      learning_rate={best:.3g}, lowest loss " in ended.out
    command = re.findall(r"^again: +trainbox (.+)$", ended.out, re.MULTILINE)[0].split()
    assert sweeps.ranks.launch(*command, "--device", "cpu").wait().code == 0
    repeated, first = (
        json.loads((sweeps.folder / path).read_text())
        for path in ("runs/s-best/config.json", command[command.index("--config") + 1])
    )
    assert repeated == first


def test_each_worker_sees_the_gpu_of_its_slot(sweeps: Sweeps) -> None:
    """The trials run on the CPU; the variable shows what CUDA would see."""
    gate = sweeps.folder / "gate"
    gate.touch()
    slots = {"GPU 0": "GPU-a", "GPU 1": "GPU-b"}
    arguments = ("--seeds", "4", "--set", "shows=true", "--set", "waits=true")
    process = sweeps.start(*arguments, slots=slots)
    wait_until(lambda: len(sweeps.at_the_gate()) == 2, process)
    gate.unlink()
    ended = sweeps.end(process)
    assert ended.code == 0, ended.out + ended.err
    seen = [line.split() for line in _lines(sweeps.folder / "seen")]
    assert (len(seen), {gpu for _, gpu in seen}) == (4, {"GPU-a", "GPU-b"})
    assert len({worker for worker, _ in seen}) == 2 == len({(worker, gpu) for worker, gpu in seen})


def test_an_unusable_gpu_gets_no_trial(sweeps: Sweeps) -> None:
    slots = {"GPU 0": "GPU-a", "GPU 1": "GPU-b"}  # no machine has them
    ended = sweeps(env=_slots("cuda", slots))
    assert ended.code == 3
    assert ended.out.count("is not used any more, since its worker cannot start: ") == 2
    assert ended.err.startswith("trainbox: no usable device is left (GPU ")
    assert _states(sweeps.folder) == ["pending"]


# fmt: off
_ARGUMENTS = [
    (["--grid", "widht=1,2"], "--grid widht=1,2: task tests.trainer.sweep.tasks:Brittle has no "
     "field widht: did you mean width?"),
    (["--grid", "width=a,2"], "--grid width=a,2: give a value of type int"),
    (["--grid", "seed=4,5,6"],
     "--grid seed=4,5,6: the option is --seeds 3, which counts from --seed 4"),
    (["--grid", "lr=0.1,nan"], "--grid lr=0.1,nan: nan is not a finite number above 0"),
    (["--grid", "deterministic=0,1"],
     "--grid deterministic=0,1: --deterministic is a switch without values"),
    (["--grid", "freeze=a,b"],
     "--grid freeze=a,b: --freeze can be repeated, so it cannot be swept"),
    (["--grid", "width=4", "--grid", "width=8"],
     "--grid width=...: width is given twice: drop one"),
    (["--grid", "width=4,8", "--set", "width=2"],
     "--grid width=...: width is given twice: drop one"),
    (["--grid", "lr=1,2", "--lr", "3"], "--grid lr=1,2: --lr is also given: drop one of the two"),
    (["--grid", "precision=fp32,fp16", "--device", "cpu"],
     "--precision fp16 needs an NVIDIA GPU (the device is cpu"),
    (["--range", "nosuch=1:2", "--sampler", "random", "--trials", "2", "--metric", "loss"],
     "has no field nosuch"),
    (["--range", "batch-size=-3:2"], "-3 is less than 1"),
    (["--name", "a/b"], "--name 'a/b' must be a folder name"),
    (["--run", "r"], "--run and --resume are for one training: use --name; a sweep always resumes"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "text"), _ARGUMENTS)
def test_wrong_use_is_reported_before_anything_starts(
    here: Here, arguments: list[str], text: str
) -> None:
    err = here.refused("sweep", _BRITTLE, *arguments)
    assert text in err
    assert not (here.folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--grid lr", "--grid lr: write NAME=VALUE,VALUE"),
        ("--grid lr=a,b", "--grid lr=a,b: 'a' is not a number"),
        ("--grid lr=[0.1,1]", "--grid lr=[0.1,1]: write no brackets, as in --grid lr=0.1,1"),
        ("--metric mix:loss", "--metric mix:loss: write the name of a metric"),
        ("--range width=8:64", "--range and --trials are for samplers that draw"),
    ],
)
def test_a_mistake_in_the_options_is_found_before_the_task_is_imported(
    here: Here, arguments: str, text: str
) -> None:
    """The import of torch, which a task needs, takes seconds."""
    Path("broken.py").write_text("raise AssertionError('imported')\n")
    assert text in here.refused("sweep", "broken.py:Task", *arguments.split())


def test_the_results_of_a_moved_sweep_are_shown(here: Here) -> None:
    folder = here.folder / "runs/s"
    folder.mkdir(parents=True)
    study = open_study(folder, Sweep(Config(), {"width": [4, 8]}))
    for loss in (0.5, 0.25):
        study.done(claimed(study), {"loss": loss}, 1.0)
    folder.rename(here.folder / "runs/moved")
    code, out, _ = here.command("sweep", "show", "moved")
    assert (code, out.splitlines()[:3]) == (
        0,
        ["width  done  loss", "    4     1   0.5", "    8     1  0.25"],
    )
    assert here.command("sweep", "show", "moved", "--figure", "f.svg")[1] == "wrote f.svg\n"
    assert (here.folder / "f.svg").read_text().startswith("<?xml")
    err = here.refused("sweep", "show", "moved", "--figure", "none/f.svg", code=4)
    assert "cannot write none/f.svg: No such file or directory (its folder is missing): make" in err
    err = here.refused("sweep", "show", "moved", "--figure", "f.txt")
    assert "--figure f.txt: Format 'txt' is not supported" in err
    err = here.refused("sweep", "show", "moved", "--figure", "f.svg", "--csv")
    assert err == "trainbox: --csv and --figure exclude each other: give one of them\n"


@pytest.mark.parametrize(
    "later",
    [
        {"sources": {"mine": "2"}},
        {"sources": {"mine": "1"}, "starts": [{"changed": ["mine"]}, {"exit_code": 0}, 3]},
    ],
    ids=["before a trial", "before a killed start"],
)
def test_a_sweep_over_a_file_that_was_edited_says_so(tmp_path: Path, later: Any) -> None:
    study = open_study(tmp_path, Sweep(Config(), {}, seeds=3))
    for number, manifest in enumerate([{"sources": {"mine": "1"}}, {}, later]):
        study.done(claimed(study), {"loss": 1.0}, 1.0)
        trial_folder(tmp_path, number).mkdir()
        (trial_folder(tmp_path, number) / "manifest.json").write_text(json.dumps(manifest))
    assert "\nchanged:   mine differs between trials such as 0 and 2: " in show(study, tmp_path)


@pytest.mark.parametrize(
    ("revision", "sources", "named"),
    [("a", {}, ""), ("b", {}, "revision"), ("a", {"changes.diff": "2"}, "changes.diff")],
)
def test_a_sweep_names_another_revision_and_changes_since_then(
    tmp_path: Path, revision: str, sources: dict[str, str], named: str
) -> None:
    study = open_study(tmp_path, Sweep(Config(), {}, seeds=2))
    first = {"sources": {"train.py": "1"}, "revision": "a"}
    later = {"sources": {"train.py": "1", **sources}, "revision": revision}
    for number, manifest in enumerate([first, later]):
        study.done(claimed(study), {"loss": 1.0}, 1.0)
        trial_folder(tmp_path, number).mkdir()
        (trial_folder(tmp_path, number) / "manifest.json").write_text(json.dumps(manifest))
    shown = show(study, tmp_path)
    assert (f"changed:   {named} differs" in shown, "changed:" in shown) == (bool(named),) * 2


def test_showing_a_sweep_that_does_not_exist(here: Here) -> None:
    err = here.refused("sweep", "show", "none")
    assert "runs/none contains no sweep: give the name of a folder in --runs-dir" in err


def test_the_help_of_a_sweep_lists_its_options(here: Here) -> None:
    show = here.command("sweep", "show", "--help")[1]
    assert "Print the results so far of the sweep NAME" in show
    for help_option in ("--help", "--help-all"):
        page = here.command("sweep", help_option)[1]
        for option in ("--gpus", "--seeds", "--grid", "--batch-size", "--epochs"):
            assert f"  {option}" in page
        for option in ("--per-gpu", "--worker", "--runs-dir"):
            assert (f"  {option}" in page) == (help_option == "--help-all")
        assert "--resume" not in page, "a sweep refuses it"
