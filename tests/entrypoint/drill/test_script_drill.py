"""The drill of scripts that resume rightly, wrongly or not at all."""

import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import entrypoint.drill.starts
import entrypoint.drill.training
from entrypoint.drill.compare_files import check_file
from entrypoint.drill.script_drill import DrillRequest, drill_script
from entrypoint.drill.starts import Process
from tests.support.processes import Processes
from trainbox.errors import Failure, WrongUse
from trainer.programs.outputs.__main__ import main

# A training of 20 steps. `total` is its weight, and `order` the state of its sampler. A start that
# is to be killed waits for it, and leaves steps for the start after it. A file that appears in the
# run folder is complete.
_SCRIPT = """
import json, os, pathlib, random, sys, time
run = pathlib.Path(os.environ["TRAINBOX_RUN"])
processes = int(os.environ["PROCESSES"])
checkpoint = run / "checkpoint.json"
step, total, order = 0, 0.0, random.Random(1)
def save(path, content):
    (run.parent / path.name).write_text(content)
    (run.parent / path.name).rename(path)
def wait_for_the_kill():
    while "WAIT" in os.environ:
        time.sleep(1)
def state():
    version, numbers, gauss = order.getstate()
    return json.dumps([step, total, [version, list(numbers), gauss]])
if checkpoint.exists():
    step, total, (version, numbers, gauss) = json.loads(checkpoint.read_text())
    order.setstate((version, tuple(numbers), gauss))
while step < 20:
    if step == int(os.environ.get("WAIT", 20)):
        wait_for_the_kill()
    step += 1
    total += order.random()
    save(checkpoint, state())
    with (run / "metrics.jsonl").open("a") as file:
        print(json.dumps({"step": step}), file=file)
    time.sleep(0.002)
save(run / "result.json", json.dumps({"steps": step, "total": total}))
"""


class _Runs:
    """Starts scripts as `trainbox run` does, without the time of its start."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "train.py"
        self.script.write_text(_SCRIPT)
        self.started: list[str] = []
        self.wait_from = 1  # the first case that is killed; the ones before are undisturbed
        self.kills = 2

    def start(self, arguments: Sequence[str], log: Path, work: Path) -> Process:
        options = dict(zip(arguments[1:11:2], arguments[2:11:2], strict=True))
        run = Path(options["--runs-dir"], options["--run"])
        run.mkdir(exist_ok=True)
        (run / "config.json").touch()  # a file of Trainbox's own
        self.started.append(options["--processes"])
        env = {"TRAINBOX_RUN": str(run), "PROCESSES": options["--processes"]}
        kind, _, number = run.parent.name.partition("-")
        kill = int(log.stem.partition("-")[2]) + 1
        if kind == "case" and int(number) >= self.wait_from and kill <= self.kills:
            env["WAIT"] = str(19 if kill == self.kills else 12 * kill // (self.kills - 1))
        with log.open("w") as output:
            return subprocess.Popen(
                [sys.executable, "-S", "-E", str(self.script)],
                env=env,
                cwd=work,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def replace(self, old: str, new: str) -> None:
        text = self.script.read_text()
        assert old in text
        self.script.write_text(text.replace(old, new))


@pytest.fixture
def runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> _Runs:
    def compare(command: Sequence[str], **_: object) -> "subprocess.CompletedProcess[str]":
        """Compare in this process, without the start of another one."""
        code = main(list(command[-1:]))
        return subprocess.CompletedProcess(command, code, *capsys.readouterr())

    (tmp_path / "tmp").mkdir()
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    found = _Runs(tmp_path)
    monkeypatch.setattr(entrypoint.drill.training, "start", found.start)
    monkeypatch.setattr(entrypoint.drill.starts, "_POLL_S", 0.002)
    monkeypatch.setattr(subprocess, "run", compare)
    return found


_CPU = ("--device", "cpu", "--processes", "{processes}")


def _drill(
    runs: _Runs,
    counts: tuple[int, ...] = (1,),
    kills: int = 2,
    tolerance: float = 0.0,
    ignored: tuple[str, ...] = (),
) -> list[str]:
    runs.wait_from, runs.kills = max(runs.wait_from, len(counts)), kills
    request = DrillRequest(
        ("train.py", "--"), _CPU, "result.json", counts, kills, tolerance, ignored
    )
    draw = random.Random(1)  # noqa: S311
    return [line for text in drill_script(request, draw) for line in text.splitlines()]


def _kept(error: BaseException) -> Path:
    found = re.search(r"\(kept: (\S+)\)$", str(error))
    assert found
    return Path(found[1])


def test_a_script_that_forgets_its_sampler_is_named(runs: _Runs) -> None:
    runs.replace("    order.setstate", "    0 and order.setstate")
    with pytest.raises(Failure) as caught:
        _drill(runs)
    assert re.match(
        r"drill run: the training 1 -> 1 -> 1 differs from the undisturbed one: entry total: "
        r"\(float64\) 1 of 1 values differ, most: \S+ and \S+, by \S+; 1 of 2 entries differ; "
        r"two undisturbed trainings are the same, so its checkpoint does not have all of its state",
        str(caught.value),
    )
    assert caught.value.exit_code == 8
    kept = _kept(caught.value)
    assert (kept / "case-1/run/result.json").is_file() and (kept / "case-0/start-0.log").is_file()
    assert runs.started == ["1"] * 5  # the undisturbed training, 3 starts, and undisturbed again


def test_a_file_that_the_script_writes_into_the_current_folder_is_compared(runs: _Runs) -> None:
    Path("result.json").write_text('{"steps": 1, "total": 0}')  # of another training
    runs.replace('save(run / "result.json"', 'save(pathlib.Path("result.json")')
    left_out, *_, last = _drill(runs)
    assert left_out.startswith("result.json in the current folder: left out, because the script ")
    assert "the same bits in all 2 trainings" in last
    runs.replace("    order.setstate", "    0 and order.setstate")
    with pytest.raises(Failure, match="differs from the undisturbed one: entry total"):
        _drill(runs)


def test_a_training_that_differs_by_itself_is_named(runs: _Runs) -> None:
    runs.replace("random.Random(1)", "random.Random()")
    with pytest.raises(Failure, match="two undisturbed trainings differ: entry total: .*: seed"):
        _drill(runs)


def test_a_script_that_saves_only_at_sigterm_starts_over_after_sigkill(runs: _Runs) -> None:
    """At SIGTERM, it saves its newest state and exits, as `trainbox run` reports by code 75."""
    runs.replace("    save(checkpoint, state())\n", "")
    runs.replace("while step", "signal.signal(signal.SIGTERM, stop)\nwhile step")
    stop = "def stop(*_):\n    save(checkpoint, state())\n    sys.exit(75)\n"
    # The signal waits until a step is complete.
    mask = "    signal.pthread_sigmask(signal.SIG_{}, [signal.SIGTERM])\n"
    runs.replace("    step += 1\n", mask.format("BLOCK") + "    step += 1\n")
    sleep = "    time.sleep(0.002)\n"
    runs.replace(sleep, mask.format("UNBLOCK") + sleep)
    runs.replace("if checkpoint.exists", f"import signal\n{stop}if checkpoint.exists")
    runs.replace("while step < 20", 'save(run / "begun.txt", "")\nwhile step < 20')
    _, _, _, killed, _, note, last = _drill(runs)
    assert note == (
        "  started over: the steps began again after the kill: save during the training, and not "
        "only at SIGTERM"
    )
    assert re.match(
        r"  1 -> 1 -> 1  +SIGKILL at step \d+ \(started over\), SIGTERM at \d+  +\w+  same$", killed
    )
    assert last.startswith("  the same bits in all 2 trainings")


def test_a_script_that_ignores_sigterm_is_reported(
    runs: _Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrypoint.drill.starts, "STOP_BUDGET_S", 0)
    monkeypatch.setattr(entrypoint.drill.starts, "_SLACK_S", 0.05)
    runs.replace("while step", "import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile step")
    *_, killed, _, note, last = _drill(runs)
    assert re.match(
        r"  1 -> 1 -> 1  +SIGKILL at step \d+, SIGTERM at \d+ \(ignored\)  +\w+  same$", killed
    )
    assert note == "  ignored: the script did not stop at SIGTERM: let it save and exit"
    assert last.startswith("  the same bits in all 2 trainings:")


def test_a_script_that_finishes_at_sigterm_trains_again_if_no_resume_is_shown(runs: _Runs) -> None:
    """The first kill is early, so the start after it repeats nearly the whole training."""
    _of_replacements(runs, *_NO_STEPS)
    finishes = "import signal\nstopped = []\nsignal.signal(15, lambda *_: stopped.append(75))\n"
    runs.replace("while step", f"{finishes}while step")
    runs.replace('while "WAIT" in os.environ:', 'while "WAIT" in os.environ and not stopped:')
    runs.script.write_text(f"{runs.script.read_text()}sys.exit(*stopped)\n")
    *_, first, note, again, resumed, last = _drill(runs)
    assert re.match(r"  1 -> 1 -> 1  +SIGKILL at .* s, SIGTERM at .* s \(finished\)", first)
    assert note.endswith("did not stop at SIGTERM; so it trains again, with SIGKILL alone")
    assert re.match(r"  1 -> 1 -> 1  +SIGKILL at .* s, SIGKILL at .* s  +\w+  same$", again)
    assert "it read run/checkpoint.json" in resumed
    assert last.startswith("  the same bits in all 2 trainings")


def test_other_numbers_of_processes(runs: _Runs) -> None:
    lines = _drill(runs, counts=(1, 2), kills=1)
    assert [line.split("  ")[1] for line in lines[2:7]] == ["1", "2", "1 -> 1", "1 -> 2", "2 -> 1"]
    assert runs.started == ["1", "2", "1", "1", "1", "2", "2", "1"]
    assert [line.split()[3] for line in lines[4:7]] == ["SIGKILL", "SIGTERM", "SIGKILL"]
    assert [line[:10] for line in lines[7:10]] == ["  resumed,"] * 3
    assert lines[10].startswith("  the same bits in all 5 trainings")


def test_a_result_that_depends_on_the_number_of_processes(runs: _Runs) -> None:
    runs.replace('"total": total', '"total": total + 1e-6 * processes')
    with pytest.raises(
        Failure,
        match="the undisturbed training on 2 processes differs from the one on 1: entry total: .*"
        "this is the number of processes and not the resume",
    ):
        _drill(runs, counts=(1, 2), kills=1)
    lines = _drill(runs, counts=(1, 2), kills=1, tolerance=1e-5)
    assert [line.split("  ")[-1] for line in lines[2:7]] == [
        "same",
        "within 1e-05",
        "same",
        "within 1e-05",
        "same",
    ]
    assert lines[10] == ("  all 5 trainings agree within 1e-05; the largest difference is 1e-06")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("if checkpoint.exists():", "if False:", "the reported steps began again with the first"),
        (
            "step, total, order = 0",
            "step, total, order = 20",
            # It depends on the moment whether a start is killed.
            r"(no start was killed before its training was finished \(undisturbed, it wrote files "
            r"from .* s to .* s\): write checkpoints to|it read no file written before the kill|"
            "was the same at the kill)",
        ),
        (
            "    total += order.random()\n",
            '    save(run / "result.json", json.dumps({"steps": 20, "total": total}))\n',
            r"result.json was the same at the kill and at the end: train longer, or compare a",
        ),
    ],
)
def test_a_drill_that_tests_nothing_fails(runs: _Runs, old: str, new: str, message: str) -> None:
    runs.replace(old, new)
    if "no start was killed" in message:
        runs.wait_from = 100
    with pytest.raises(Failure, match=f"resume not shown, in the training 1 .*{message}") as caught:
        _drill(runs)
    assert caught.value.exit_code == 8 and _kept(caught.value).is_dir()


@pytest.mark.parametrize(
    ("old", "new", "code", "message"),
    [
        (
            "import json",
            "raise ValueError('no data')\nimport json",
            1,
            "the training failed with exit code 1: ValueError: no data",
        ),
        (
            "step, total, (version",
            "sys.exit('torn')\n    step, total, (version",
            1,
            "start 2, after a kill, failed with exit code 1: torn",
        ),
        (
            "while step",
            "import signal\nsignal.signal(15, lambda *_: sys.exit('torn'))\nwhile step",
            1,
            "start 2, stopped by SIGTERM, failed with exit code 1: torn",
        ),
        (
            'save(run / "result.json"',
            'save(run / "other.json"',
            2,
            "the undisturbed training: result.json is missing in ",
        ),
        (
            'save(run / "result.json"',
            '(run / "result.json").symlink_to("/dev/zero")\n"" and save(run / "result.json"',
            2,
            "the undisturbed training: result.json is missing in ",
        ),
    ],
)
def test_a_training_that_fails(runs: _Runs, old: str, new: str, code: int, message: str) -> None:
    runs.replace(old, new)
    with pytest.raises(Failure, match=message) as caught:
        _drill(runs)
    assert caught.value.exit_code == code


def test_processes_of_a_killed_start_end_with_it(runs: _Runs, tmp_path: Path) -> None:
    """A process that outlives its start would write into the next start's folder."""
    child = "subprocess.Popen(['sleep', '600'], env={}, start_new_session=True)"
    runs.replace(
        "while step",
        f"if 'WAIT' in os.environ:\n    import subprocess\n    child = {child}\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\nwhile step",
    )
    _of_replacements(runs, *_NO_STEPS)
    _drill(runs, kills=1)
    assert Processes([int((tmp_path / "pid").read_text())]).living() == []


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "/tmp/a.pt",
            "--compare /tmp/a.pt is neither in the run folder nor in the current one: give a path "
            "in it, such as a.pt",
        ),
        ("a.txt", "--compare a.txt has a format that cannot be read: use one of .safetensors .pt"),
    ],
)
def test_a_file_that_cannot_be_compared_is_refused_before_the_training(
    file: str, message: str
) -> None:
    with pytest.raises(WrongUse, match=re.escape(message)):
        check_file(file)


# Without steps, the time and the reads decide. The sleep is long enough for a measurement.
_NO_STEPS = [('"metrics.jsonl"', '"log.txt"'), ("time.sleep(0.002)", "time.sleep(0.06)")]


def _of_replacements(runs: _Runs, *replacements: tuple[str, str]) -> None:
    for old, new in replacements:
        runs.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "reads"),
    [
        ("if checkpoint.exists():", "if False:", "it read no file written before the kill"),
        (
            "if checkpoint.exists():",
            "if checkpoint.exists() and not checkpoint.read_text():",
            "it read run/checkpoint.json, written before the kill",
        ),
    ],
)
def test_a_script_that_saves_and_never_loads_is_not_certified(
    runs: _Runs, old: str, new: str, reads: str
) -> None:
    """It starts over after each kill, and ends with the same bits."""
    _of_replacements(runs, *_NO_STEPS, (old, new))
    with pytest.raises(Failure, match=rf"resume not shown, .* repeated \d+ % .*{reads}"):
        _drill(runs, kills=1)


def test_a_current_folder_that_cannot_be_copied(
    runs: _Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", full)
    Path("train.py").touch()
    with pytest.raises(Failure, match="cannot be copied to .*No space left.*set TMPDIR") as caught:
        _drill(runs)
    assert caught.value.exit_code == 4


def test_an_old_checkpoint_in_the_current_folder_is_neither_read_nor_changed(runs: _Runs) -> None:
    runs.replace('run / "checkpoint.json"', 'pathlib.Path("checkpoint.json")')
    runs.replace("(run.parent / path.name).rename", "(run.parent / path.name).replace")
    old = "[18, 99.0, [3, [], null]]"
    Path("checkpoint.json").write_text(old)
    runs.replace("setstate((version, tuple(numbers), gauss))", "setstate(as_state(numbers))")
    as_state = "def as_state(n): return (3, tuple(n), None) if n else order.getstate()\n"
    runs.replace("if checkpoint.exists", f"{as_state}if checkpoint.exists")
    lines = _drill(runs)
    assert lines[0] == (
        "checkpoint.json in the current folder: left out, because the script writes such files"
    )
    assert lines[-1].startswith("  the same bits in all 2 trainings")
    assert Path("checkpoint.json").read_text() == old


def test_a_script_that_writes_to_the_current_folder_itself_is_named(runs: _Runs) -> None:
    runs.replace("while step", f"pathlib.Path({str(Path.cwd())!r}, 'a.pt').touch()\nwhile step")
    with pytest.raises(Failure, match=r"a\.pt changed in the current folder during the drill"):
        _drill(runs)


def test_another_run_may_write_to_the_current_folder_meanwhile(runs: _Runs) -> None:
    run = Path.cwd() / "runs/other"
    (run / "logs").mkdir(parents=True)
    (run / "lock").touch()
    writes = f"pathlib.Path({str(run)!r}, 'model.pt').write_text(str(time.time()))"
    runs.replace("while step", f"{writes}\nwhile step")
    assert _drill(runs)[-1].startswith("  the same bits in all 2 trainings: ")


def test_a_result_with_its_folder_or_a_time(runs: _Runs) -> None:
    runs.replace('"total": total', '"total": total, "run": str(run), "here": os.getcwd()')
    assert _drill(runs)[-1].startswith("  the same bits in all 2 trainings: ")
    runs.replace('"total": total', '"total": total, "resumed": bool(starts)')
    runs.replace("while step", "starts = step\nwhile step")
    with pytest.raises(Failure, match=r"entry resumed: .*most: False and True.*--ignore NAME"):
        _drill(runs)
    assert ", without resumed (--ignore): " in _drill(runs, ignored=("resumed",))[-1]
