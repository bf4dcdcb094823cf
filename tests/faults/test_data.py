"""A resume that is not like the start: on fewer processes, with other loader workers, on too many."""

import itertools
import json
import signal
from pathlib import Path

import pytest

from tests.conftest import Trainbox, finish
from tests.distributed.processes import Job
from tests.faults.faults import GATED, TASKS, Gate, needs_linux
from trainer.batches import epoch_order


def _seen(folder: Path, rank: int) -> list[list[int]]:
    return [json.loads(line) for line in (folder / f"seen-{rank}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@needs_linux
def test_row_46_resumed_on_fewer_processes_each_example_is_seen_once(trainbox: Trainbox) -> None:
    words = (f"{TASKS}:Audited", *GATED[1:], "--max-steps", "120")
    gate = Gate(trainbox.folder, 50, 1)
    process = trainbox.start("train", *words, "--processes", "2", "--workers", "1")
    gate.wait_for(process)
    Job(process, 2).signal_all(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    gate.release()
    assert finish(process).code == 75
    first, second = _seen(trainbox.folder, 0), _seen(trainbox.folder, 1)
    stopped = len(first)
    assert len(second) == stopped
    assert 50 <= stopped < 60

    refused = trainbox("train", *words, "--processes", "3")
    assert refused.code == 2
    assert "this run was started with 2 shard(s) a batch, and 3 processes are given: use at most 2" in refused.err

    resumed = trainbox.train(*words, "--workers", "2", "--checkpoint-steps", "100", "--keep", "1")
    assert f"resume     from step {stopped}, epoch 2" in resumed.out
    both = [one + other for one, other in zip(first, second, strict=True)]
    later = _seen(trainbox.folder, 0)[stopped:]
    both += [one + other for one, other in zip(later[::2], later[1::2], strict=True)]
    assert len(both) == 120
    for epoch, steps in enumerate(zip(*[iter(both)] * 40, strict=True)):
        assert list(itertools.chain(*steps)) == epoch_order(0, epoch, 650)[:640].tolist()
