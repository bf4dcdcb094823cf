"""One attempt at a trial of a script, with a shell command instead of `trainbox run`."""

import contextlib
import json
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trainer.records.event_file import EventFile
from trainer.sweep import script_worker
from trainer.sweep.script_worker import Attempt
from trainer.system.signals import StopRequest


class Sweep:
    """The other end of the worker's connection. It ends a trial at the step `prune_at`."""

    def __init__(self, prune_at: int | None = None) -> None:
        self.prune_at, self.got = prune_at, list[dict[str, Any]]()

    def send_bytes(self, message: bytes) -> None:
        self.got.append(json.loads(message))

    def recv_bytes(self) -> bytes:
        return json.dumps({"prune": self.got[-1]["step"] == self.prune_at}).encode()


class Trial:
    """A trial in the folder `run`, whose script is a shell command."""

    def __init__(self, run: Path) -> None:
        self.run, self.stop, self.sweep = run, StopRequest(), Sweep()
        (run / "logs").mkdir(parents=True)
        self.log = run / "logs/rank-0.log"

    def __call__(self, command: str, **order: Any) -> dict[str, Any]:
        whole = {
            "run": str(self.run),
            "log": str(self.log),
            "command": ["sh", "-c", f"cd {shlex.quote(str(self.run))}; {command}"],
            "metric": ("max", "accuracy"),
            "has_no_metric": False,
            "metric_regex": None,
            "pruned": False,
        }
        return Attempt(self.sweep, whole | order, self.stop).answer()  # type: ignore[arg-type]


_START = '{"exit_code": 0}'
_STARTED = f"""echo '{{"starts": [{_START}]}}' > manifest.json; """
_REPORT = """echo '{"step": 4, "accuracy": 0.5, "loss": 1}' >> metrics.jsonl; """


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path / "trial")


def test_a_script_that_reports_the_metric_has_succeeded(trial: Trial) -> None:
    answer = trial(_REPORT + _STARTED)
    assert answer == {"code": 0, "metrics": {"accuracy": 0.5, "loss": 1}}
    assert trial(_STARTED.replace(_START, f"{_START}, {_START}"), metric=None)["metrics"] == {
        "accuracy": 0.5,
        "loss": 1,
    }


@pytest.mark.parametrize(
    ("command", "metrics"),
    [
        ("", {}),
        (_REPORT.replace("0.5", '"0.5"').replace(', "loss": 1', ""), {}),
        (_REPORT.replace("accuracy", "acc"), {"acc": 0.5, "loss": 1}),
    ],
)
def test_a_script_that_does_not_report_the_metric_answers_with_what_it_has_reported(
    trial: Trial, command: str, metrics: dict[str, float]
) -> None:
    assert trial(command + _STARTED) == {"code": 0, "metrics": metrics}


def test_the_metric_is_read_from_the_output_or_from_files_of_tensorboard_or_not_at_all(
    trial: Trial,
) -> None:
    assert trial(_REPORT + _STARTED, metric=None, has_no_metric=True)["metrics"] == {}
    prints = "echo accuracy: 0.25 >> logs/rank-0.log; "
    started = _STARTED.replace(_START, f"{_START}, {_START}")
    answer = trial(_REPORT + prints + started, metric_regex="y: (.+)")
    assert answer == {"code": 0, "metrics": {"accuracy": 0.25}}
    with contextlib.closing(EventFile(trial.run)) as file:
        file.scalars({"f1": 0.75}, 1)
    answer = trial(_STARTED.replace(_START, f"{_START}, {_START}, {_START}"), metric=("max", "f1"))
    assert answer == {"code": 0, "metrics": {"f1": 0.75}}


@pytest.mark.parametrize(
    ("code", "answered", "message"),
    [
        (2, 2, "the script exited with code 2; its last lines: no such file"),
        (6, 6, "the script exited with code 6; its last lines: no such file"),
        (75, 1, "the script exited with code 75; its last lines: no such file"),
        (137, 1, "the script was killed by SIGKILL; its last lines: no such file"),
    ],
)
def test_a_script_that_fails_is_described_by_its_code_and_its_last_line(
    trial: Trial, code: int, answered: int, message: str
) -> None:
    trial.log.write_text("the output of an earlier attempt\n")
    started = _STARTED.replace(_START, json.dumps({"exit_code": code}))
    # `trainbox run` exits with 1 if the script exits with 75 by itself.
    fails = f"echo no such file >> logs/rank-0.log; {started} exit {1 if code == 75 else code}"
    assert trial(fails) == {"code": answered, "message": message}


def test_binary_output_is_not_passed_on(trial: Trial) -> None:
    binary = r"printf '\000\033[2J\377x\n' >> logs/rank-0.log; "
    started = _STARTED.replace(_START, '{"exit_code": 1}')
    message = trial(f"{binary}{started} exit 1")["message"]
    assert message.endswith(r"; its last lines: \x00\x1b[2J" "\N{REPLACEMENT CHARACTER}x")
    assert message.isprintable()


@pytest.mark.parametrize(
    ("code", "printed", "message"),
    [
        (2, "trainbox: a\ntrainbox: the script t.py cannot be read\nrun x\n", "the script t.py"),
        (3, "trainbox: --gpus 1 requested, no GPU found\n", "--gpus 1 requested, no GPU found"),
        (4, "trainbox: runs/t cannot be written (full)\n", "runs/t cannot be written (full)"),
        (1, "Traceback\n", "its process exited with code 1"),
    ],
)
def test_a_failure_of_trainbox_run_itself_has_its_code_and_message(
    trial: Trial, code: int, printed: str, message: str
) -> None:
    answer = trial(f"printf '%s' {shlex.quote(printed)} >&2; exit {code}")
    assert answer["code"] == code
    assert answer["message"].startswith(message)


def test_a_killed_trainbox_run_is_a_failure(trial: Trial) -> None:
    assert trial("kill -9 $$") == {"code": 1, "message": "its process was killed by SIGKILL"}


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_worker, "_SAVE_S", 0.01)
    monkeypatch.setattr(script_worker, "_KILL_S", 0.01)
    # Ignored signals stay ignored after exec.
    process = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; exec sleep 600"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    script_worker._end(process)
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL


def test_a_sweep_that_stops_gives_the_trial_back(trial: Trial) -> None:
    trial.stop.signal_name = "SIGTERM"
    answer = trial("exec sleep 600")
    assert answer == {"code": 75, "message": "stopped by SIGTERM", "saved": False}


def test_the_pruner_sees_each_report_with_the_metric_and_ends_the_trial(trial: Trial) -> None:
    reports = [{"step": 1, "accuracy": 0.5}, {"step": 1, "loss": 1}, {"step": 2, "accuracy": 0.1}]
    lines = "".join(json.dumps(report) + "\n" for report in reports)
    trial.sweep.prune_at = 2
    answer = trial(f"printf '%s' {shlex.quote(lines)} > metrics.jsonl; exec sleep 600", pruned=True)
    assert (answer["code"], answer["pruned"], answer["metrics"]) == (0, True, {})
    assert trial.sweep.got == [
        {"step": 1, "metrics": {"accuracy": 0.5}},
        {"step": 2, "metrics": {"accuracy": 0.1}},
    ]


def test_reports_that_are_found_at_the_end_are_compared_with_those_of_other_trials(
    trial: Trial,
) -> None:
    assert trial(_REPORT + _STARTED, pruned=True)["metrics"] == {"accuracy": 0.5, "loss": 1}
    assert trial.sweep.got == [{"step": 4, "metrics": {"accuracy": 0.5, "loss": 1}}]
