"""A batch cut into shards gives the same bits on one, two, three and four processes."""

import shutil
from typing import Any

import pytest

from tests.support.paths import SUPPORT
from tests.support.ranks import Forks, Ranks, ranks_in
from trainer.records.compare_records import Evidence, verdict
from trainer.records.run_record import RunRecord

_SHAKY = f"{SUPPORT / 'jobs.py'}:Shaky"
_WORDS = (
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
    "--log-steps",
    "1",
    "--device",
    "cpu",
)
_TIMES = {"time_unix_s", "samples_per_second", "exchange_share", "data_share"}


def _entries(ranks: Ranks, run: str) -> list[dict[str, Any]]:
    """Return what a run has logged, without times."""
    entries = [*ranks.entries(run, "train"), *ranks.entries(run, "validation")]
    return [{n: v for n, v in entry.items() if n not in _TIMES} for entry in entries]


@pytest.fixture(scope="module")
def alone(
    forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, Any]]]:
    """Return the digest and the entries of one process."""
    with ranks_in(forks, tmp_path_factory.mktemp("alone")) as ranks:
        digest = ranks.train(1, _SHAKY, *_WORDS, "--workers", "0", "--run", "r").digest
        # One process has no exchange.
        assert not any("exchange_share" in entry for entry in ranks.entries("r", "train"))
        return digest, _entries(ranks, "r")


@pytest.mark.parametrize(
    ("processes", "workers"),
    [
        (2, "1"),
        pytest.param(3, "0", marks=pytest.mark.slow),
        (4, "0"),
        pytest.param(4, "2", marks=pytest.mark.slow),
    ],
)
def test_weights_metrics_and_gradient_norms_are_the_same(
    ranks: Ranks, alone: tuple[str, list[dict[str, Any]]], processes: int, workers: str
) -> None:
    """Cover batch norm, dropout, augmentation in loader workers, accumulation and clipping."""
    ended = ranks.train(processes, _SHAKY, *_WORDS, "--workers", workers, "--run", "r")
    assert (ended.digest, _entries(ranks, "r")) == alone
    assert len(alone[1]) == 45 + 2
    training = ranks.entries("r", "train")
    assert all(0 < entry["exchange_share"] < 1 for entry in training[1:])


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


def test_models_of_all_kinds_have_the_same_bits_also_after_a_resume(ranks: Ranks) -> None:
    """Cover buffers that move late, in validation or in another type, and many buckets.

    Five shards are trained on one, two and three processes.
    """
    ranks.train(1, _MIXED, *_MIXED_WORDS, "--run", "one", "--checkpoint-steps", "3", "--keep", "99")
    ranks.train(3, _MIXED, *_MIXED_WORDS, "--run", "three", "--rehearsal")
    runs = ranks.folder / "runs"
    shutil.copytree(runs / "one", runs / "again")
    for path in (runs / "again" / "checkpoints").iterdir():
        if path.stem > "step-00000009":
            path.unlink()
    resumed = ranks.train(2, _MIXED, *_MIXED_WORDS, "--run", "again")
    assert "resume     from step 9" in resumed.out
    for other in ("three", "again"):
        both = [Evidence.of(RunRecord.open(runs / name)) for name in ("one", other)]
        assert "SAME BITS" in verdict(*both)


def test_a_task_that_differs_by_process_is_named(ranks: Ranks) -> None:
    ended = ranks(2, "train", _MIXED, *_MIXED_WORDS, "--set", "by_rank=true", "--fast")
    assert ended.codes == [2, 2]
    assert "task Mixed: the processes differ at step " in ended.errs[0]
    assert "first in head.bias" in ended.errs[0]


def test_weights_that_a_forward_sets_from_the_data_of_a_shard_are_refused(ranks: Ranks) -> None:
    ended = ranks(2, "train", "tests.support.tiny:SetByData", "--rehearsal")
    assert ended.codes == [2, 2]
    assert "a forward changes the trained parameter factor_4, and with shards" in ended.errs[0]
    assert not list((ranks.folder / "runs").glob("*/checkpoints/*"))
