"""Measure an epoch's entry in digests.jsonl against the epoch."""

import statistics
import time
from collections.abc import Iterator

from benchmarks.jobs import trained
from benchmarks.loop import RandomMnist
from trainbox.options.config import Config
from trainbox.task import Task
from trainer.loop.digests import DigestLog
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

    DigestLog.record = timed  # type: ignore[method-assign,assignment]
    try:
        job = trained(task, Config(epochs=epochs))
    finally:
        DigestLog.record = record  # type: ignore[method-assign]
    return job.state.progress.train_seconds / epochs, statistics.median(times)
