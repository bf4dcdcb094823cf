"""The ranks wait for long work of another rank without the time limit of an exchange."""

import functools
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.distributed.test_exchange import found_by_ranks
from tests.support.ranks import Ranks
from tests.support.tiny import Tiny
from trainer.records.checkpoint import RunCheckpoints
from trainer.records.checkpoint_files import CheckpointFiles
from trainer.use import evaluate, predict


def _note(what: str) -> None:
    """Write whether the ranks exchange values while this process works."""
    waiting = any(thread.name == "wait for all" for thread in threading.enumerate())
    with Path("waits").open("a") as file:
        print(what, waiting, file=file)


def _noted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        # Only a wait for a thread may take long.
        if method.__name__ != "wait" or arguments[0]._thread is not None:
            _note(method.__name__)
        return method(*arguments, **options)

    return call


@dataclass(frozen=True)
class Watched(Tiny):
    """Notes its work that may take longer on one rank than on the others."""

    def __post_init__(self) -> None:  # of a rank, before it chooses a checkpoint
        RunCheckpoints.wait = _noted(RunCheckpoints.wait)  # type: ignore[method-assign]
        for name in ("problem", "load", "restore_best"):
            setattr(CheckpointFiles, name, _noted(getattr(CheckpointFiles, name)))
        evaluate.write_results = _noted(evaluate.write_results)

    def train_dataset(self, data_dir: Path) -> Any:
        _note("train_dataset")
        return super().train_dataset(data_dir)

    def validation_dataset(self, data_dir: Path) -> Any:
        _note("validation_dataset")
        return super().validation_dataset(data_dir)

    def build_model(self) -> Any:
        predict.show = _noted(predict.show)
        _note("build_model")
        return super().build_model()

    def metrics(self, totals: Any) -> dict[str, float]:
        _note("metrics")
        return super().metrics(totals)

    def figures(self, model: Any, batch: Any, totals: Any) -> Any:
        _note("figures")
        return {"picture": torch.zeros(3, 2, 2)}

    def load_example(self, path: Path) -> Any:
        return torch.zeros(4), torch.zeros(())

    def predictions(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {"value": model(batch[0])}


class Cramped(Tiny):
    """Rank 0 has too little memory for its first figures."""

    def figures(self, model: Any, batch: Any, totals: Any) -> Any:
        if not Path("failed").exists():
            Path("failed").touch()
            raise MemoryError
        return {"picture": torch.zeros(3, 2, 2)}


def _waits(ranks: Ranks) -> set[str]:
    """Return the noted work, and remove the notes."""
    noted = (ranks.folder / "waits").read_text().splitlines()
    (ranks.folder / "waits").unlink()
    assert {line.split()[1] for line in noted} == {"True"}, set(noted)
    return {line.split()[0] for line in noted}


def test_an_exchange_outlasts_the_time_limit(ranks: Ranks) -> None:
    """Rank 1 takes part in 30 exchanges while rank 0 works for longer than the limit."""
    ended = found_by_ranks(ranks, "waits_for_all")
    assert int(ended.out) >= 30
    assert "trainbox: the data: waiting for rank 0 for 0 min\n" in ended.errs[0]
    assert ended.errs[1] == ""


def test_a_task_can_exchange_during_the_wait(ranks: Ranks) -> None:
    assert int(found_by_ranks(ranks, "waits_while_a_task_exchanges").out) >= 3


def test_the_ranks_can_exchange_after_an_error_of_one_rank(ranks: Ranks) -> None:
    found = json.loads(found_by_ranks(ranks, "waits_for_a_failed_rank").out)
    assert found == [[[], []], [["no memory"], []]]


def test_a_rank_that_is_lost_ends_the_wait(ranks: Ranks) -> None:
    assert "gloo/transport/tcp/pair.cc" in found_by_ranks(ranks, "waits_for_a_lost_rank").out


def test_long_work_of_one_rank_is_not_limited(ranks: Ranks) -> None:
    words = (f"{__file__}:Watched", "--run", "r", "--max-steps", "4", "--device", "cpu")
    ranks.train(2, *words, "--batch-size", "8", "--eval-every", "1", "--rehearsal")
    of_start = {"train_dataset", "validation_dataset", "build_model"}
    assert _waits(ranks) == of_start | {"metrics", "figures", "wait", "load"}
    ranks.train(2, *words, "--batch-size", "8", "--eval-every", "1", "--rehearsal")
    assert _waits(ranks) == of_start | {"problem", "load", "restore_best"}
    ended = ranks(2, "evaluate", "runs/r", "--device", "cpu")
    assert ended.codes == [0, 0], ended
    assert _waits(ranks) == of_start | {"problem", "load", "metrics", "figures", "write_results"}
    ended = ranks(2, "predict", "runs/r", "runs/r/config.json", "--device", "cpu")
    assert ended.codes == [0, 0], ended
    assert _waits(ranks) == {"build_model", "problem", "load", "show"}


def test_memory_that_one_rank_lacks_for_figures_makes_smaller_micro_batches(ranks: Ranks) -> None:
    words = (f"{__file__}:Cramped", "--run", "r", "--max-steps", "2", "--device", "cpu")
    ended = ranks.train(2, *words, "--batch-size", "8", "--rehearsal")
    assert (
        "process 0: the host's memory is used up with 4 examples at once: restarting" in ended.out
    )
    assert ended.out.count("restarting with smaller micro-batches of the same batch") == 1
    assert "\nbatch      8 = 2 processes x 2 x 2 accumulation\n" in ended.out
