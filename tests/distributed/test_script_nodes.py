"""`trainbox run` on two nodes: ranks, records, and a stop of one node."""

import json
import signal
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, finish, wait_until
from tests.support.nodes import free_port

pytestmark = [pytest.mark.slow, pytest.mark.waits]

SCRIPT = """
import json, os, pathlib, signal, sys
run, rank = pathlib.Path(os.environ["TRAINBOX_RUN"]), os.environ["RANK"]
def save(*_):
    (run / f"saved-{rank}").touch()
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, save)
names = "WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID".split()
print(json.dumps({"step": int(rank), **{name: os.environ[name] for name in names}}), flush=True)
(run / f"ready-{rank}").touch()
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("stopped", "code"), [(1, 0), (0, 143)])
def test_a_stop_of_one_node_stops_all_and_each_rank_saves(
    trainbox: Trainbox, stopped: int, code: int
) -> None:
    (trainbox.folder / "mine.py").write_text(SCRIPT)
    meet = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job 7")
    meet += ("--run", "r")
    nodes = [
        trainbox.start(
            *("run", *meet, "--node-rank", str(rank), "--processes", str(rank + 1)),
            *("mine.py", str(code)),
        )
        for rank in range(2)
    ]
    run = trainbox.folder / "runs/r"
    for rank in range(3):
        wait_until((run / f"ready-{rank}").exists, nodes[0])
    nodes[stopped].send_signal(signal.SIGTERM)
    ended = [finish(node) for node in nodes]
    assert [end.code for end in ended] == [75, 75], [end.err for end in ended]
    assert f"node {stopped} " in ended[1 - stopped].err
    assert "stops, and so does this node" in ended[1 - stopped].err
    assert sorted(path.name for path in run.glob("saved-*")) == ["saved-0", "saved-1", "saved-2"]
    # The ranks are numbered over the nodes, and each node writes its own logs.
    logs = ("node-0-rank-0", "node-1-rank-0", "node-1-rank-1")
    assert {path.stem for path in (run / "logs").iterdir()} == set(logs)
    found = [json.loads((run / f"logs/{name}.log").read_text()) for name in logs]
    assert [one["step"] for one in found] == [0, 1, 2]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "0", "1"]
    assert {one["WORLD_SIZE"] for one in found} == {"3"}
    assert {one["TORCHELASTIC_RUN_ID"] for one in found} == {"job 7"}
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found}) == 1
    # Only node 0 writes the records, with the report of rank 0.
    (start,) = json.loads((run / "manifest.json").read_text())["starts"]
    assert (start["nodes"], start["processes"]) == (2, 1)
    assert [entry["step"] for entry in _entries(run)] == [0]
    (start,) = json.loads((run / "manifest.json").read_text())["starts"]
    assert start["exit_code"] == 75


def _entries(run: Path) -> list[dict[str, object]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["kind"] == "train"]
