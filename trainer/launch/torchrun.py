"""Run torchrun with five changes.

1. It exits with the exit code of its ranks.
2. It forwards a stop signal to the ranks instead of dying of it.
3. It meets other nodes at Trainbox's own rendezvous.
4. It ends when another node ends.
5. It keeps the current folder out of the sys.path of its ranks.

The command line is that of torchrun:
`python -m trainer.launch.torchrun --standalone --nproc-per-node=2 -m trainer train digits`.
The reasons are in docs/decisions/0003-torchrun-with-exit-codes.md and
docs/decisions/0012-nodes-meet-on-one-interface.md.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from trainer.errors import MESSAGES, STORE, Failure, NetworkFailure, Preempted
from trainer.launch.meeting import Meeting
from trainer.launch.node import Node
from trainer.launch.rendezvous import meet
from trainer.launch.secret import take_secret
from trainer.system.processes import children
from trainer.system.signals import STOP_SIGNALS, hand_on, handle_stop_signals
from trainer.system.streams import message, open_streams, outlive_readers
from trainer.system.temporary import temporary_folder

_CRASH = 1
# How long the ranks here may take before they are killed: after another node is lost, which they
# mostly notice themselves, and after another node has ended, which they usually do as well.
_NOTICED_S, _FOLLOWED_S = 10.0, 60.0
# How long torchrun may take to end after its ranks are killed.
_TORCHRUN_S = 10.0


def main() -> int:
    """Run torchrun with this process's arguments, and return the exit code of the ranks."""
    open_streams()
    outlive_readers()
    forwarded: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        ranks = children(os.getpid())
        if not ranks and not forwarded:
            sys.exit(Preempted.exit_code)  # nothing runs yet, so nothing is lost
        forwarded.append(number)
        _kill(ranks, hand_on(number))

    handle_stop_signals(forward)

    # Trainbox reports failed connections itself. torch would log a C++ stack and host names.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.run import parse_args

    # torchrun would log each stop as a failure with a traceback. The ranks have printed the reason.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    # torchrun replaces our handlers of the signals that it handles, so it gets an unused signal.
    arguments = parse_args(["--signals-to-handle=SIGQUIT", *sys.argv[1:]])
    if arguments.module:
        _keep_out_the_current_folder(arguments)
    with temporary_folder() as messages:
        os.environ[MESSAGES] = str(messages)
        arguments.log_dir = str(messages)  # by default, torchrun leaves a folder behind
        try:
            secret = take_secret(os.environ)
            if arguments.standalone:
                _meet_in_a_file(arguments, messages)
                return _ended(arguments, messages, forwarded, [])
            return _run_on_nodes(arguments, messages, forwarded, secret)
        except Failure as failure:
            _say(str(failure))
            return failure.exit_code
        finally:
            for number in STOP_SIGNALS:
                # A late signal must not interrupt the exit.
                signal.signal(number, signal.SIG_IGN)


def _run_on_nodes(
    arguments: argparse.Namespace, messages: Path, forwarded: list[int], secret: bytes | None
) -> int:
    """Meet the other nodes, and run torchrun until a node ends.

    Raises:
        Failure: the nodes did not meet.
    """
    try:
        meeting = _meet(arguments, secret)
        store = _open_store(arguments, meeting)
    except Failure:
        raise
    except Exception as error:
        raise NetworkFailure(
            f"the rendezvous at {arguments.rdzv_endpoint} failed "
            f"({type(error).__name__}: {error}): start the same command again on each machine"
        ) from error
    losses: list[_Loss] = []

    def heard(what: str, due: int) -> None:
        loss = _Loss(what, due or NetworkFailure.exit_code)
        if due == NetworkFailure.exit_code:
            losses.append(loss)
            time.sleep(_NOTICED_S)
        else:
            time.sleep(_FOLLOWED_S)
            losses.append(loss)
        _kill(children(os.getpid()), signal.SIGKILL)
        time.sleep(_TORCHRUN_S)
        _say(f"{what}; torchrun on this node did not end, so it is killed")
        os._exit(loss.code)

    try:
        meeting.watch(heard)
        code = _ended(arguments, messages, forwarded, losses)
    except SystemExit:  # raised by `forward`
        meeting.leave(Preempted.exit_code)
        raise
    meeting.leave(code)
    del store  # node 0 serves the store of all nodes until here
    return code


class _Loss(NamedTuple):
    """The end of another node, and the exit code if ranks were killed because of it."""

    what: str
    code: int


def _ended(
    arguments: argparse.Namespace, messages: Path, forwarded: list[int], losses: list[_Loss]
) -> int:
    """Run torchrun, print why the ranks ended, and return the exit code.

    A thread adds the ends of other nodes to `losses` meanwhile.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    try:
        run(arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if losses:  # `heard` has killed the ranks
            what, due = losses[0]
            codes = {rank: due if code == -signal.SIGKILL else code for rank, code in codes.items()}
            if _cause(set(codes.values()), bool(forwarded)) == due:
                _say(f"{what}: the same command on all nodes resumes from the newest checkpoint")
        return _report(
            {messages / str(rank): code for rank, code in codes.items()}, bool(forwarded)
        )
    except (DistError, ConnectionError) as error:
        _say(f"lost contact with the other nodes ({losses[0].what if losses else error})")
        return NetworkFailure.exit_code
    return 0


def _meet(arguments: argparse.Namespace, secret: bytes | None) -> Meeting:
    """Meet the other nodes.

    Raises:
        Failure: the nodes did not meet.
    """
    if secret is None and arguments.node_rank == 0:
        _say(
            f"RDZV_SECRET is not set, so every program that reaches {arguments.rdzv_endpoint} "
            "can join this training as a node: set it to the same text on each node"
        )
    given = dict(setting.split("=") for setting in arguments.rdzv_conf.split(","))
    meeting = meet(
        Node(
            arguments.node_rank,
            int(arguments.nnodes),
            int(arguments.nproc_per_node),
            arguments.rdzv_endpoint,
            arguments.rdzv_id,
            int(given["join_timeout"]),
            given["await_name"] == "1",
            secret,
        ),
        _say,
    )
    interface = meeting.interface
    if interface:
        # By default, gloo uses the interface of the host's name, and NCCL the first that is up.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    over = f" over {interface}" if interface else ""
    counts = " + ".join(map(str, meeting.processes))
    _say(f"{arguments.nnodes} nodes met at {arguments.rdzv_endpoint}{over}: {counts} processes")
    return meeting


def _open_store(arguments: argparse.Namespace, meeting: Meeting) -> object:
    """Set the address of the nodes' store in torchrun's arguments.

    On node 0, this returns the store, which exists as long as the returned object.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub does not list it

    # With the static rendezvous, each node knows its rank. torchrun would open a store on all
    # interfaces, but it uses the store that this process has already opened.
    arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_conf = "static", "", ""
    arguments.master_addr, arguments.master_port = meeting.address, meeting.store_port
    if meeting.store is None:
        return None
    listening = meeting.store.detach()
    return TCPStore(
        meeting.address,
        meeting.store_port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening,
    )


def _keep_out_the_current_folder(arguments: argparse.Namespace) -> None:
    """Make the ranks run their module with -P.

    torchrun's own command would import a user's trainer.py instead of this package.
    """
    command = ["-P", "-u", "-m", arguments.training_script, *arguments.training_script_args]
    arguments.training_script = sys.executable
    arguments.training_script_args = command
    arguments.module, arguments.no_python = False, True


def _meet_in_a_file(arguments: argparse.Namespace, folder: Path) -> None:
    """Use a file as the store of a single machine.

    torch's network store has no authentication and listens on all interfaces.
    """
    arguments.standalone = False
    arguments.rdzv_backend, arguments.rdzv_id = "c10d", "trainbox"
    arguments.rdzv_endpoint, arguments.rdzv_conf = str(folder / "agent"), "store_type=file"
    os.environ[STORE] = str(folder / "ranks")
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def _report(codes: Mapping[Path, int], stopped: bool) -> int:
    """Print why the ranks ended, each reason once, and return the exit code.

    `codes` maps the file of a rank's last message to its exit code.
    """
    texts = {
        file: file.read_text(encoding="utf-8", errors="replace") for file in codes if file.exists()
    }
    # If other ranks timed out, a rank that torchrun had to kill was hanging: it did not react to
    # SIGTERM either. gloo has two spellings of the error.
    waited = any(
        sign in text.lower() for text in texts.values() for sign in ("timed out", "timeout")
    )
    hung = [file for file, code in codes.items() if waited and code == -signal.SIGKILL]
    for file in hung:
        _say(
            f"rank {file.name} hung and was killed: the same command resumes from the newest "
            "checkpoint"
        )
    codes = {file: code for file, code in codes.items() if file not in hung}
    for file, code in codes.items():
        if code < 0 and not (stopped and -code in STOP_SIGNALS):
            name = signal.Signals(-code).name
            _say(
                f"rank {file.name} was killed by {name}: the same command resumes from the "
                "newest checkpoint"
            )
    cause = _cause(set(codes.values()), stopped)
    for text in dict.fromkeys(text for file, text in texts.items() if codes.get(file) == cause):
        _say(text)
    return cause


def _cause(codes: set[int], stopped: bool) -> int:
    """Return the exit code of this process, given those of the ranks that failed.

    A code with a specific reason takes precedence over a signal, a lost connection and a crash.
    """
    if stopped and codes <= {Preempted.exit_code, *(-number for number in STOP_SIGNALS)}:
        # A rank that is stopped before it has installed its handlers dies of the signal.
        return Preempted.exit_code
    reasons = sorted(
        code for code in codes if code not in (_CRASH, NetworkFailure.exit_code) and code > 0
    )
    if reasons:
        return reasons[0]
    if killed := [-code for code in sorted(codes) if code < 0]:
        return 128 + killed[0]
    return NetworkFailure.exit_code if codes == {NetworkFailure.exit_code} else _CRASH


def _kill(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the process has just ended
            os.kill(pid, number)


def _say(text: str) -> None:
    print(message(text), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
