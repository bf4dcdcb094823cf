"""The supervisor of a training: exit codes, signals and kills, with real processes."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from entrypoint.cli import commands as cli
from entrypoint.cli import launching, planning, stored
from entrypoint.launch.plan import LaunchPlan
from entrypoint.launch.supervise import (
    SCRIPT_RUN,
    SCRIPT_SWEEP,
    TRAINING,
    UNSAVED_TRAINING,
    Child,
    Ending,
    _exit_code,
    _Fault,
)
from tests.support.commands import clean_environment, finish
from trainbox.contract.errors import ExitCode
from trainbox.contract.internal import Internal

# A shell may have started the tests with some of these signals ignored, as nohup does. A Python
# child would inherit this.
SUPERVISE = """
import os, signal, sys
from entrypoint.launch.supervise import supervise
child, budget, ignored = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
    signal.signal(signal.Signals[name], signal.SIG_IGN if name in ignored else signal.SIG_DFL)
sys.exit(supervise([sys.executable, "-c", child], os.environ, budget).code)
"""

# A signal then never counts as the echo of the previous signal.
NO_ECHO = SUPERVISE.replace(
    "child, budget",
    "import entrypoint.launch.supervise; entrypoint.launch.supervise._ECHO_S = 0\nchild, budget",
    1,
)

# Nobody reads its standard error, as on a paused terminal.
PAUSED = SUPERVISE.replace(
    "child, budget",
    """reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True:
        os.write(writer, bytes(512))
except BlockingIOError:
    os.set_blocking(writer, True)
os.dup2(writer, 2)
child, budget""",
    1,
)

# Each program prints its process id when it is ready, and the name of each signal that it gets.
TALKS = """
import os, signal
def print_line(text):
    os.write(1, f"{text}\\n".encode())  # one write, so that lines do not mix
def take_signals(handler):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, handler)
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
ENDS_AFTER_A_LINE = TALKS + "print_line(os.getpid()); input(); raise SystemExit(7)"

RECEIVED = "received: saving a checkpoint, then stopping (send it again to stop at once)"
KILLED = "killed; the same command resumes from the newest checkpoint, if there is one"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a supervisor of a child with this code. It is killed at the end of the test."""
    with ExitStack() as stack:

        def start(
            child: str, *ignored: str, budget_s: float = 60, program: str = SUPERVISE
        ) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", program, child, str(budget_s), *ignored],
                env=clean_environment(NAME="a value"),
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR2])
def test_a_child_killed_by_a_signal_gives_the_exit_code_of_a_shell(
    start: Start, number: signal.Signals
) -> None:
    ended = finish(start(f"import os; os.kill(os.getpid(), {int(number)})"))
    assert ended.code == 128 + number
    assert ended.err == (
        f"trainbox: the training was killed by {number.name}: the same command resumes "
        "from the newest checkpoint, if there is one\n"
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
    process = start("import os; print(os.environ['NAME'], input())")
    assert process.communicate("a line\n") == ("a value a line\n", "")


def test_signals_reach_the_child_while_the_terminal_is_paused(start: Start) -> None:
    hurried = "import trainbox.contract.streams as s, entrypoint.launch.supervise as v\n"
    hurried += "s._UNREAD_MESSAGE_S = v._ECHO_S = 0\nchild, budget"
    process = start(IGNORES, program=PAUSED.replace("child, budget", hurried, 1))
    first_line(process)
    process.send_signal(signal.SIGTERM)
    assert line(process) == "SIGTERM"
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_reaches_the_child(start: Start, number: signal.Signals) -> None:
    process = start(ENDS_WHEN_TOLD)
    first_line(process)
    process.send_signal(number)
    ended = finish(process)
    # Python turns an early SIGINT into a traceback.
    handed_on = "SIGUSR2" if number == signal.SIGINT else number.name
    assert (ended.code, ended.out) == (75, f"{handed_on}\n")
    assert ended.err == f"trainbox: {number.name} {RECEIVED}\n"


def test_a_signal_before_the_handlers_exist_counts_as_preempted(start: Start) -> None:
    process = start("import os, signal; os.write(1, b'1\\n'); signal.pause()")
    assert line(process) == "1"
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    stopped = "stopped by SIGTERM, and nothing is lost: start the same command again"
    assert (ended.code, ended.err) == (
        75,
        f"trainbox: SIGTERM {RECEIVED}\ntrainbox: {stopped}\n",
    )


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
    process = start(IGNORES_AS_TWO, program=NO_ECHO, budget_s=1e6)
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
    program = NO_ECHO.replace("_ECHO_S = 0", "_ECHO_S = 60")
    saves = "take_signals(lambda number, frame: print_line(signal.Signals(number).name))\ninput()"
    process = start(TALKS + saves, program=program)
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


@pytest.mark.skipif(
    sys.platform != "linux", reason="which signals a process takes is read from /proc"
)
def test_an_ignored_sighup_stays_ignored(start: Start) -> None:
    process = start(ENDS_AFTER_A_LINE, "SIGHUP")
    first_line(process)
    status = dict(
        text.split(":", 1) for text in Path(f"/proc/{process.pid}/status").read_text().splitlines()
    )
    caught, ignored = int(status["SigCgt"], 16), int(status["SigIgn"], 16)
    hangup, terminate = 1 << (signal.SIGHUP - 1), 1 << (signal.SIGTERM - 1)
    assert (caught & hangup, ignored & hangup, caught & terminate) == (0, hangup, terminate)
    process.send_signal(signal.SIGHUP)
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
    at_once = SUPERVISE.replace(
        "sys.exit(supervise",
        """
install = signal.signal
def install_and_send(number, handler):
    install(number, handler)
    signal.raise_signal(number)
signal.signal = install_and_send
sys.exit(supervise""",
    )
    ended = finish(start("print('started')", program=at_once))
    assert (ended.code, ended.out, ended.err) == (75, "", "")


def watched(fatal: str | None, final_check: str | None) -> str:
    """Return the supervisor with a watch that gives these answers once the child is ready."""
    watch = f"""

class HardwareWatch:
    def fatal(self): return {fatal!r} if os.path.exists(child_is_ready) else None
    def final_check(self): return {final_check!r}
child_is_ready = child.rpartition("# ")[2]
sys.exit(supervise([sys.executable, "-c", child], os.environ, budget, HardwareWatch()).code)
"""
    return SUPERVISE.replace("sys.exit(supervise", watch + "sys.exit(supervise")


def marking(child: str, mark: Path) -> str:
    """Return the child, which makes the file `mark` when it is ready."""
    return (
        child.replace(
            "def print_line(text):",
            f"def print_line(text, mark={str(mark)!r}):\n    open(mark, 'w').close()",
        )
        + f"# {mark}"
    )


def test_a_fatal_finding_stops_the_child_and_exits_with_the_hardware_code(
    start: Start, tmp_path: Path
) -> None:
    ended = finish(
        start(marking(ENDS_WHEN_TOLD, tmp_path / "ready"), program=watched("GPU 1", "GPU 1"))
    )
    assert (ended.code, ended.out.splitlines()[1:]) == (3, ["SIGTERM"])
    assert (
        ended.err == "trainbox: the hardware failed: saving a checkpoint, then stopping (send a "
        "signal to stop at once)\n"
    )


@pytest.mark.parametrize(
    ("code", "final_check", "expected"),
    [
        (0, "GPU 1", 0),
        (1, "GPU 1", 3),
        (1, None, 1),
        (2, "GPU 1", 2),
        (7, "GPU 1", 3),
        (75, None, 75),
    ],
)
def test_a_crash_on_broken_hardware_exits_with_the_hardware_code(
    start: Start, code: int, final_check: str | None, expected: int
) -> None:
    assert (
        finish(start(f"raise SystemExit({code})", program=watched(None, final_check))).code
        == expected
    )


def test_the_watch_logs_which_gpu_has_failed_if_cuda_reports_it() -> None:
    watch = Mock(final_check=Mock(return_value=None))
    assert _exit_code(3, (), watch, None, TRAINING, []) == 3
    watch.final_check.assert_called_once_with()


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


@pytest.mark.parametrize(
    ("code", "after_sigterm", "after_sigint", "alone"),
    [
        (0, 75, 0, 0),
        (75, 75, 75, 75),
        (143, 75, 75, 143),
        (-15, 75, 75, 143),
        (-2, 75, 75, 130),
        (3, 3, 3, 3),
        (1, 1, 1, 1),
    ],
)
def test_the_exit_code_of_a_script(
    code: int, after_sigterm: int, after_sigint: int, alone: int
) -> None:
    assert _exit_code(code, [signal.SIGTERM], None, None, SCRIPT_RUN, []) == after_sigterm
    assert _exit_code(code, [signal.SIGINT], None, None, SCRIPT_RUN, []) == after_sigint
    assert _exit_code(code, (), None, None, SCRIPT_RUN, []) == alone


def test_a_script_that_saves_on_broken_hardware_exits_with_the_hardware_code() -> None:
    fault = _Fault("GPU 1 has failed", ExitCode.HARDWARE)
    assert _exit_code(0, [signal.SIGTERM], None, fault, SCRIPT_RUN, []) == 3
    assert _exit_code(2, [], None, fault, SCRIPT_RUN, []) == 2


@pytest.mark.parametrize("code", [0, 75, 1, -15])
def test_a_script_that_ends_after_a_hang_exits_with_its_code(code: int) -> None:
    fault = _Fault("the script hangs", ExitCode.NETWORK)
    assert _exit_code(code, [signal.SIGTERM], None, fault, SCRIPT_RUN, []) == 7


def test_a_script_that_hangs_and_ignores_sigterm_is_killed(start: Start, tmp_path: Path) -> None:
    hung = "hung=lambda: 'it hangs' if os.path.exists(child.rpartition('# ')[2]) else None"
    program = SUPERVISE.replace("budget).code", f"0.1, {hung}).code")
    ended = finish(start(marking(TALKS + GOES_ON, tmp_path / "ready"), program=program))
    assert ended.code == 7
    assert "it hangs: saving a checkpoint" in ended.err and "killed" in ended.err
