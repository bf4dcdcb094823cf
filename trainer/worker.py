"""A process of a sweep's: trains one trial after the other, so that not each pays for a start of Python and torch.

`python -m trainer.worker FD`: orders and answers are JSON objects on the connection FD. A worker in which a trial went wrong
in a way that may touch the next one is replaced by the sweep; it need not clean up.
"""

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.errors import Failure, Preempted
from trainer.stopping import StopRequest, die_with_parent


def main() -> None:
    """Train what is ordered until the other end of the connection is closed."""
    connection, device = Connection(int(sys.argv[1])), os.environ["TRAINBOX_DEVICE"]
    StopRequest.install()  # a signal between two trials is nothing to end of: the sweep closes the connection then
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a trial says is in its log
    terminal = os.dup(2)
    _send(connection, {"unusable": _unusable(device)})
    while True:
        try:
            order = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        _log_to(Path(order["log"]))
        answer = _answer(connection, order, device)
        os.dup2(terminal, 2)
        _send(connection, answer)


def _answer(connection: Connection, order: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Train one trial: its best metrics, or the exit code and message of its failure."""
    from trainer.config import Config
    from trainer.session import train_task

    begin, stop, pruned = time.monotonic(), StopRequest.install(), False
    path = Path(order["run"])

    def validated(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal pruned
        if order["pruned"]:
            _send(connection, {"step": step, "metrics": dict(metrics)})
            if json.loads(connection.recv_bytes())["prune"]:
                pruned, stop.signal_name = True, "the pruner"

    try:
        metrics = train_task(
            Config(**order["config"]),
            stop,
            device,
            path.parent,
            path.name,
            Path(order["data_dir"]),
            "auto",
            validated=validated,
        )
        return {"code": 0, "metrics": metrics, "seconds": time.monotonic() - begin}
    except Preempted as preempted:
        if not pruned:
            return {"code": preempted.exit_code, "message": str(preempted)}
        return {"code": 0, "pruned": True, "metrics": {}, "seconds": time.monotonic() - begin}
    except Failure as failure:
        return {"code": failure.exit_code, "message": str(failure)}
    except Exception as error:  # noqa: BLE001 - the task's own
        traceback.print_exc()
        return {"code": 1, "message": f"{type(error).__name__}: {error}"}
    finally:
        _free_memory()


def _unusable(device: str) -> str | None:
    """Why nothing can be computed here; None if it can."""
    import torch

    from trainer import session  # noqa: F401 - the longest part of the start, before the first order

    try:
        if device == "cuda":
            torch.ones(64, 64, device="cuda").mm(torch.ones(64, 64, device="cuda")).sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _log_to(path: Path) -> None:
    """Tracebacks, and the last words of a library that takes the process down, land in the trial's own log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()


def _send(connection: Connection, answer: Mapping[str, Any]) -> None:
    try:
        connection.send_bytes(json.dumps(answer).encode())
    except OSError:
        os._exit(0)  # the sweep is gone


if __name__ == "__main__":
    main()
