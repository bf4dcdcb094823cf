"""Measure an epoch's entry in digests.jsonl against the epoch."""

import io
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

from benchmarks.loop import RandomMnist
from trainbox.contract.config import Config
from trainbox.task import Task
from trainer.loop.build import build, build_data
from trainer.loop.digests import DigestLog
from trainer.loop.fit import fit
from trainer.parallel.strategy import join
from trainer.run.checkpoint import RunCheckpoints
from trainer.run.run_gpus import RunGpus
from trainer.run.run_log import RunLog
from trainer.session.settle import settle
from trainer.system.signals import StopRequest
from trainer.tasks.digits import Digits

EPOCHS = 8


def measure() -> Iterator[str]:
    yield "| task | epoch, median s | digests, median ms | share |"
    yield "|---|---|---|---|"
    for task, epochs in ((Digits(), EPOCHS), (RandomMnist(), 2)):
        epoch_s, digest_s = _trained(task, epochs)
        yield (
            f"| {type(task).__name__} | {epoch_s:.2f} | {digest_s * 1e3:.1f} | "
            f"{digest_s / epoch_s:.2%} |"
        )


def _trained(task: Task, epochs: int) -> tuple[float, float]:
    """Return the mean seconds of an epoch's training and the median seconds of its digests."""
    times: list[float] = []
    record = DigestLog.record

    def timed(log: DigestLog, kind: str) -> None:
        begin = time.perf_counter()
        record(log, kind)
        times.append(time.perf_counter() - begin)

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        strategy = join("cpu")
        run = RunLog(Path(folder) / "r", 0)
        config = settle(Config(epochs=epochs), task, strategy, run)
        data = build_data(config, task, strategy.world, Path(folder))
        checkpoints = RunCheckpoints(run.path / "checkpoints", config.keep, True, run.report)
        job = build(config, data, strategy, run, RunGpus(strategy, run.folder), checkpoints)
        run.begin(0, 0, job.schedule)
        DigestLog.record = timed  # type: ignore[method-assign,assignment]
        try:
            fit(job, StopRequest())
        finally:
            DigestLog.record = record  # type: ignore[method-assign]
        run.close()
    return job.state.progress.train_seconds / epochs, statistics.median(times)
