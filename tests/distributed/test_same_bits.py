"""R3: a batch cut into shards gives the same bits on one, two, three and four processes."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainbox

_SHAKY = f"{Path(__file__).with_name('jobs.py')}:Shaky"
_TIMES = {"time_unix_s", "samples_per_second"}


def _train(trainbox: Trainbox, processes: int, workers: int) -> tuple[str, list[dict[str, Any]]]:
    run = f"on{processes}"
    words = ["--shards", "4", "--accumulation", "2", "--precision", "bf16", "--clip-norm", "3", "--max-steps", "45"]
    words += ["--log-steps", "1", "--workers", str(workers), "--device", "cpu", "--processes", str(processes), "--run", run]
    ended = trainbox.train(_SHAKY, *words)
    kinds = [trainbox.entries(run, kind) for kind in ("train", "validation")]
    return ended.digest, [{n: v for n, v in entry.items() if n not in _TIMES} for entries in kinds for entry in entries]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    return _train(Trainbox(tmp_path_factory.mktemp("alone")), 1, 0)


@pytest.mark.parametrize(("processes", "workers"), [(2, 1), (3, 0), (4, 2)])
def test_weights_metrics_and_gradient_norms_are_the_same(
    trainbox: Trainbox, alone: tuple[str, list[dict[str, Any]]], processes: int, workers: int
) -> None:
    """With batch norm, dropout, augmentation in loader workers, accumulation, bf16 and clipping."""
    digest, entries = _train(trainbox, processes, workers)
    assert entries == alone[1]
    assert len(entries) == 45 + 2
    assert digest == alone[0]
