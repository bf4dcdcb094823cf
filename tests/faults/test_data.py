"""Resumes on other numbers of processes and workers, small shared memory, and no examples."""

import itertools
import json
import signal
from pathlib import Path

import pytest

from tests.support.faults import (
    GATED,
    TASKS,
    Gate,
    in_a_mount_namespace,
    messages,
    needs_root,
)
from tests.support.ranks import EndedRanks, Ranks
from trainer.data.schedule import epoch_order


def _seen(folder: Path, rank: int, start: int = 0) -> list[list[int]]:
    """Return the examples of each step of a start, whose steps begin at line `start`."""
    lines = (folder / f"seen-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[start:]]


def test_row_46_resumed_on_fewer_processes_each_example_is_seen_once(ranks: Ranks) -> None:
    words = (f"{TASKS}:Audited", *GATED[1:], "--max-steps", "120")
    gate = Gate(ranks.folder, 50, 1)
    training = ranks.start(2, "train", *words, "--workers", "1")
    gate.wait_for(training)
    training.send_signal(signal.SIGTERM)
    gate.release()
    assert training.wait().codes == [75, 75]
    first, second = _seen(ranks.folder, 0), _seen(ranks.folder, 1)
    stopped = len(first)
    assert len(second) == stopped
    assert 50 <= stopped < 60

    refused = ranks(3, "train", *words)
    assert refused.codes == [2, 2, 2]
    assert all(
        "this run has 2 shard(s), fewer than 3 processes: use at most 2 process(es)" in err
        for err in refused.errs
    )

    more = ("--workers", "2", "--checkpoint-steps", "100", "--keep", "1")
    resumed = ranks.train(1, *words, *more)
    assert f"resume     from step {stopped}, epoch 2" in resumed.out
    both = [one + other for one, other in zip(first, second, strict=True)]
    later = _seen(ranks.folder, 0, start=stopped)
    both += [one + other for one, other in zip(later[::2], later[1::2], strict=True)]
    assert len(both) == 120
    for epoch, steps in enumerate(zip(*[iter(both)] * 40, strict=True)):
        assert list(itertools.chain(*steps)) == epoch_order(0, epoch, 650)[:640].tolist()


def _with_shared_memory(ranks: Ranks, size: str, *words: str) -> EndedRanks:
    """Train with batches of 16 x 400 kB and a /dev/shm of `size`."""
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    more = ("--set", "padding=100000", "--workers", "2", *words)
    return in_a_mount_namespace(ranks, [mount], f"{TASKS}:Loaded", *GATED[1:], *more)


@needs_root
def test_row_28_shared_memory_too_small(ranks: Ranks) -> None:
    """Two workers prefetch 2 batches each, and the training uses 2: they need 37 MiB."""
    ended = _with_shared_memory(ranks, "30m", "--max-steps", "45")
    assert ended.code == 4
    assert messages(ended) == [
        "trainbox: /dev/shm (30 MiB) is too small for the batches of the loader workers: start "
        "the container with --shm-size=1g (Compose: SHM_SIZE=1gb) or --ipc=host, or add --workers 0"
    ]
    assert "Traceback" not in ended.errs[0]


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize(("size", "words"), [("30m", ["--workers", "0"]), ("64m", [])])
def test_row_28_shared_memory_that_suffices(ranks: Ranks, size: str, words: list[str]) -> None:
    assert _with_shared_memory(ranks, size, "--max-steps", "45", *words).code == 0


@needs_root
def test_row_28_shared_memory_too_small_for_one_example(ranks: Ranks) -> None:
    ended = _with_shared_memory(ranks, "300k")
    assert ended.code == 4
    assert len(messages(ended)) == 1
    assert "/dev/shm (0 MiB) is too small for the batches of the loader workers" in ended.errs[0]
    assert "--shm-size=1g" in ended.errs[0]
    assert "Traceback" not in ended.errs[0]


def test_row_29_an_empty_dataset(ranks: Ranks) -> None:
    ended = ranks(1, "train", f"{TASKS}:Empty", *GATED[1:])
    assert ended.codes == [2]
    assert messages(ended) == [
        f"trainbox: task {TASKS}:Empty: the training set is empty: check --data-dir "
        "and the task's train_dataset()"
    ]
