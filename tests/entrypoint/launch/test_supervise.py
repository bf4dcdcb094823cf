"""The supervisor of a training: exit codes, signals and kills, with real processes."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from entrypoint.cli import commands as cli
from entrypoint.cli import launching, planning, stored
from entrypoint.cli import training as _training  # noqa: F401 - before make_launch is replaced
from entrypoint.launch.children import (
    SCRIPT_RUN,
    SCRIPT_SWEEP,
    TRAINING,
    UNSAVED_TRAINING,
    Child,
)
from entrypoint.launch.plan import LaunchPlan
from entrypoint.launch.stopping import Fault
from entrypoint.launch.supervise import Ending, _exit_code
from tests.support.commands import clean_environment, finish
from trainbox.errors import INTERRUPT, ExitCode
from trainbox.processes.environment import Internal

# A shell may have started the tests with some of these signals ignored, as nohup does. A Python
# child would inherit this. `before` is code that runs before the call, whose arguments are `more`.
SUPERVISE = """
import os, signal, sys
from entrypoint.launch import supervise
child, budget, before, *ignored = sys.argv[1:]
for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGVTALRM"):
    signal.signal(signal.Signals[name], signal.SIG_IGN if name in ignored else signal.SIG_DFL)
more = {}
exec(before)
command = [sys.executable, "-c", child]
sys.exit(supervise.supervise(command, os.environ, float(budget), **more).code)
"""

# A signal then never counts as the echo of the previous signal.
NO_ECHO = "supervise._ECHO_S = 0\n"

# Each program prints its process id when it is ready, and the name of each signal that it gets. It
# then makes the file READY.
TALKS = """
import os, signal
def print_line(text):
    os.write(1, f"{text}\\n".encode())  # one write, so that lines do not mix
    open(os.environ["READY"], "w").close()
def take_signals(handler):
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGVTALRM"):
        signal.signal(signal.Signals[name], handler)
    print_line(os.getpid())
"""
ENDS_WHEN_TOLD = (
    TALKS
    + """
def report(number, frame):
    print_line(signal.Signals(number).name)
    raise SystemExit(75)
take_signals(report)
signal.pause()
"""
)
GOES_ON = """
take_signals(lambda number, frame: print_line(signal.Signals(number).name))
while True:
    signal.pause()
"""
IGNORES, IGNORES_AS_TWO = TALKS + GOES_ON, TALKS + "os.fork()" + GOES_ON

RECEIVED = "received: saving what was trained, then stopping (send it again to stop at once)"
KILLED = "killed; the same command resumes from the newest checkpoint, if there is one"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a supervisor of a child with this code. It is killed at the end of the test."""
    with ExitStack() as stack:

        def start(
            child: str, *ignored: str, budget_s: float = 60, before: str = ""
        ) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISE, child, str(budget_s), before, *ignored],
                env=clean_environment(READY=str(tmp_path / "ready")),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)  # closes the pipes and waits,
            stack.callback(process.kill)  # after this
            return process

        yield start


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def first_line(process: subprocess.Popen[str]) -> int:
    """Return the process id of the child, which is then ready."""
    return int(line(process))


def test_a_child_killed_by_a_signal_gives_the_exit_code_of_a_shell(start: Start) -> None:
    ended = finish(start("import os; os.kill(os.getpid(), 9)"))
    assert (ended.code, ended.err) == (
        137,
        "trainbox: the training was killed by SIGKILL: the same command resumes from the newest "
        "checkpoint, if there is one\n",
    )


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["verify", "digits"], UNSAVED_TRAINING),
        (["train", "digits", "--measure-seconds", "5"], UNSAVED_TRAINING),  # a case of the bench
        (["train", "digits"], TRAINING),
    ],
)
def test_only_verify_and_the_bench_do_not_resume(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], kind: Child
) -> None:
    seen: list[Child] = []
    plan = LaunchPlan("single", "cpu", (), 1, 1, (), "no GPU visible")
    launch = planning.Launch(plan)
    monkeypatch.setattr(planning, "make_launch", lambda *_: launch)
    monkeypatch.setattr(stored, "check_run", lambda *_: None)
    ending = Ending(75, signalled=True)
    monkeypatch.setattr(launching, "supervise", lambda *_, kind, **__: seen.append(kind) or ending)
    assert CliRunner().invoke(cli.cli, arguments).exit_code == 75
    assert seen == [kind]


def test_the_child_has_the_environment_and_the_streams(start: Start) -> None:
    process = start("import os; print(os.environ['READY'][-5:], input())")
    assert process.communicate("a line\n") == ("ready a line\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGXCPU])
def test_the_first_signal_reaches_the_child(start: Start, number: signal.Signals) -> None:
    process = start(ENDS_WHEN_TOLD)
    first_line(process)
    process.send_signal(number)
    ended = finish(process)
    # Python turns an early SIGINT into a traceback.
    other = {signal.SIGINT: "SIGVTALRM"}
    handed_on = other.get(number, number.name)
    assert (ended.code, ended.out) == (75, f"{handed_on}\n")
    assert ended.err == f"trainbox: {number.name} {RECEIVED}\n"


def test_a_signal_before_the_handlers_exist_is_not_a_saved_training(start: Start) -> None:
    process = start("import os, signal; os.write(1, b'1\\n'); signal.pause()")
    assert line(process) == "1"
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    stopped = "stopped by SIGTERM, and nothing is lost: start the same command again"
    assert (ended.code, ended.err) == (
        143,
        f"trainbox: SIGTERM {RECEIVED}\ntrainbox: {stopped}\n",
    )


def test_a_signal_to_all_processes_is_a_stop_also_if_the_child_ends_first(start: Start) -> None:
    """As srun sends it."""
    sends = "[os.kill(pid, signal.SIGUSR1) for pid in (os.getppid(), os.getpid())]"
    ended = finish(start(f"import os, signal; {sends}"))
    stopped = "stopped by SIGUSR1, and nothing is lost: start the same command again"
    assert (ended.code, ended.err.splitlines()[-1]) == (138, f"trainbox: {stopped}")


def test_a_signal_at_the_end_does_not_replace_the_exit_code() -> None:
    """At its end, Python removes its handlers. A signal that is not ignored would then kill it."""
    ends = (
        "import atexit, signal\n"
        "atexit.register(lambda: print(signal.getsignal(signal.SIGTERM).name))\n"
        "from trainbox_start import main\n"
        "main()"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", ends, "train", "--epochs", "0"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "SIG_IGN\n")


def test_the_second_signal_kills_the_whole_session(start: Start) -> None:
    process = start(IGNORES_AS_TWO, before=NO_ECHO, budget_s=1e6)
    first_line(process)
    first_line(process)
    process.send_signal(signal.SIGTERM)
    assert line(process) == "SIGTERM"
    process.send_signal(signal.SIGINT)
    # The second child holds the pipe, so the end of the output shows its end.
    ended = finish(process)
    assert ended.code == 128 + signal.SIGINT
    assert ended.err.splitlines() == [
        f"trainbox: SIGTERM {RECEIVED}",
        f"trainbox: second signal: {KILLED}",
    ]


def test_a_signal_delivered_twice_at_once_counts_once(start: Start) -> None:
    saves = "take_signals(lambda number, frame: print_line(signal.Signals(number).name))\ninput()"
    process = start(TALKS + saves, before="supervise._ECHO_S = 60")
    first_line(process)
    process.send_signal(signal.SIGTERM)
    assert line(process) == "SIGTERM"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)  # a supervisor that counts it kills the child now
    assert process.communicate("saved\n")[0] == ""
    assert process.returncode == 0


def test_a_child_that_does_not_stop_in_time_is_killed(start: Start) -> None:
    process = start(IGNORES, budget_s=1)
    first_line(process)
    process.send_signal(signal.SIGUSR1)
    ended = finish(process)
    assert (ended.code, ended.out) == (137, "SIGUSR1\n")
    assert ended.err.splitlines() == [
        f"trainbox: SIGUSR1 {RECEIVED}",
        f"trainbox: not stopped 1 s after the signal: {KILLED}",
    ]


def test_an_ignored_sighup_stays_ignored(start: Start) -> None:
    process = start(TALKS + "print_line(os.getpid()); input(); raise SystemExit(7)", "SIGHUP")
    first_line(process)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)  # a supervisor that heeds it forwards it now
    assert process.communicate("continue\n") == ("", "")
    assert process.returncode == 7


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere no kernel kills a child with its parent"
)
def test_a_child_is_killed_with_its_parent(start: Start) -> None:
    process = start(IGNORES)
    descriptor = os.pidfd_open(first_line(process))
    try:
        process.kill()
        assert process.wait() == -signal.SIGKILL
        # readable at its death, also as a zombie
        dead, _, _ = select.select([descriptor], [], [], 60)
        assert dead, "the child lives on"
    finally:
        os.close(descriptor)


def test_a_signal_before_the_start_starts_nothing(start: Start) -> None:
    at_once = """
install = signal.signal
def install_and_send(number, handler):
    install(number, handler)
    signal.raise_signal(number)
signal.signal = install_and_send
"""
    ended = finish(start("print('started')", before=at_once))
    assert (ended.code, ended.out, ended.err) == (143, "", "")


def watched(fatal: str | None, final_check: str | None) -> str:
    """Return code for a watch that gives these answers once the child is ready."""
    return f"""
class HardwareWatch:
    def fatal(self): return {fatal!r} if os.path.exists(os.environ["READY"]) else None
    def final_check(self):
        print("checked")
        return {final_check!r}
more["watch"] = HardwareWatch()
"""


def test_a_fatal_finding_stops_the_child_and_exits_with_the_hardware_code(start: Start) -> None:
    ended = finish(start(ENDS_WHEN_TOLD, before=watched("GPU 1", "GPU 1")))
    assert (ended.code, "SIGTERM" in ended.out.splitlines()) == (3, True)
    assert (
        ended.err
        == "trainbox: the hardware failed: saving what was trained, then stopping (send a "
        "signal to stop at once)\n"
    )


@pytest.mark.parametrize(
    ("code", "final_check", "expected", "checks"),
    [
        (0, "GPU 1", 0, False),
        (1, "GPU 1", 3, True),
        (1, None, 1, True),
        (2, "GPU 1", 2, False),
        (3, None, 3, True),  # CUDA reports a failure, and the watch logs which GPU has failed
        (7, "GPU 1", 3, True),
        (75, None, 75, True),
    ],
)
def test_a_crash_on_broken_hardware_exits_with_the_hardware_code(
    start: Start, code: int, final_check: str | None, expected: int, checks: bool
) -> None:
    ended = finish(start(f"raise SystemExit({code})", before=watched(None, final_check)))
    assert (ended.code, ended.out) == (expected, "checked\n" if checks else "")


@pytest.mark.parametrize(
    ("code", "finishes", "expected"), [(0, True, 0), (0, False, 1), (75, False, 75), (2, False, 2)]
)
def test_a_training_that_ends_itself_with_code_0_has_not_finished(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    code: int,
    finishes: bool,
    expected: int,
) -> None:
    """The trainer makes a file when it has finished. After os._exit(0) in a task, it is missing."""

    def supervise(_argv: object, env: dict[str, str], **_more: object) -> Ending:
        if finishes:
            Path(env[Internal.FINISHED]).touch()
        return Ending(code, signalled=False)

    monkeypatch.setattr(launching, "supervise", supervise)
    plan = LaunchPlan("single", "cpu", (), 1, 1, (), "no GPU visible")
    with pytest.raises(SystemExit) as ended:
        launch = planning.Launch(plan)
        launching.supervised(launch, SCRIPT_SWEEP)
    assert ended.value.code == expected
    text = "the sweep exited with code 0 before it was finished: does the user's code call os._exit"
    assert (text in capfd.readouterr().err) is (finishes is False and code == 0)


_SAVES = replace(SCRIPT_RUN, has_saved=lambda _: True)
_SAVES_NOTHING = replace(SCRIPT_RUN, has_saved=lambda _: False)


@pytest.mark.parametrize(
    ("code", "after_sigterm", "after_sigint", "alone"),
    [
        (0, 75, 0, 0),
        (75, 75, 75, 75),
        (143, 75, 75, 143),
        (-15, 75, 75, 143),
        (-2, 75, 75, 130),
        (1, 1, 1, 1),
    ],
)
def test_the_exit_code_of_a_script(
    code: int, after_sigterm: int, after_sigint: int, alone: int
) -> None:
    assert _exit_code(code, [15], [signal.SIGTERM], None, None, _SAVES, []) == after_sigterm
    assert _exit_code(code, [2], [signal.SIGINT], None, None, _SAVES, []) == after_sigint
    assert _exit_code(code, [], (), None, None, _SAVES, []) == alone


@pytest.mark.parametrize(
    ("kind", "code", "received", "expected"),
    [
        (TRAINING, 75, signal.SIGTERM, 75),
        (TRAINING, 143, signal.SIGUSR1, 138),  # torchrun, or a rehearsal
        (TRAINING, -INTERRUPT, signal.SIGINT, 130),
        (TRAINING, -signal.SIGUSR2, signal.SIGUSR2, 140),
        (TRAINING, 0, signal.SIGTERM, 0),
        (_SAVES_NOTHING, 75, signal.SIGTERM, 143),
        (_SAVES_NOTHING, 75, signal.SIGINT, 130),
        (_SAVES_NOTHING, 75, signal.SIGHUP, 129),
        (_SAVES_NOTHING, 0, signal.SIGUSR1, 138),
        (_SAVES_NOTHING, 143, signal.SIGXCPU, 152),
        (_SAVES_NOTHING, -signal.SIGTERM, signal.SIGUSR2, 140),
        (_SAVES_NOTHING, 1, signal.SIGUSR1, 1),
        (_SAVES, -signal.SIGTERM, signal.SIGUSR1, 75),
        (SCRIPT_RUN, 0, signal.SIGTERM, 143),
        (SCRIPT_RUN, 0, signal.SIGINT, 0),
        (SCRIPT_RUN, -signal.SIGINT, signal.SIGINT, 130),
        (SCRIPT_RUN, 130, signal.SIGINT, 130),
    ],
)
def test_a_stop_before_anything_new_was_saved_has_the_code_of_its_signal(
    kind: Child, code: int, received: signal.Signals, expected: int
) -> None:
    sent = kind.signals(received)[:1]
    assert _exit_code(code, [received], sent, None, None, kind, []) == expected


def test_the_exit_code_of_a_script_that_is_stopped_after_a_fault() -> None:
    broken = Fault("GPU 1 has failed", ExitCode.HARDWARE)
    assert _exit_code(0, [], [signal.SIGTERM], None, broken, SCRIPT_RUN, []) == 3
    assert _exit_code(2, [], [], None, broken, SCRIPT_RUN, []) == 2
    hangs = Fault("the script hangs", ExitCode.NETWORK)
    for code in (0, 75, 1, -15):
        assert _exit_code(code, [], [signal.SIGTERM], None, hangs, SCRIPT_RUN, []) == 7


def test_a_script_that_hangs_and_ignores_sigterm_is_killed(start: Start) -> None:
    hangs = (
        "from entrypoint.launch.stopping import Fault; more['failed'] = lambda: "
        "Fault('it hangs', 7) if os.path.exists(os.environ['READY']) else None"
    )
    ended = finish(start(IGNORES, budget_s=0.1, before=hangs))
    assert ended.code == 7
    assert "it hangs: saving what was trained" in ended.err and "killed" in ended.err
