"""Run torchrun with seven changes.

1. It exits with the exit code of its ranks.
2. It forwards a stop signal to the ranks, and does not exit before them.
3. It connects to the other nodes with Trainbox's own rendezvous.
4. It exits when another node exits.
5. It keeps the current folder out of the sys.path of its ranks.
6. On one machine, no port is open to other machines.
7. If a rank of a user's program fails, the others may end by themselves for a moment.

The command line is as for torchrun:
`python -m trainer.programs.ranks.torchrun --standalone --nproc-per-node=2 -m trainer train digits`.
With `--no-python`, the ranks are programs of a user, which know nothing of Trainbox.
The reasons are in docs/decisions/0003-torchrun-with-exit-codes.md and
docs/decisions/0012-nodes-meet-on-one-interface.md.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainbox.errors import (
    STOPPED_ITSELF,
    UNSAVED,
    ExitCode,
    Failure,
    NetworkFailure,
    code_of_cause,
    shell_code,
    signal_of,
    stopped_without_loss,
)
from trainbox.files.temporary import temporary_folder
from trainbox.folders.record_folder import SavedFile, ended_by, has_saved, saved_files
from trainbox.processes.environment import Internal
from trainbox.processes.process_tree import (
    children,
    forward_signal,
    ignore_stop_signals,
    killed_by,
    parent,
)
from trainbox.processes.streams import message, open_streams, outlive_readers
from trainer.programs.ranks.early_exits import watch_exits
from trainer.programs.ranks.meeting import Meeting
from trainer.programs.ranks.messages import End
from trainer.programs.ranks.node import Node
from trainer.programs.ranks.ports import PortWatch
from trainer.programs.ranks.rendezvous import meet
from trainer.system.signals import STOP_SIGNALS, forwarded_signal, handle_stop_signals

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub lacks it

# Seconds until the ranks of this node are killed. If another node is lost, most ranks notice it
# themselves. If another node has exited, the ranks usually exit as well.
_LOST_S, _EXITED_S = 10.0, 60.0
# Seconds until torchrun is killed after its ranks.
_TORCHRUN_S = 10.0
# Seconds in which the ranks of a user's program may end by themselves after one has failed.
_OWN_END_S = 3.0


def main() -> int:
    """Run torchrun with this process's arguments, and return the exit code of the ranks."""
    open_streams()
    outlive_readers()
    forwarded: list[int] = []
    others: list[Meeting] = []  # the other nodes, which stop as well
    # Known before the handler exists, and so before torch parses the arguments.
    runs_program = "--no-python" in sys.argv

    def forward(number: int, _frame: FrameType | None) -> None:
        ranks = children(os.getpid())
        if not ranks and not forwarded:
            forwarded.append(number)  # a module of torch may catch the exception in its import
            sys.exit(UNSAVED)
        if runs_program and number in forwarded:
            return  # a second SIGTERM could interrupt a program while it saves
        forwarded.append(number)
        sent = signal.Signals(number) if runs_program else forwarded_signal(number)
        for rank in ranks:
            forward_signal(rank, sent)
        for meeting in others:
            meeting.leave(ExitCode.PREEMPTED)

    handle_stop_signals(forward)

    # Trainbox reports failed connections itself. torch would log a C++ stack and host names.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.run import parse_args

    from trainer.programs.ranks.store import use_file_store, use_loopback_store

    _silence_torchrun()
    # torchrun replaces our handlers of the signals that it handles, so it gets an unused signal.
    arguments = parse_args(["--signals-to-handle=SIGQUIT", *sys.argv[1:]])
    arguments.runs_program = runs_program  # `no_python` is also set for our own ranks below
    if arguments.module:
        _leave_out_current_folder(arguments)
    with temporary_folder() as messages:
        os.environ[Internal.MESSAGES] = str(messages)
        os.environ[Internal.AGENT] = str(os.getpid())
        arguments.log_dir = str(messages)  # by default, torchrun leaves a folder behind
        try:
            if arguments.standalone and arguments.runs_program:
                met = _watched_store(arguments, use_loopback_store(arguments))
                code = _run_torchrun(arguments, messages, forwarded, [])
                if code == 0:
                    _warn_if_separate(met, int(arguments.nproc_per_node))
                return code
            if arguments.standalone:
                use_file_store(arguments, messages)
                return _run_torchrun(arguments, messages, forwarded, [])
            return _run_on_nodes(arguments, messages, forwarded, others)
        except Failure as failure:
            message(str(failure))
            return failure.exit_code
        finally:
            ignore_stop_signals()  # a late signal must not interrupt the exit


def _run_on_nodes(
    arguments: argparse.Namespace,
    messages: Path,
    forwarded: list[int],
    others: list[Meeting],
) -> int:
    """Connect to the other nodes, and run torchrun until a node exits.

    A training votes, so that a stop of one node stops all. A user's program does not. Its node
    therefore reports a stop by `others`, and each other node sends SIGTERM to its own ranks.

    Raises:
        Failure: The rendezvous failed.
    """
    from trainer.programs.ranks.store import serve, use_store

    # Connect to the other nodes.
    try:
        meeting = _meet(arguments)
        store = serve(meeting.store) if meeting.store else None
        use_store(arguments, store, (meeting.address, meeting.store_port))
    except Failure:
        raise
    except Exception as error:
        raise NetworkFailure(
            f"the rendezvous at {arguments.rdzv_endpoint} failed "
            f"({type(error).__name__}: {error}): start the same command again on each machine"
        ) from error
    # When another node exits or is lost, kill the ranks of this node, and then torchrun. A lost
    # node is recorded at once, because the ranks exit with errors of their own.
    ends: list[End] = []

    def on_end(end: End) -> None:
        what, code = end
        end = End(what, code or ExitCode.NETWORK)
        if code == ExitCode.NETWORK:
            ends.append(end)
            time.sleep(_LOST_S)
        else:
            if arguments.runs_program and code == 0:
                # A script does not have to end at the same time on all nodes. This thread returns
                # at once, so that it notices the loss of another node.
                text = f"{what}, and this node continues until its own ranks exit"
                report = threading.Timer(_EXITED_S, message, (text,))
                report.daemon = True
                report.start()
                return
            if arguments.runs_program and code in (ExitCode.PREEMPTED, UNSAVED) and not forwarded:
                message(f"{what.partition(' exited')[0]} stops, and so does this node")
                os.kill(os.getpid(), signal.SIGTERM)  # `forward` runs on the main thread
            time.sleep(_EXITED_S)
            ends.append(end)
        _kill_ranks()
        time.sleep(_TORCHRUN_S)
        message(f"{what}; torchrun on this node did not exit, so it is killed")
        os._exit(end.code)

    # Run torchrun, and report its exit code to the other nodes.
    before = saved_files(_run_folder()) if arguments.runs_program else {}
    try:
        meeting.watch(on_end)
        met = _watched_store(arguments, store) if arguments.runs_program and store else None
        if arguments.runs_program:
            others.append(meeting)
        code = _run_torchrun(arguments, messages, forwarded, ends)
        if arguments.runs_program:
            code = _code_of_program(code, forwarded, before)
        if code == 0 and met is not None:
            _warn_if_separate(met, sum(meeting.processes))
    except SystemExit:  # raised by `forward`
        meeting.leave(UNSAVED)
        raise
    meeting.leave(code)
    return code


def _run_folder() -> Path:
    """Return the run folder of the user's program."""
    return Path(os.environ["TRAINBOX_RUN"])


def _code_of_program(code: int, forwarded: list[int], before: Mapping[str, SavedFile]) -> int:
    """Return the exit code of the user's program on this node, which got the signals `forwarded`.

    `before` has the `saved_files` at its start. `trainbox run` did not get the signal of another
    node.
    """
    # At Ctrl-C, a script may end its training early, and exit with 0.
    has_ended = code == ExitCode.SUCCESS and signal.SIGINT not in forwarded
    if forwarded and (has_ended or code == ExitCode.PREEMPTED or signal_of(code) in STOP_SIGNALS):
        return ExitCode.PREEMPTED if has_saved(_run_folder(), before) else UNSAVED
    if code == ExitCode.PREEMPTED:
        message(STOPPED_ITSELF)
        return ExitCode.UNEXPECTED
    return code


def _silence_torchrun() -> None:
    """Keep torchrun from logging.

    It would log each stop as a failure with a traceback, and so it would if node 0 exits before
    another node at the barrier after the last step. The ranks have printed the reason of a failure.
    """
    import torch.distributed.run  # noqa: F401 - its modules set the levels of their own loggers

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _run_torchrun(
    arguments: argparse.Namespace, messages: Path, forwarded: list[int], ends: list[End]
) -> int:
    """Run torchrun, print why the ranks exited, and return the exit code.

    A thread adds the ends of other nodes to `ends` meanwhile, with the exit code of ranks that are
    killed because of them.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    if forwarded:
        sys.exit(UNSAVED)
    again = _again(arguments)
    if arguments.runs_program:
        watch_exits(message)
        sys.addaudithook(_own_ends())
    try:
        run(arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if ends:  # `on_end` has killed the ranks, or NCCL has aborted them
            what, end_code = ends[0]
            codes = {
                rank: end_code if code in (-signal.SIGKILL, -signal.SIGABRT) else code
                for rank, code in codes.items()
            }
            if _exit_code(set(codes.values()), bool(forwarded)) == end_code:
                message(f"{what}: {again.replace('command', 'command on all nodes', 1)}")
        if forwarded and all(-code in STOP_SIGNALS for code in codes.values()):
            if arguments.runs_program:
                message(ended_by(forwarded[0], _run_folder()))
            else:
                message(stopped_without_loss(forwarded[0]))
        files = {messages / str(rank): code for rank, code in codes.items()}
        return _report(files, bool(forwarded), again)
    except (DistError, ConnectionError) as error:
        message(f"lost contact with the other nodes ({ends[0].what if ends else error})")
        return ExitCode.NETWORK
    return ExitCode.SUCCESS


def _own_ends() -> Callable[[str, tuple[object, ...]], None]:
    """Return an audit hook that delays the SIGTERM with which torchrun ends the other ranks.

    If all ranks exit with one code, gloo may abort a rank while its interpreter ends, because
    another rank has closed its connections. The other rank is then about to exit with the code.
    """
    deadline_s: float | None = None

    def hook(event: str, values: tuple[object, ...]) -> None:
        nonlocal deadline_s
        if event != "os.killpg" or values[1] != signal.SIGTERM:
            return
        deadline_s = deadline_s or time.monotonic() + _OWN_END_S
        while parent(int(str(values[0]))) is not None and time.monotonic() < deadline_s:
            time.sleep(0.01)

    return hook


def _watched_store(arguments: argparse.Namespace, store: "TCPStore") -> Callable[[], bool]:
    """Return a function that returns whether the ranks of a user's program have met.

    If another Python runs them, rank 0 serves a store at the next port: see entrypoint.script.rank.
    """
    from trainer.programs.ranks.store import have_met

    if sys.executable in arguments.training_script_args:
        return lambda: have_met(store.list_keys())
    return PortWatch(store.port + 1, known=store.port).is_seen


def _warn_if_separate(met: Callable[[], bool], count: int) -> None:
    """Warn if the ranks of a user's program have not met, but trained as if each were alone."""
    if count > 1 and not met():
        message(
            f"the {count} processes did not call init_process_group, so each has trained alone: "
            "see docs/guides/own-script.md for Lightning and Accelerate, or use --no-torchrun"
        )


def _again(arguments: argparse.Namespace) -> str:
    """Return what the same command does next, for messages."""
    if arguments.runs_program:
        return "the same command starts the script again in the same run folder"
    return "the same command resumes from the newest checkpoint, if there is one"


def _meet(arguments: argparse.Namespace) -> Meeting:
    """Connect to the other nodes, and choose the network interface of the ranks.

    Raises:
        Failure: The rendezvous failed.
    """
    settings = dict(setting.split("=") for setting in arguments.rdzv_conf.split(","))
    node = Node(
        arguments.node_rank,
        int(arguments.nnodes),
        int(arguments.nproc_per_node),
        arguments.rdzv_endpoint,
        arguments.rdzv_id,
        int(settings["join_timeout"]),
        settings["await_name"] == "1",
    )
    meeting = meet(node, message)
    interface = meeting.interface
    if interface:
        # By default, gloo uses the interface of the host's name, and NCCL the first that is up.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    over = f" over {interface}" if interface else ""
    counts = " + ".join(map(str, meeting.processes))
    message(f"{arguments.nnodes} nodes met at {arguments.rdzv_endpoint}{over}: {counts} processes")
    return meeting


def _leave_out_current_folder(arguments: argparse.Namespace) -> None:
    """Make the ranks run their module with -P.

    torchrun's own command would import a user's trainer.py instead of this package.
    """
    command = ["-P", "-u", "-m", arguments.training_script, *arguments.training_script_args]
    arguments.training_script = sys.executable
    arguments.training_script_args = command
    arguments.module, arguments.no_python = False, True


def _report(codes: Mapping[Path, int], stopped: bool, again: str) -> int:
    """Print why the ranks exited, each reason once, and return the exit code.

    `codes` maps the file of a rank's last message to its exit code. `again` is what the same
    command does next.
    """
    texts = {
        file: file.read_text(encoding="utf-8", errors="replace") for file in codes if file.exists()
    }
    # If other ranks timed out, a rank that torchrun had to kill was hanging, because it did not
    # react to SIGTERM either. gloo has two spellings of the error.
    timed_out = any(
        sign in text.lower() for text in texts.values() for sign in ("timed out", "timeout")
    )
    hung = [file for file, code in codes.items() if timed_out and code == -signal.SIGKILL]
    for file in hung:
        message(f"rank {file.name} hung and was killed: {again}")
    codes = {file: code for file, code in codes.items() if file not in hung}
    # By SIGTERM, torchrun ends the other ranks of a rank that failed.
    if not stopped and set(codes.values()) != {-signal.SIGTERM}:
        codes = {file: code for file, code in codes.items() if code != -signal.SIGTERM}
    for file, code in codes.items():
        if code < 0 and not (stopped and -code in STOP_SIGNALS):
            message(f"rank {file.name} was {killed_by(-code)}: {again}")
    # Print the messages of the ranks whose exit code this process passes on.
    exit_code = _exit_code(set(codes.values()), stopped)
    for text in dict.fromkeys(text for file, text in texts.items() if codes.get(file) == exit_code):
        message(text)
    return exit_code


def _exit_code(codes: set[int], stopped: bool) -> int:
    """Return the exit code of this process, given the codes of the ranks that failed."""
    if stopped and codes & {ExitCode.PREEMPTED, UNSAVED}:
        # The other ranks may lose contact with a rank that has stopped.
        codes = {code for code in codes if code > 0} - {ExitCode.UNEXPECTED, ExitCode.NETWORK}
    return code_of_cause(map(shell_code, codes))


def _kill_ranks() -> None:
    for rank in children(os.getpid()):
        forward_signal(rank, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
