"""Train a task in this process, and describe ratios of times that were measured in turns."""

import io
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from trainbox.options.config import Config
from trainbox.task import Task
from trainer.loop.build import build, build_data
from trainer.loop.fit import fit
from trainer.loop.state import Job
from trainer.parallel.strategy import join
from trainer.records.checkpoint import RunCheckpoints
from trainer.records.run_gpus import RunGpus
from trainer.records.run_log import RunLog
from trainer.session.settle import settle
from trainer.system.signals import StopRequest


def trained(
    task: Task,
    settings: Config,
    log: Callable[[Path], RunLog] = lambda path: RunLog(path, 0),
    captures: bool = False,
) -> Job:
    """Train `task` on the CPU in a temporary folder, and return the job.

    `log` makes the log of the run. If the training `captures` steps, nothing has shown that it may.
    """
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        strategy = join("cpu")
        run = log(Path(folder) / "r")
        config = settle(settings, task, strategy, run)
        data = build_data(config, task, strategy.world, Path(folder))
        checkpoints = RunCheckpoints(run.path / "checkpoints", config.keep, True, run.report)
        job = build(config, data, strategy, run, RunGpus(strategy, run.folder), checkpoints)
        job.eager = "" if captures else job.eager
        run.begin(0, 0, job.schedule)
        fit(job, StopRequest())
        run.close()
    return job


def median_and_middle(ratios: Sequence[float]) -> str:
    """Return two cells of a table: the median of `ratios`, and the range of their middle half."""
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.3f} | {low:.3f} to {high:.3f}"
