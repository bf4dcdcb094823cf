"""torchrun, with two habits changed: it ends with its ranks' exit code, and it passes a signal on instead of dying of it.

Used as torchrun is: `python -m trainer.torchrun --standalone --nproc-per-node=2 -m trainer train digits`.
Why: docs/decisions/0003-torchrun-with-exit-codes.md.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from trainer.errors import MESSAGES, STORE, NetworkFailure, Preempted

_CRASH = 1
_LOOK_S, _LOOK_EVERY_S = 5.0, 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def main() -> int:
    """Run torchrun on this process's arguments and return the exit code that tells why the ranks ended."""
    forwarded: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        ranks = _children()
        if not ranks and not forwarded:
            sys.exit(Preempted.exit_code)  # nothing runs yet, so nothing is lost
        forwarded.append(number)
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)

    for number in _SIGNALS:
        signal.signal(number, forward)

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    # Its log would tell of each stop as a failure, with a traceback; the ranks have said what there is to say.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    # It takes over the signals it is told to handle: one that nobody sends.
    arguments = parse_args(["--signals-to-handle=SIGQUIT", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="trainbox-") as messages:
        os.environ[MESSAGES] = messages
        if arguments.standalone:
            _meet_in_a_file(arguments, Path(messages))
        try:
            _wait_for_first_node(arguments.rdzv_endpoint, arguments.rdzv_conf)
            run(arguments)
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return _told({Path(messages) / str(rank): code for rank, code in codes.items()}, bool(forwarded))
        except (RendezvousError, DistError, ConnectionError) as error:
            place = f" at {arguments.rdzv_endpoint}" * bool(arguments.rdzv_endpoint)
            reason = str(error.__cause__ or error).rstrip(".")  # RendezvousError's own is "see inner exception"
            _say(
                f"the nodes did not meet{place} ({reason}): start the same command on each, "
                "with an --rdzv-endpoint that all can reach and no other program uses"
            )
            return NetworkFailure.exit_code
        finally:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # all is said; one that comes late must not break the way out
    return 0


def _wait_for_first_node(endpoint: str, settings: str) -> None:
    """Until it listens: it may have to fetch its image first, and torch gives up after about two minutes.

    Raises:
        ConnectionError: it does not within the rendezvous's join_timeout.
    """
    given = dict(setting.split("=") for setting in settings.split(",") if setting)
    if given.get("is_host") != "0":
        return
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + int(given["join_timeout"])
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S).close()
            return
        except OSError as error:  # its name may be unknown yet, too
            if time.monotonic() > deadline:
                raise ConnectionError(f"{error}, for {given['join_timeout']} s") from None
        time.sleep(_LOOK_EVERY_S)


def _meet_in_a_file(arguments: argparse.Namespace, folder: Path) -> None:
    """On one machine: no store that listens, since torch's has no login and listens on all interfaces."""
    arguments.standalone = False
    arguments.rdzv_backend, arguments.rdzv_id = "c10d", "trainbox"
    arguments.rdzv_endpoint, arguments.rdzv_conf = str(folder / "agent"), "store_type=file"
    os.environ[STORE] = str(folder / "ranks")
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def _told(codes: Mapping[Path, int], stopped: bool) -> int:
    """Say why the ranks ended, each reason once, and return the exit code; `codes` are by the file of a rank's last words."""
    words = {file: file.read_text() for file in codes if file.exists()}
    # The others waited for one that stood still; torchrun killed it, since it did not end when it was told to either.
    waited = any(
        sign in text.lower() for text in words.values() for sign in ("timed out", "timeout")
    )  # gloo has two ways to say it
    hung = [file for file, code in codes.items() if waited and code == -signal.SIGKILL]
    for file in hung:
        _say(f"rank {file.name} stood still and was killed: the same command goes on from the newest checkpoint")
    codes = {file: code for file, code in codes.items() if file not in hung}
    for file, code in codes.items():
        if code < 0 and not (stopped and code == -signal.SIGTERM):
            name = signal.Signals(-code).name
            _say(f"rank {file.name} was killed by {name}: the same command goes on from the newest checkpoint")
    cause = _cause(set(codes.values()), stopped)
    for text in dict.fromkeys(text for file, text in words.items() if codes.get(file) == cause):
        _say(text)
    return cause


def _cause(codes: set[int], stopped: bool) -> int:
    """The exit code to end with, of those of the ranks that failed: one with a reason of its own goes first."""
    if stopped and codes <= {Preempted.exit_code, -signal.SIGTERM}:
        return Preempted.exit_code  # a rank that was told to stop before it had begun just ends
    reasons = sorted(code for code in codes if code not in (_CRASH, NetworkFailure.exit_code) and code > 0)
    if reasons:
        return reasons[0]
    if killed := [-code for code in sorted(codes) if code < 0]:
        return 128 + killed[0]
    return NetworkFailure.exit_code if codes == {NetworkFailure.exit_code} else _CRASH


def _children() -> list[int]:
    """The ranks: the processes whose parent is this one."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        if parent == os.getpid():
            children.append(int(stat.parent.name))
    return children


def _say(text: str) -> None:
    print(f"trainbox: {' '.join(text.split())}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
