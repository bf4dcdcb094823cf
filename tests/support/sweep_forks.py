"""Workers of a sweep that are forks of the sweep's own process, which has torch loaded."""

import functools
import gc
import importlib
import io
import os
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection

from matplotlib.figure import Figure

from tests.support.fork import Fork
from trainbox.processes.programs import Program
from trainer.sweep import runner, slots

# Imported by the first trial of a worker, or by the end of a sweep.
_MODULES = (
    "matplotlib.backends.backend_agg",
    "tensorboard.plugins.hparams.plugin_data_pb2",
    "tensorboard.summary.writer.record_writer",
    "trainer.loop.fit",
)


@functools.cache
def install() -> None:
    """Make the sweeps of this process, and of its forks, fork their workers.

    They also look at a busy trial five times a second, not each ten seconds.
    """
    for module in _MODULES:
        importlib.import_module(module)
    picture = Figure()
    picture.suptitle("loss")
    picture.savefig(io.BytesIO())  # loads the fonts
    gc.freeze()  # a fork then copies fewer pages
    slots.start_worker = _fork_worker  # type: ignore[assignment]
    runner._BUSY_S = 0.2


def _fork_worker(program: Program, connection: Connection, variables: Mapping[str, str]) -> Fork:
    """Start a worker as `trainer.sweep.slots.start_worker` does."""
    if pid := os.fork():
        return Fork(pid)
    try:
        os.setsid()
        os.environ.update(variables)
        descriptor = connection.fileno()
        os.set_inheritable(descriptor, True)
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
        importlib.import_module(program.module).main(connection)
    except BaseException:  # noqa: BLE001 - a fork must not return into the sweep
        traceback.print_exc()
    finally:
        os._exit(1)
