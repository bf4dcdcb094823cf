"""Sweeps for real: worker processes that train, die and are replaced, and what is recorded of
it.
"""

import csv
import fcntl
import io
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import IMAGES, EventAccumulator

from tests.support.commands import Ended, Trainbox, finish, wait_until
from trainer.errors import WrongUse
from trainer.records.compare import read_entries
from trainer.settings.config import Config
from trainer.sweep.grid import Sweep
from trainer.sweep.runner import Limits, Slot, SweepRun, last_words
from trainer.sweep.study import open_study
from trainer.system.signals import StopRequest

_BRITTLE = "tests.trainer.sweep.tasks:Brittle"
_ROOT = str(Path(__file__).parents[3])
_WORDS = ("sweep", _BRITTLE, "--device", "cpu", "--processes", "2", "--epochs", "1", "--name", "s")
_ENV = {"PYTHONPATH": _ROOT}


def _sweep(trainbox: Trainbox, *words: str, env: dict[str, str] | None = None) -> Ended:
    return trainbox(*_WORDS, *words, env=_ENV | (env or {}))


def _shown(trainbox: Trainbox) -> list[dict[str, str]]:
    ended = trainbox("sweep", "show", "s", "--csv")
    assert ended.code == 0, ended.err
    return list(csv.DictReader(io.StringIO(ended.out)))


def _states(trainbox: Trainbox) -> list[str]:
    try:
        return [line["state"] for line in _shown(trainbox)]
    except AssertionError:
        return []  # it is not begun yet


def _workers(trainbox: Trainbox) -> list[int]:
    """The processes that trained, in the order of the trials."""
    return [int(line) for line in (trainbox.folder / "trained").read_text().split()]


def _at_the_gate(trainbox: Trainbox) -> set[str]:
    path = trainbox.folder / "at the gate"
    return set(path.read_text().split()) if path.exists() else set()


def test_each_combination_and_seed_is_trained_once_by_few_processes(trainbox: Trainbox) -> None:
    ended = _sweep(
        trainbox,
        "--seeds",
        "3",
        "--grid",
        "width=4,8",
        "--grid",
        "lr=0.01,0.02",
        env={"TRAINBOX_KEEP": "2"},
    )
    assert ended.code == 0, ended.out + ended.err
    assert "plan       2 CPU processes requested -> sweep, 2 slots" in ended.out
    assert "settings   keep 2 (from TRAINBOX_KEEP)" in ended.out
    shown = _shown(trainbox)
    assert [line["trial"] for line in shown] == [str(number) for number in range(12)]
    assert {(line["width"], line["learning_rate"], line["seed"]) for line in shown} == {
        (width, lr, seed)
        for width in ("4", "8")
        for lr in ("0.01", "0.02")
        for seed in ("0", "1", "2")
    }
    assert {line["state"] for line in shown} == {"done"}
    assert len(_workers(trainbox)) == 12
    assert 1 <= len(set(_workers(trainbox))) <= 2
    run = trainbox.folder / "runs" / "s"
    for line in shown:
        trial = run / f"trial-{int(line['trial']):05d}"
        config = json.loads((trial / "config.json").read_text())
        assert (config["seed"], config["fields"]) == (
            int(line["seed"]),
            {"width": int(line["width"])},
        )
        assert config["learning_rate"] == float(line["learning_rate"])
        validation = [
            json.loads(text) for text in (trial / "metrics.jsonl").read_text().splitlines()
        ][-1]
        assert float(line["loss"]) == pytest.approx(validation["loss"])
        assert "best       loss" in (trial / "logs" / "rank-0.log").read_text()
    assert (run / "results.csv").read_text() == trainbox("sweep", "show", "s", "--csv").out
    board = EventAccumulator(str(run / "tensorboard"), {IMAGES: 0})
    board.Reload()
    assert board.Tags()["images"] == ["sweep"]
    lines = ended.out.splitlines()
    heading = next(
        place for place, line in enumerate(lines) if line.split()[:2] == ["width", "learning_rate"]
    )
    # after the lines of progress on a slow machine
    rows = [line.split() for line in lines[heading + 1 : heading + 5]]
    assert [row[:3] for row in rows] == [
        ["4", "0.01", "3"],
        ["4", "0.02", "3"],
        ["8", "0.01", "3"],
        ["8", "0.02", "3"],
    ]
    assert trainbox("sweep", "show", "s", "--figure", "f.svg").out == "drawn into f.svg\n"
    assert (trainbox.folder / "f.svg").read_text().startswith("<?xml")


def test_a_trial_among_others_has_the_bits_of_a_training_of_its_own(trainbox: Trainbox) -> None:
    assert _sweep(trainbox, "--seeds", "3", "--grid", "lr=0.01,0.02", "--threads", "1").code == 0
    for number, seed, lr in ((0, "0", "0.01"), (5, "2", "0.02")):
        words = (
            "train",
            _BRITTLE,
            "--device",
            "cpu",
            "--epochs",
            "1",
            "--seed",
            seed,
            "--lr",
            lr,
            "--threads",
            "1",
        )
        assert trainbox(*words, "--run", f"own-{number}", env=_ENV).code == 0
        runs = trainbox.folder / "runs"
        own, trial = (
            read_entries(run / "digests.jsonl")[-1]
            for run in (runs / f"own-{number}", runs / f"s/trial-{number:05d}")
        )
        assert own["model"] == trial["model"]


def test_a_killed_worker_costs_one_try_of_one_trial(trainbox: Trainbox) -> None:
    ended = _sweep(trainbox, "--seeds", "20", "--set", "dies=true")
    assert ended.code == 0, ended.out + ended.err
    assert ended.out.count("and is tried again: its process was killed by SIGKILL") == 2
    assert [line["state"] for line in _shown(trainbox)] == ["done"] * 20
    assert len(_workers(trainbox)) == 22


def test_a_trial_that_fails_each_time_is_recorded_with_its_words(trainbox: Trainbox) -> None:
    ended = _sweep(trainbox, "--seeds", "2", "--grid", "fails=no,no such layer", "--retries", "2")
    assert ended.code == 1
    failure = (
        r"task Brittle: build_model\(\) raised RuntimeError: no such layer "
        r"\(.*tasks\.py:\d+\): fix the task; traceback in "
    )
    assert re.match(f"trainbox: 2 of 4 trials failed; the first, trial 1: {failure}", ended.err)
    shown = _shown(trainbox)
    assert [line["state"] for line in shown] == ["done", "failed", "done", "failed"]
    assert re.match(failure, shown[1]["message"])
    assert len(_workers(trainbox)) == 2 + 2 * 3
    log = (trainbox.folder / "runs/s/trial-00001/logs/rank-0.log").read_text()
    assert log.count("Traceback (most recent call last)") == 3
    ended = _sweep(trainbox, "--seeds", "2", "--grid", "fails=no,no such layer")  # failed for good
    assert (ended.code, len(_workers(trainbox))) == (1, 8)
    ended = _sweep(
        trainbox,
        "--seeds",
        "2",
        "--grid",
        "fails=no,no such layer",
        "--retries",
        "0",
        "--retry-failed",
    )
    assert (ended.code, len(_workers(trainbox))) == (1, 10)


def test_a_trial_that_ends_its_process_is_recorded_with_the_cause(trainbox: Trainbox) -> None:
    words = (
        "sweep",
        "tests.trainer.sweep.tasks:Exits",
        "--device",
        "cpu",
        "--processes",
        "2",
        "--epochs",
        "1",
        "--name",
        "s",
    )
    ended = trainbox(*words, "--grid", "how=no,abort,0", "--retries", "0", env=_ENV)
    assert ended.code == 1, ended.out + ended.err
    messages = [line["message"] for line in _shown(trainbox)]
    assert messages[0] == ""
    assert re.fullmatch(
        r"its process was killed by SIGABRT in build_model \(.*tasks.py, line \d+\); "
        r"its last lines: terminate called \| what\(\):  no such kernel",
        messages[1],
    )
    assert re.fullmatch(
        r"the task called sys.exit\(0\) in build_model \(.*tasks.py, line \d+\): raise an "
        r"error instead",
        messages[2],
    )


_REPORT = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/my.py", line 11 in build_model
  File "/app/trainer/loop/build.py", line 119 in build

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", ""),
        ("\n \n", ""),
        ("one\n\n  two\n", "; its last lines: one | two"),
        ("1\n2\n3\n4\n", "; its last lines: 2 | 3 | 4"),
        ("x" * 900, "; its last lines: " + "x" * 300),
        (_REPORT, " in build_model (/home/me/my.py, line 11)"),
        (
            "what(): no\n" + _REPORT,
            " in build_model (/home/me/my.py, line 11); its last lines: what(): no",
        ),
        (
            _REPORT.replace("/home/me", "/usr/lib/python3.11"),
            " in build (/app/trainer/loop/build.py, line 119)",
        ),
        ("Fatal Python error: Aborted\n\nCurrent thread 0x1:\n  <no Python frame>\n", ""),
    ],
)
def test_the_last_words_of_a_process_name_its_cause(output: str, words: str) -> None:
    assert last_words(output) == words


def test_a_trial_that_takes_too_long_is_ended(trainbox: Trainbox) -> None:
    (trainbox.folder / "gate").touch()
    ended = _sweep(trainbox, "--set", "waits=true", "--trial-minutes", "0.02", "--retries", "0")
    assert ended.code == 1
    assert (
        "1 of 1 trials failed; the first, trial 0: not done within --trial-minutes 0.02"
        in ended.err
    )


def test_a_worker_whose_child_lives_on_is_found_dead(trainbox: Trainbox) -> None:
    ended = _sweep(trainbox, "--set", "leaves=true", "--retries", "0")
    assert ended.code == 1
    assert re.search(r"trial 0 failed on CPU slot \d: its process was killed by SIGKILL", ended.out)
    child = int((trainbox.folder / "child").read_text())
    assert (
        not Path(f"/proc/{child}").exists()
        or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text()
    )


def test_a_trial_begun_on_another_machine_is_begun_anew(trainbox: Trainbox) -> None:
    hold = trainbox.folder / "hold"
    hold.touch()
    words = (*_WORDS, "--epochs", "10", "--log-steps", "1", "--set", "holds=true")
    process = trainbox.start(*words, env=_ENV)
    trainbox.wait_for_step(process, "s/trial-00000", 19)
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 75
    hold.unlink()
    ended = trainbox(*words, env=_ENV | {"ATEN_CPU_CAPABILITY": "default"})
    assert ended.code == 0, ended.out + ended.err
    run = trainbox.folder / "runs/s"
    assert len(list(run.glob("trial-00000.aside-*"))) == 1
    output = (run / "trial-00000/logs/output.log").read_text()
    assert "cannot be resumed with the same bits" in output
    assert [entry["step"] for entry in trainbox.entries("s/trial-00000", "train")] == list(
        range(1, 61)
    )


def test_a_trial_that_another_process_trains_is_waited_for(trainbox: Trainbox) -> None:
    run = trainbox.folder / "runs/s/trial-00000"
    run.mkdir(parents=True)
    with (run / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = trainbox.start(*_WORDS, "--seeds", "3", env=_ENV)
        wait_until(
            lambda: len(_states(trainbox)) == 3 and sorted(_states(trainbox))[:2] == ["done"] * 2,
            process,
        )
        assert _states(trainbox)[0] == "running"
    ended = finish(process)
    assert ended.code == 0, ended.out + ended.err
    assert _states(trainbox) == ["done"] * 3


def test_a_full_disk_ends_the_sweep_and_costs_no_trial(trainbox: Trainbox) -> None:
    (trainbox.folder / "runs/s").mkdir(parents=True)
    (trainbox.folder / "runs/s/trial-00000").write_text("no folder can be made here")
    ended = _sweep(trainbox, "--seeds", "2", "--processes", "1")
    assert ended.code == 4, ended.out + ended.err
    assert "trial-00000" in ended.err
    assert "Traceback" not in ended.err
    (trainbox.folder / "runs/s/trial-00000").unlink()
    assert _sweep(trainbox, "--seeds", "2", "--processes", "1").code == 0
    assert _states(trainbox) == ["done"] * 2


def test_a_reader_that_has_seen_enough_does_not_end_it(trainbox: Trainbox) -> None:
    process = trainbox.start(*_WORDS, "--seeds", "2", env=_ENV)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 0
    assert _states(trainbox) == ["done"] * 2
    (trainbox.folder / "runs/s").rename(trainbox.folder / "runs/moved")
    assert trainbox("sweep", "show", "moved").out.splitlines()[1].split()[0] == "2"


def test_what_no_trial_can_do_ends_the_sweep_at_once(trainbox: Trainbox) -> None:
    ended = _sweep(trainbox, "--seeds", "50", "--set", "bad=true")
    assert ended.code == 2
    assert ended.err.startswith("trainbox: trial ")
    assert ended.err.endswith(": no readings: put them there\n")
    assert {line["state"] for line in _shown(trainbox)} == {"pending"}
    assert "Traceback" not in ended.out + ended.err


_WRONG = {"code": 2, "message": "no folder data/har: put it there"}
_GOOD = {"code": 0, "metrics": {"loss": 1.0}, "seconds": 1.0}


@pytest.fixture
def sweep_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepRun:
    """A sweep that goes on after one trial of an earlier start, without worker processes."""
    study = open_study(None, tmp_path, "s", Sweep(Config(), {"width": [4, 8, 16, 32]}))
    earlier = study.claim()
    assert earlier
    study.done(earlier, {"loss": 1.0}, 1.0)
    monkeypatch.setattr(SweepRun, "_restart", lambda self, slot: None)
    return SweepRun(
        study, tmp_path, tmp_path, [Slot("CPU slot 0", "", ready=True)], Limits(), StopRequest()
    )


def _answered(run: SweepRun, *answers: dict[str, Any]) -> list[tuple[str, str]]:
    """The records after the trials that are left have ended in this way, one after the other."""
    (slot,) = run._slots
    for answer in answers:
        slot.trial = run._study.claim()
        run._hear(slot, answer)
    return [(record.state, record.message) for record in run._study.records()]


def test_data_that_is_missing_now_ends_a_sweep_that_had_trained(
    sweep_run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SweepRun, "_start", lambda self, slot: None)
    monkeypatch.setattr(SweepRun, "_tell", lambda self, slot, order: None)
    monkeypatch.setattr(SweepRun, "_listen", lambda self: self._hear(self._slots[0], _WRONG))
    with pytest.raises(WrongUse, match=r"^trial 1 \(width=8\): no folder data/har: put it there$"):
        sweep_run.run()
    assert _answered(sweep_run) == [("done", ""), *[("pending", "")] * 3]


def test_a_trial_whose_process_gets_a_signal_loses_a_try(
    sweep_run: SweepRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarted = []
    monkeypatch.setattr(SweepRun, "_restart", lambda self, slot: restarted.append(slot))
    stopped = {"code": 75, "message": "stopped by SIGTERM at step 1 of 4"}
    assert _answered(sweep_run, stopped)[1][0] == "running"
    assert [waiting.trial.attempts for waiting in sweep_run._waiting] == [1]
    assert len(restarted) == 1
    sweep_run._stop.signal_name = "SIGTERM"
    assert _answered(sweep_run, stopped)[2] == ("pending", "")


def test_one_wrong_combination_is_recorded_when_another_succeeds(sweep_run: SweepRun) -> None:
    assert _answered(sweep_run, _WRONG)[1][0] == "running"
    failed = ("failed", _WRONG["message"])
    assert _answered(sweep_run, _GOOD, _WRONG) == [("done", ""), failed, ("done", ""), failed]


def test_one_wrong_combination_that_is_the_last_ends_the_sweep(sweep_run: SweepRun) -> None:
    for _ in range(2):
        trial = sweep_run._study.claim()
        assert trial
        sweep_run._study.done(trial, {"loss": 1.0}, 1.0)
    _answered(sweep_run, _WRONG)
    with pytest.raises(WrongUse, match=r"^trial 3 \(width=32\): no folder"):
        sweep_run._feed()


def test_stopped_by_a_signal_the_same_command_goes_on(trainbox: Trainbox) -> None:
    hold = trainbox.folder / "hold"
    hold.touch()
    words = (*_WORDS, "--seeds", "8", "--epochs", "10", "--log-steps", "1", "--set", "holds=true")
    process = trainbox.start(*words, env=_ENV)
    for number in (0, 1):
        trainbox.wait_for_step(process, f"s/trial-0000{number}", 19)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process)
    assert stopped.code == 75, stopped.err
    assert "stopped by SIGTERM with 0 of 8 trials done: the same command goes on" in stopped.err
    assert {line["state"] for line in _shown(trainbox)} == {"pending"}
    reached = [trainbox.entries(f"s/trial-0000{n}", "train")[-1]["step"] for n in (0, 1)]
    assert reached == [20, 20]
    hold.unlink()
    ended = trainbox(*words, env=_ENV)
    assert ended.code == 0, ended.out + ended.err
    assert [line["state"] for line in _shown(trainbox)] == ["done"] * 8
    for number, step in enumerate(reached):
        assert (
            f"resume     from step {step}, "
            in (trainbox.folder / f"runs/s/trial-0000{number}/logs/rank-0.log").read_text()
        )
        assert [
            entry["step"] for entry in trainbox.entries(f"s/trial-0000{number}", "train")
        ] == list(range(1, 61))


def test_a_machine_that_dies_gives_its_trials_to_the_other(trainbox: Trainbox) -> None:
    """Both are this one; it waits in its trials until it is killed."""
    (trainbox.folder / "gate").touch()
    words = (*_WORDS, "--seeds", "6", "--set", "waits=true")
    doomed = trainbox.start(*words, env=_ENV)
    wait_until(lambda: len(_at_the_gate(trainbox)) == 2, doomed)
    wait_until(lambda: [line["state"] for line in _shown(trainbox)].count("running") == 2, doomed)
    doomed.kill()
    doomed.wait()
    (trainbox.folder / "gate").unlink()
    ended = trainbox(*words, "--worker", env=_ENV)
    assert (ended.code, "95 %" in ended.out) == (0, False), ended.err
    assert [line["state"] for line in _shown(trainbox)] == ["done"] * 6
    assert trainbox(*words, env=_ENV).out.count("6, 0 to do") == 1


def test_two_machines_share_one_sweep(trainbox: Trainbox) -> None:
    gate = trainbox.folder / "gate"
    gate.touch()
    words = (*_WORDS, "--seeds", "40", "--set", "waits=true")
    both = trainbox.start(*words, "--worker", env=_ENV), trainbox.start(*words, env=_ENV)
    wait_until(lambda: len(_at_the_gate(trainbox)) == 4, both[1])  # both take part
    gate.unlink()
    for ended in map(finish, both):
        assert ended.code == 0, ended.out + ended.err
    assert [line["state"] for line in _shown(trainbox)] == ["done"] * 40
    assert len(_workers(trainbox)) == 40
    assert len(set(_workers(trainbox))) == 4


def test_samplers_and_pruning(trainbox: Trainbox) -> None:
    drawn = (
        "--sampler",
        "tpe",
        "--trials",
        "20",
        "--metric",
        "min:loss",
        "--range",
        "lr=1e-5:1e-1:log",
    )
    words = (
        "sweep",
        _BRITTLE,
        "--device",
        "cpu",
        "--processes",
        "1",
        "--epochs",
        "6",
        "--name",
        "s",
        *drawn,
    )
    ended = trainbox(*words, "--pruner", "median", env=_ENV)
    assert ended.code == 0, ended.out + ended.err
    shown = _shown(trainbox)
    assert {line["state"] for line in shown} == {"done", "pruned"}
    pruned = next(line for line in shown if line["state"] == "pruned")
    assert len(trainbox.entries(f"s/trial-{int(pruned['trial']):05d}", "validation")) < 6
    assert len({line["learning_rate"] for line in shown}) > 10
    assert {line["seed"] for line in shown} == {"0"}
    *table, best, again = trainbox("sweep", "show", "s").out.splitlines()
    losses = [float(row.split()[-1]) for row in table[1:] if not row.endswith("-")]
    assert losses == sorted(losses)
    lr = best.split()[1].removeprefix("learning_rate=").rstrip(",")
    assert lr == table[1].split()[0] == f"{float(lr):.3g}"
    command = again.split()[2:]
    assert trainbox.train(*command[1:], "--device", "cpu", env=_ENV).code == 0
    repeated, first = (
        json.loads((trainbox.folder / "runs" / run / "config.json").read_text())
        for run in ("s-best", command[2].split("/", 1)[1].removesuffix("/config.json"))
    )
    assert repeated == first


def test_each_slot_sees_its_own_gpu_and_a_failed_trial_goes_to_another(trainbox: Trainbox) -> None:
    """On the CPU, with the names of GPUs that are not there: what CUDA would see is in the
    environment.
    """
    env = _ENV | {
        "TRAINBOX_SLOTS": json.dumps([["GPU 0", "GPU-a"], ["GPU 1", "GPU-b"]]),
        "TRAINBOX_DEVICE": "cpu",
    }
    gate = trainbox.folder / "gate"
    gate.touch()
    words = (
        "sweep",
        _BRITTLE,
        "--name",
        "s",
        "--epochs",
        "1",
        "--seeds",
        "40",
        "--set",
        "tells=true",
        "--set",
        "waits=true",
    )
    process = trainbox.start(*words, "--set", "fails=on GPU-a", module="trainer", env=env)
    wait_until(lambda: len(_at_the_gate(trainbox)) == 2, process)  # on both
    gate.unlink()
    ended = finish(process)
    assert ended.code == 0, ended.out + ended.err
    seen = [line.split() for line in (trainbox.folder / "seen").read_text().splitlines()]
    assert {gpu for _, gpu in seen} == {"GPU-a", "GPU-b"}
    # a process sees one, for good
    assert len({worker for worker, _ in seen}) == len({(worker, gpu) for worker, gpu in seen})
    again = ended.out.count(
        "failed on GPU 0 and is tried again: task Brittle: build_model() raised "
        "RuntimeError: on GPU-a"
    )
    assert again >= 1
    assert ended.out.count("tried again") == again
    assert len(seen) == 40 + again


def test_a_gpu_that_cannot_be_used_is_set_aside_before_it_costs_a_trial(trainbox: Trainbox) -> None:
    """Straight to the trainer, which is told of GPUs that are not there."""
    env = _ENV | {
        "TRAINBOX_SLOTS": json.dumps([["GPU 0", "GPU-a"], ["GPU 1", "GPU-b"]]),
        "TRAINBOX_DEVICE": "cuda",
    }
    ended = trainbox("sweep", _BRITTLE, "--name", "s", module="trainer", env=env)
    assert ended.code == 3
    assert ended.out.count("cannot be used and is set aside: ") == 2
    assert ended.err.startswith("trainbox: nothing is left to train on (GPU ")
    assert {line["state"] for line in _shown(trainbox)} == {"pending"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--grid", "widht=1,2"],
            "--set widht=1: task tests.trainer.sweep.tasks:Brittle has no field widht; did "
            "you mean width?",
        ),
        (["--grid", "width=a,2"], "--set width=a: width is of type int"),
        (["--grid", "lr=0.1,nan"], "nan is not a finite number above 0"),
        (
            ["--grid", "deterministic=0,1"],
            "--grid deterministic=0,1: --deterministic is a switch; a sweep needs values",
        ),
        (["--grid", "lr=0.1,0.10"], "--grid lr=0.1,0.10: a value stands there twice"),
        (
            ["--grid", "width=4", "--grid", "width=8"],
            "--grid width=...: width is given twice: drop one",
        ),
        (
            ["--grid", "width=4,8", "--set", "width=2"],
            "--grid width=...: width is given twice: drop one",
        ),
        (
            ["--grid", "lr=1,2", "--lr", "3"],
            "--grid lr=1,2: --lr is given a value of its own as well: drop one",
        ),
        (
            ["--grid", "precision=fp32,fp16"],
            "--precision fp16 needs an NVIDIA GPU (the device is cpu",
        ),
        (["--range", "nosuch=1:2"], "has no field nosuch"),
        (["--range", "batch-size=-3:2"], "-3 is not a whole number from 1"),
        (["--name", "a/b"], "--name 'a/b' is not a folder's name"),
        (
            ["--run", "r"],
            "--run and --resume are for one training: a sweep has --name, and always goes on",
        ),
        (
            ["--per-gpu", "2"],
            "--per-gpu 2: no GPU is in use; --processes N sets the number of CPU slots",
        ),
        (
            ["--sampler", "tpe"],
            "--sampler tpe needs --trials N, --metric NAME and something to draw",
        ),
    ],
)
def test_wrong_words_are_told_before_anything_starts(
    trainbox: Trainbox, words: list[str], text: str
) -> None:
    ended = _sweep(trainbox, *words)
    assert ended.code == 2
    assert ended.err.startswith("trainbox: ")
    assert text in ended.err
    assert ended.err.count("\n") == 1
    assert not (trainbox.folder / "runs").exists()


def test_showing_what_is_not_there(trainbox: Trainbox) -> None:
    ended = trainbox("sweep", "show", "none")
    assert (ended.code, ended.err) == (
        2,
        "trainbox: runs/none holds no sweep: name one as it stands in the runs' folder, or "
        "give its --storage\n",
    )
    assert "Print what came out of the sweep NAME" in trainbox("sweep", "show", "--help").out
    page = trainbox("sweep", "--help").out
    for option in (
        "--gpus",
        "--per-gpu",
        "--seeds",
        "--grid",
        "--worker",
        "--batch-size",
        "--epochs",
    ):
        assert f"  {option}" in page
