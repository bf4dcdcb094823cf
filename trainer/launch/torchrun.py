"""torchrun, with five habits changed.

It ends with its ranks' exit code, passes a signal on instead of dying of it, meets other nodes at a
place of our own, ends when one of them does, and keeps the current folder out of its ranks'
sys.path.

Used as torchrun is: `python -m trainer.launch.torchrun --standalone --nproc-per-node=2 -m trainer
train digits`.
Why: docs/decisions/0003-torchrun-with-exit-codes.md, 0012-nodes-meet-on-one-interface.md.
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
from trainer.launch.rendezvous import Meeting, Node, meet
from trainer.launch.secret import take_secret
from trainer.system.processes import children
from trainer.system.signals import STOP_SIGNALS, hand_on, handle_stop_signals
from trainer.system.streams import message, open_streams, outlive_readers
from trainer.system.temporary import temporary_folder

_CRASH = 1
# Ranks mostly notice by themselves that another node is lost, and end with their own words; and
# when one is done or has stopped with a checkpoint, they are about to do the same. torchrun then
# takes a moment.
_NOTICED_S, _FOLLOWED_S, _TOLD_S = 10.0, 60.0, 10.0


def main() -> int:
    """Run torchrun on this process's arguments and return the exit code that tells why the ranks
    ended.
    """
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

    # Of connections that fail we tell ourselves, without a C++ stack, and names of addresses matter
    # to nobody.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.run import parse_args

    # Its log would tell of each stop as a failure, with a traceback; the ranks have said what there
    # is to say.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    # It takes over the signals it is told to handle: one that nobody sends.
    arguments = parse_args(["--signals-to-handle=SIGQUIT", *sys.argv[1:]])
    if arguments.module:
        _keep_out_the_current_folder(arguments)
    with temporary_folder() as messages:
        os.environ[MESSAGES] = str(messages)
        arguments.log_dir = str(messages)  # torchrun would leave a folder behind at each start
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
                # all is said; one that comes late must not break the way out
                signal.signal(number, signal.SIG_IGN)


def _run_on_nodes(
    arguments: argparse.Namespace, messages: Path, forwarded: list[int], secret: bytes | None
) -> int:
    """Meet the other nodes, then run as long as none of them ends.

    Raises:
        Failure: they did not meet.
    """
    try:
        meeting = _meet(arguments, secret)
        store = _open_store(arguments, meeting)
    except Failure:
        raise
    except Exception as error:
        raise NetworkFailure(
            f"the rendezvous at {arguments.rdzv_endpoint} failed "
            f"({type(error).__name__}: {error}): "
            "start the same command again on each machine"
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
        time.sleep(_TOLD_S)
        _say(f"{what}; what runs here does not end by itself, and is ended")
        os._exit(loss.code)

    try:
        meeting.watch(heard)
        code = _ended(arguments, messages, forwarded, losses)
    except SystemExit:  # by `forward`
        meeting.leave(Preempted.exit_code)
        raise
    meeting.leave(code)
    del store  # on node 0 it was the others' store until here
    return code


class _Loss(NamedTuple):
    """What became of another node, and the code to end with where ranks had to be killed for it."""

    what: str
    code: int


def _ended(
    arguments: argparse.Namespace, messages: Path, forwarded: list[int], losses: list[_Loss]
) -> int:
    """Run torchrun, say why the ranks ended, and return the exit code; `losses` fills with what
    became of other nodes.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    try:
        run(arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if losses:  # we have killed them
            what, due = losses[0]
            codes = {rank: due if code == -signal.SIGKILL else code for rank, code in codes.items()}
            if _cause(set(codes.values()), bool(forwarded)) == due:
                _say(f"{what}: the same command goes on from the newest checkpoint, on all nodes")
        return _told({messages / str(rank): code for rank, code in codes.items()}, bool(forwarded))
    except (DistError, ConnectionError) as error:
        _say(f"lost contact with the other nodes ({losses[0].what if losses else error})")
        return NetworkFailure.exit_code
    return 0


def _meet(arguments: argparse.Namespace, secret: bytes | None) -> Meeting:
    """Find the other nodes.

    Raises:
        Failure: they did not meet.
    """
    if secret is None and arguments.node_rank == 0:
        _say(
            f"RDZV_SECRET is not set: every program that reaches {arguments.rdzv_endpoint} "
            "can join this training as a node; "
            "set it to the same text on each node"
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
        # By their own choice gloo takes the one of the host's name, and NCCL the first that is up.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    over = f" over {interface}" if interface else ""
    counts = " + ".join(map(str, meeting.processes))
    _say(f"{arguments.nnodes} nodes met at {arguments.rdzv_endpoint}{over}: {counts} processes")
    return meeting


def _open_store(arguments: argparse.Namespace, meeting: Meeting) -> object:
    """Tell torchrun where the nodes' store is; on node 0 it lives as long as what is returned."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub does not list it

    # torchrun's own rendezvous of nodes that know their ranks. It would open a store on all
    # interfaces, and takes the one that this process has opened already.
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
    """Have the ranks run their module with -P: torchrun's own command would take a user's
    trainer.py for ours.
    """
    command = ["-P", "-u", "-m", arguments.training_script, *arguments.training_script_args]
    arguments.training_script = sys.executable
    arguments.training_script_args = command
    arguments.module, arguments.no_python = False, True


def _meet_in_a_file(arguments: argparse.Namespace, folder: Path) -> None:
    """On one machine: no store that listens, since torch's has no login and listens on all
    interfaces.
    """
    arguments.standalone = False
    arguments.rdzv_backend, arguments.rdzv_id = "c10d", "trainbox"
    arguments.rdzv_endpoint, arguments.rdzv_conf = str(folder / "agent"), "store_type=file"
    os.environ[STORE] = str(folder / "ranks")
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def _told(codes: Mapping[Path, int], stopped: bool) -> int:
    """Say why the ranks ended, each reason once, and return the exit code; `codes` are by the file
    of a rank's last words.
    """
    words = {
        file: file.read_text(encoding="utf-8", errors="replace") for file in codes if file.exists()
    }
    # The others waited for one that stood still; torchrun killed it, since it did not end when it
    # was told to either.
    waited = any(
        sign in text.lower() for text in words.values() for sign in ("timed out", "timeout")
    )  # gloo has two ways to say it
    hung = [file for file, code in codes.items() if waited and code == -signal.SIGKILL]
    for file in hung:
        _say(
            f"rank {file.name} stood still and was killed: the same command goes on from "
            "the newest checkpoint"
        )
    codes = {file: code for file, code in codes.items() if file not in hung}
    for file, code in codes.items():
        if code < 0 and not (stopped and -code in STOP_SIGNALS):
            name = signal.Signals(-code).name
            _say(
                f"rank {file.name} was killed by {name}: the same command goes on from the "
                "newest checkpoint"
            )
    cause = _cause(set(codes.values()), stopped)
    for text in dict.fromkeys(text for file, text in words.items() if codes.get(file) == cause):
        _say(text)
    return cause


def _cause(codes: set[int], stopped: bool) -> int:
    """The exit code to end with, of those of the ranks that failed: one with a reason of its own
    goes first.
    """
    if stopped and codes <= {Preempted.exit_code, *(-number for number in STOP_SIGNALS)}:
        return Preempted.exit_code  # a rank that was told to stop before it had begun just ends
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
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)


def _say(text: str) -> None:
    print(message(text), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
