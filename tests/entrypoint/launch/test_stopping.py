"""The steps of a stop: what a child gets after each signal, fault and time, as a table."""

from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU

import pytest

from entrypoint.launch.children import SCRIPT_RUN, TRAINING, Child
from entrypoint.launch.stopping import Fault, Kill, Stop
from trainbox.errors import INTERRUPT, ExitCode

HOT = Fault("the hardware failed", ExitCode.HARDWARE)
KILL = "kill"

# What the supervisor sees at a time in seconds: its signals so far, and a fault | what the child
# gets: a signal, or KILL with the exit code of the supervisor.
ROWS = {
    "nothing happens": (TRAINING, [(0, [], None, None), (999, [], None, None)]),
    "one signal, and the child has 50 s": (
        TRAINING,
        [
            (5, [SIGTERM], None, SIGTERM),
            (55, [SIGTERM], None, None),
            (55.1, [SIGTERM], None, (KILL, 128 + SIGKILL)),
        ],
    ),
    "Ctrl-C reaches a training as another signal": (
        TRAINING,
        [(0, [SIGINT], None, INTERRUPT), (1, [SIGINT, SIGINT], None, (KILL, 128 + SIGINT))],
    ),
    "a second signal, even of another kind, kills": (
        TRAINING,
        [(0, [SIGUSR1], None, SIGUSR1), (1, [SIGUSR1, SIGHUP], None, (KILL, 128 + SIGHUP))],
    ),
    "Grid Engine and LSF warn by SIGUSR2": (TRAINING, [(0, [SIGUSR2], None, SIGUSR2)]),
    "a limit of CPU time warns by SIGXCPU": (TRAINING, [(0, [SIGXCPU], None, SIGXCPU)]),
    "a script gets each warning as SIGTERM": (SCRIPT_RUN, [(0, [SIGXCPU], None, SIGTERM)]),
    "a script gets a second chance after Ctrl-C": (
        SCRIPT_RUN,
        [
            (0, [SIGINT], None, SIGINT),
            (1, [SIGINT, SIGINT], None, SIGTERM),
            (2, [SIGINT, SIGINT], None, None),
            (3, [SIGINT, SIGINT, SIGINT], None, (KILL, 128 + SIGINT)),
        ],
    ),
    "the second chance does not extend the time": (
        SCRIPT_RUN,
        [
            (0, [SIGINT], None, SIGINT),
            (49, [SIGINT, SIGINT], None, SIGTERM),
            (50.1, [SIGINT, SIGINT], None, (KILL, 128 + SIGINT)),
        ],
    ),
    "two signals before the first look count as one": (
        TRAINING,
        [(0, [SIGTERM, SIGINT], None, SIGTERM), (1, [SIGTERM, SIGINT], None, None)],
    ),
    "a fault stops the child, and its code remains": (
        TRAINING,
        [(0, [], HOT, SIGTERM), (50, [], HOT, None), (51, [], HOT, (KILL, ExitCode.HARDWARE))],
    ),
    "a signal after a fault kills, with the code of the fault": (
        TRAINING,
        [(0, [], HOT, SIGTERM), (1, [SIGINT], HOT, (KILL, ExitCode.HARDWARE))],
    ),
    "a fault after a signal changes only the code": (
        TRAINING,
        [
            (0, [SIGTERM], None, SIGTERM),
            (1, [SIGTERM], HOT, None),
            (51, [SIGTERM], HOT, (KILL, ExitCode.HARDWARE)),
        ],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_steps_of_a_stop(name: str) -> None:
    kind, steps = ROWS[name]
    stop = Stop(kind, 50)
    for now_s, received, fault, expected in steps:
        todo = stop.next(received, fault, now_s)
        found = (KILL, todo.code) if isinstance(todo, Kill) else todo and todo.number
        assert found == expected, f"at {now_s} s"


@pytest.mark.parametrize(
    ("kind", "received", "fault", "text"),
    [
        (
            TRAINING,
            [SIGTERM],
            None,
            "SIGTERM received: saving what was trained, then stopping (send it again to stop at "
            "once)",
        ),
        (
            SCRIPT_RUN,
            [SIGINT],
            None,
            "SIGINT received: the script gets SIGINT and has 50 s to save and exit (send it again "
            "to send SIGTERM at once)",
        ),
        (
            TRAINING,
            [],
            HOT,
            "the hardware failed: saving what was trained, then stopping (send a signal to stop at "
            "once)",
        ),
    ],
)
def test_the_message_of_a_stop(
    kind: Child, received: list[int], fault: Fault | None, text: str
) -> None:
    todo = Stop(kind, 50).next(received, fault, 0)
    assert todo is not None and todo.text == text


@pytest.mark.parametrize(
    ("kind", "fault", "before", "text"),
    [
        (TRAINING, None, [SIGTERM], "second signal: killed; "),
        (TRAINING, HOT, [], "first signal: killed; "),
        (SCRIPT_RUN, None, [SIGINT, SIGINT], "third signal: killed; "),
    ],
)
def test_the_message_of_a_kill_counts_the_signals(
    kind: Child, fault: Fault | None, before: list[int], text: str
) -> None:
    stop = Stop(kind, 50)
    for number in range(len(before) + 1):
        stop.next(before[:number], fault, 0)
    todo = stop.next([*before, SIGTERM], fault, 1)
    assert todo is not None and todo.text.startswith(text)
