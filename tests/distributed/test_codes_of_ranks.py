"""The exit code of a node follows from its ranks' exit codes."""

import argparse
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trainer.programs.ranks.messages import End
from trainer.programs.ranks.ports import PortWatch, sockets_at
from trainer.programs.ranks.store import have_met
from trainer.programs.ranks.torchrun import _exit_code, _report, _run_torchrun

_ABORT, _KILL = -signal.SIGABRT, -signal.SIGKILL


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({7}, 7),
        ({1, 7}, 1),
        ({5, 7, _ABORT}, 5),
        ({1, _ABORT}, 1),  # NCCL aborts the ranks that lose the crashed one
        ({_KILL, _ABORT}, 137),
        ({_ABORT, 7}, 134),
        ({_ABORT}, 134),
        ({3, 5}, 5),
    ],
)
def test_the_cause_takes_precedence_over_its_consequences(codes: set[int], code: int) -> None:
    assert _exit_code(codes, stopped=False) == code


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({1, 75}, 1),
        ({143, 5, 75}, 5),
        ({-signal.SIGTERM, _KILL}, 137),
        ({75}, 75),
        ({75, -signal.SIGTERM}, 75),
    ],
)
def test_a_script_that_saves_beside_a_failed_rank_does_not_hide_it(
    codes: set[int], code: int
) -> None:
    assert _exit_code(codes, stopped=False) == code


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        *[({1, 75}, 75), ({_KILL, 7, 75}, 75), ({5, 75}, 5), ({1}, 1)],
        # Nothing new was saved.
        *[({-signal.SIGTERM}, 143), ({143, 7, -signal.SIGTERM}, 143), ({143, 5}, 5)],
    ],
)
def test_a_rank_that_saved_at_a_stop_decides_unless_another_one_made_a_mistake(
    codes: set[int], code: int
) -> None:
    assert _exit_code(codes, stopped=True) == code


def test_torchruns_own_keys_are_not_those_of_a_process_group() -> None:
    own = ["none/torchelastic/role_info/0", "id/torchelastic/agent/terminal_state/num_members"]
    assert not have_met(own)
    assert have_met([*own, "default_pg/0//cpu//0/1"])


def test_a_stop_before_the_ranks_is_not_lost_in_an_import(tmp_path: Path) -> None:
    """A bare `except` of a library has caught the exception of the signal's handler."""
    with pytest.raises(SystemExit) as ended:
        _run_torchrun(argparse.Namespace(), tmp_path, [signal.SIGINT], [])
    assert ended.value.code == 143


def test_a_port_that_was_in_use_is_noted(tmp_path: Path) -> None:
    listens = socket.create_server(("127.0.0.1", 0))
    port = listens.getsockname()[1]
    assert sockets_at(port, Path("/proc/net"))
    with socket.socket() as free:  # bound, but neither listening nor connected
        free.bind(("127.0.0.1", 0))
        unused = free.getsockname()[1]
        assert not PortWatch(unused, known=port).is_seen()
    # A connection that has ended is listed for a while.
    with socket.create_server(("127.0.0.1", 0)) as other:
        watch = PortWatch(port, known=other.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)), listens.accept()[0]:
            pass
        listens.close()
        assert watch.is_seen()
        # A later watch does not take this connection for another one.
        assert not PortWatch(port, known=other.getsockname()[1]).is_seen()
    # Nothing is known where the system does not list ports.
    assert PortWatch(unused, known=port, folder=tmp_path).is_seen()


def test_if_each_rank_hung_the_code_is_that_of_an_unexpected_error(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("Timed out waiting")
    assert _report({tmp_path / "1": _KILL}, stopped=False, again="again") == 1


def test_a_rank_that_a_signal_without_a_name_ends_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _report({tmp_path / "1": -40}, stopped=False, again="again") == 168
    assert capsys.readouterr().err == "trainbox: rank 1 was killed by signal 40: again\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_ranks_that_end_because_a_node_is_lost_have_the_code_of_the_loss(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    """Trainbox kills them, or NCCL aborts them first."""

    def fail(_arguments: argparse.Namespace) -> None:
        error = ChildFailedError.__new__(ChildFailedError)
        error.failures = {0: SimpleNamespace(runs_program=False, exitcode=-number)}  # type: ignore[dict-item]
        raise error

    monkeypatch.setattr(torch.distributed.run, "run", fail)
    ends = [End("node 1 is lost", 7)]
    assert (
        _run_torchrun(
            argparse.Namespace(
                runs_program=False,
            ),
            tmp_path,
            [],
            ends,
        )
        == 7
    )
    assert capsys.readouterr().err == (
        "trainbox: node 1 is lost: the same command on all nodes resumes from the newest "
        "checkpoint, if there is one\n"
    )
