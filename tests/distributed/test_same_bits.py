"""R3: a batch cut into shards gives the same bits on one, two, three and four processes."""

import shutil
from typing import Any

import pytest

from tests.support.commands import Trainbox
from tests.support.paths import SUPPORT

_SHAKY = f"{SUPPORT / 'jobs.py'}:Shaky"
_TIMES = {"time_unix_s", "samples_per_second", "exchange_share"}


def _train(trainbox: Trainbox, processes: int, workers: int) -> tuple[str, list[dict[str, Any]]]:
    run = f"on{processes}"
    words = [
        "--shards",
        "4",
        "--accumulation",
        "2",
        "--precision",
        "bf16",
        "--clip-norm",
        "3",
        "--max-steps",
        "45",
    ]
    words += [
        "--log-steps",
        "1",
        "--workers",
        str(workers),
        "--device",
        "cpu",
        "--processes",
        str(processes),
        "--run",
        run,
    ]
    ended = trainbox.train(_SHAKY, *words)
    kinds = [trainbox.entries(run, kind) for kind in ("train", "validation")]
    if processes == 1:
        # there is nobody to exchange with
        assert not any("exchange_share" in entry for entry in kinds[0])
    else:
        assert all(0 < entry["exchange_share"] < 1 for entry in kinds[0][1:])
    return ended.digest, [
        {n: v for n, v in entry.items() if n not in _TIMES}
        for entries in kinds
        for entry in entries
    ]


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


_MIXED = f"{SUPPORT / 'mixed.py'}:Mixed"
_MIXED_WORDS = [
    "--shards",
    "5",
    "--clip-norm",
    "1",
    "--log-steps",
    "1",
    "--digest-steps",
    "2",
    "--device",
    "cpu",
]


def test_models_of_all_kinds_have_the_same_bits_also_after_a_stop(trainbox: Trainbox) -> None:
    """Buffers that move late, in validation or in another type, many buckets, five shards on one
    and three processes.
    """
    trainbox.train(_MIXED, *_MIXED_WORDS, "--run", "one", "--checkpoint-steps", "3", "--keep", "99")
    trainbox.train(_MIXED, *_MIXED_WORDS, "--run", "three", "--processes", "3")
    run = trainbox.folder / "runs" / "one"
    again = trainbox.folder / "runs" / "again"
    shutil.copytree(run, again)
    for path in (again / "checkpoints").iterdir():
        if path.stem > "step-00000009":
            path.unlink()
    assert (
        "resume     from step 9"
        in trainbox.train(_MIXED, *_MIXED_WORDS, "--run", "again", "--processes", "2").out
    )
    for other in ("three", "again"):
        compared = trainbox("verify", "runs/one", f"runs/{other}")
        assert "SAME BITS" in compared.out, compared.err


def test_a_task_that_is_not_the_same_on_each_process_is_named(trainbox: Trainbox) -> None:
    ended = trainbox(
        "train", _MIXED, *_MIXED_WORDS, "--set", "by_rank=true", "--processes", "2", "--fast"
    )
    assert ended.code == 2
    assert "task Mixed: the processes differ at step " in ended.err
    assert "first in head.bias" in ended.err
