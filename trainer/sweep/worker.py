"""The worker process of a sweep: trains one trial after the other, and imports torch once.

`python -m trainer.sweep.worker FD` reads orders from the connection FD and writes answers to it, as
JSON objects:

- {"unusable": reason or null}: once, when the worker has started
- {"step", "metrics"}: after each validation of a trial with a pruner; the reply is {"prune": bool}
- {"code", ...}: at the end of a trial

The sweep replaces a worker after a trial that fails, so a worker does not clean up. It also
replaces a worker in which an allocation of GPU memory has failed (`failed_allocations`).
"""

import faulthandler
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainbox.errors import Changed, ExitCode, Failure, Preempted, Stopped, text_of
from trainbox.files.regular_files import append_regular
from trainbox.folders.write_failures import writing
from trainbox.processes.environment import launch_facts, restore_environment
from trainbox.processes.process_tree import die_with_parent
from trainbox.processes.streams import open_streams, outlive_readers
from trainer.records.gpu_events import new_events
from trainer.sweep.slots import ask, serve
from trainer.system.signals import StopRequest


def main(connection: Connection) -> None:
    """Train the ordered trials until the other end of the connection is closed."""
    restore_environment()
    open_streams()
    outlive_readers()
    device = launch_facts(os.environ).device
    # Installed once: a signal between two trials stops the next trial, which is given back.
    stop = StopRequest.install()
    die_with_parent()
    terminals = os.dup(1), os.dup(2)

    def answer(order: Mapping[str, Any]) -> dict[str, Any]:
        from trainer.loop.out_of_memory import failed_allocations, free_memory

        answer = _answer(connection, order, device, stop)
        if answer["code"] == 0:
            free_memory()
            answer["failed_allocations"] = failed_allocations()
        for number, terminal in enumerate(terminals, 1):
            os.dup2(terminal, number)
        return answer

    serve(connection, _unusable(device), answer)


def _answer(
    connection: Connection, order: Mapping[str, Any], device: str, stop: StopRequest
) -> dict[str, Any]:
    """Train one trial; return its best metrics, or the exit code and message of its failure."""
    pruned = False

    def validated(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal pruned
        report = {"step": step, "metrics": dict(metrics)}
        if order["pruned"] and ask(connection, report)["prune"]:
            pruned, stop.signal_name = True, "the pruner"

    try:
        metrics = _trained(order, device, stop, validated)
        return {"code": 0, "metrics": metrics}
    except Stopped as stopped:
        if not pruned:
            saved = isinstance(stopped, Preempted)
            return {"code": ExitCode.PREEMPTED, "saved": saved, "message": str(stopped)}
        if stop.signal_name == "the pruner":
            stop.signal_name = None
        return {"code": 0, "pruned": True, "metrics": {}}
    except Failure as failure:
        return {"code": failure.exit_code, "message": str(failure)}
    except Exception as error:  # noqa: BLE001 - the task's own
        traceback.print_exc()
        return {"code": ExitCode.UNEXPECTED, "message": f"{type(error).__name__}: {text_of(error)}"}


def _trained(
    order: Mapping[str, Any],
    device: str,
    stop: StopRequest,
    validated: Callable[[int, Mapping[str, float]], None],
) -> dict[str, float]:
    import torch

    from trainbox.options.config import Config
    from trainer.session.train import train_task

    new_events([])  # drop the events of earlier trials
    _log_to(Path(order["log"]))
    # Undo what an earlier trial may have set.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.set_default_dtype(torch.float32)
    config, path, data_dir = Config(**order["config"]), Path(order["run"]), Path(order["data_dir"])

    def train() -> dict[str, float]:
        return train_task(
            config,
            stop,
            device,
            path.parent,
            path.name,
            data_dir,
            "auto",
            validated=validated,
            swept=order["swept"],
            rehearses=order["rehearses"],
        )

    try:
        return train()
    except Changed as changed:
        # For example, the trial started on another GPU or CPU model, and so cannot resume here.
        path.rename(aside := path.with_name(f"{path.name}.aside-{time.time_ns()}"))
        _log_to(Path(order["log"]))
        print(
            f"restarted from step 0, the old folder is {aside}: {changed}",
            file=sys.stderr,
            flush=True,
        )
        return train()


def _unusable(device: str) -> str | None:
    """Return why the device cannot compute, or None if it can."""
    import torch

    # The longest part of the start is done before the first order.
    import trainer.session.train  # noqa: F401
    from trainer.loop.arithmetic import set_cuda_variables

    # torch imports its compiler with the first optimizer.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    # Memory is freed twice in each trial. This leaves out the objects of all modules, which stay
    # and would take longer than a small trial.
    gc.freeze()
    try:
        if device == "cuda":
            set_cuda_variables()
            torch.ones(64, 64, device="cuda").mm(torch.ones(64, 64, device="cuda")).sum().item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _log_to(path: Path) -> None:
    """Redirect standard output and error to the trial's log, for libraries that crash as well."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        log = append_regular(path)
    with log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    faulthandler.enable()


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
