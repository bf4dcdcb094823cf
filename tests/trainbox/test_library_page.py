"""The scripts and functions of docs/guides/library.md run on 1 and 2 processes, and survive kills.

The fast tests fork the processes. The slow tests start `python FILE` and `torchrun FILE`, or drill
the scripts of the page and of examples/.
"""

import importlib.util
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.commands import Trainbox, finish, wait_until
from tests.support.scripts import Script, Scripts, wait_for_handlers
from trainbox import Checkpoints, epoch_order
from trainbox.contract.sidecar import steps_in

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs/guides/library.md").read_text(encoding="utf-8")
_SCRIPTS = {
    code.splitlines()[0].strip('"'): code
    for code in re.findall(r"```python\n(\"\"\".*?)```", _PAGE, re.DOTALL)
}
_STOP = "Stop all ranks after the same step."
_CHECKPOINTS = "Resume from the newest checkpoint."
_ORDER = "Use the examples in a new order in each epoch; resume from the step in the argument."
_RESUME = "Train, and resume from the newest epoch."
_BATCHES = "Load batches from any step; resume from the step in the argument."
_METRICS = "Report metrics, and read them again."
_FOLDER = "Count how often this command was started."

# Functions that the page describes without a script.
_SCRIPTS |= {
    _STOP: """
import os, sys, time
import torch.distributed as dist
import trainbox

if "RANK" in os.environ:
    dist.init_process_group("gloo")
for step in range(1, 3001):
    time.sleep(0.01)
    if stop := trainbox.stop_requested():
        print(f"stopped after step {step}", flush=True)
        break
if dist.is_initialized():
    dist.destroy_process_group()
sys.exit(75 if stop else 0)
""",
    _ORDER: """
import os, sys
import trainbox

n, batch_size, epochs = 50, 4, 3
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
steps_per_epoch = n // batch_size
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 0, epochs * steps_per_epoch):
    epoch, index = divmod(step, steps_per_epoch)
    order = trainbox.epoch_order(seed=0, epoch=epoch, n=n)
    start = index * batch_size
    print(step, *order[start + rank : start + batch_size : world_size], flush=True)
""",
    _METRICS: """
import json, os
import trainbox

for step in range(1, 101):
    if step % 10 == 0:
        trainbox.metrics(step, loss=1 / step, learning_rate=0.01)
    if step % 50 == 0:
        trainbox.metrics(step, kind="validation", accuracy=1 - 1 / step)
if os.environ.get("RANK", "0") == "0":
    lines = (trainbox.run_folder() / "metrics.jsonl").read_text().splitlines()
    entries = {(entry["kind"], entry["step"]): entry for entry in map(json.loads, lines)}
    for (kind, step), entry in entries.items():
        if kind == "validation":
            print(step, entry["accuracy"], flush=True)
""",
    _FOLDER: """
import os
import trainbox

folder = trainbox.run_folder()
if os.environ.get("RANK", "0") == "0":
    with (folder / "starts.txt").open("a") as file:
        file.write("started\\n")
    starts = len((folder / "starts.txt").read_text().splitlines())
    print(f"{folder}: start {starts}", flush=True)
""",
}

_on_1_and_2 = pytest.mark.parametrize("processes", [1, 2])


@pytest.fixture(params=["forked", pytest.param("real", marks=pytest.mark.slow)])
def scripts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scripts]:
    ranks = request.getfixturevalue("ranks") if request.param == "forked" else None
    starter = Scripts(tmp_path, ranks)
    yield starter
    starter.close()


def test_a_resume_takes_six_lines() -> None:
    lines = _SCRIPTS[_RESUME].splitlines()
    added = [line for line in lines if re.search(r"  # \d$", line)]
    assert len(added) == 6
    assert [line for line in lines if re.search("trainbox|state|checkpoints", line)][:-1] == added


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("example", "processes", "arguments"),
    [
        (_RESUME, 1, ()),
        ("ddp", 1, ("--epochs", "2")),
        ("ddp", 2, ("--epochs", "2")),
        ("accelerate", 1, ("--epochs", "40")),
        ("accelerate", 2, ("--epochs", "40")),
        ("lightning", 1, ("--epochs", "40")),
        ("lightning", 2, ("--epochs", "40")),
    ],
)
def test_drills(
    trainbox: Trainbox, example: str, processes: int, arguments: tuple[str, ...]
) -> None:
    """The drill of examples/plain and examples/forgetful is in tests/tasks/test_examples.py."""
    script = _ROOT / "examples" / example / "train.py"
    if example in _SCRIPTS:
        # With reported steps, the verdict does not depend on the speed of this machine.
        save = "    checkpoints.save("
        report = f"    print('{{\"step\": %d}}' % (epoch + 1))\n{save}"
        (script := trainbox.folder / "train.py").write_text(_SCRIPTS[example].replace(save, report))
    elif example != "ddp" and importlib.util.find_spec(example) is None:
        pytest.skip(f"the package {example} is not installed")
    process = trainbox.start(
        *("drill", "run", str(script), "--compare", "model.pt", "--cpu", "--seed", "1"),
        *("--processes", str(processes), "--kills", "1", "--", *arguments),
        env={"OMP_NUM_THREADS": "1", "TMPDIR": str(trainbox.folder)},
    )
    ended = finish(process, timeout_s=850)
    assert (ended.code, ended.err) == (0, "")
    assert "  the same bits in all 2 trainings: " in ended.out


def _endless(script: str, bound: str) -> str:
    """Return a script of the page that runs until it is stopped or killed."""
    code = _SCRIPTS[script]
    assert code.count(bound) == 1
    return code.replace(bound, bound.replace(re.findall(r"\d+", bound)[-1], "10**9"))


@_on_1_and_2
def test_stop(scripts: Scripts, processes: int) -> None:
    started = scripts.start(processes, _SCRIPTS[_STOP])
    wait_for_handlers(started, processes)
    os.kill(started.pids()[-1], signal.SIGTERM)  # only the last rank
    _check_stopped(started)
    lines = started.output().splitlines()
    assert len(lines) == processes
    assert len(set(lines)) == 1
    assert re.fullmatch(r"stopped after step \d+", lines[0])


@_on_1_and_2
def test_checkpoints(scripts: Scripts, processes: int) -> None:
    folder, endless = scripts.run / "checkpoints", _endless(_CHECKPOINTS, "step < 500")

    def newest() -> int:
        return max(steps_in(folder), default=0)

    started = scripts.start(processes, endless)
    wait_until(lambda: newest() >= 20, started)
    scripts.kill(started)
    killed_at = newest()
    started = scripts.start(processes, endless)
    wait_until(lambda: newest() > killed_at, started)
    wait_for_handlers(started, processes)  # the resume may have finished the save before
    os.kill(started.pids()[-1], signal.SIGTERM)
    _check_stopped(started)
    stopped_at = newest()
    assert scripts.start(processes, _SCRIPTS[_CHECKPOINTS]).codes() == [0] * processes
    checkpoints = Checkpoints(folder, best="min")
    found, best = checkpoints.load(), checkpoints.load(best=True)
    assert found is not None
    assert best is not None
    state, step = found
    assert step == max(500, stopped_at) > killed_at
    expected = torch.zeros(1000)
    for seed in range(step):
        expected += torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(state["weight"], expected)
    assert best[1] == 10  # the sum grows
    assert len(list(folder.glob("step-*"))) == 6


@_on_1_and_2
@pytest.mark.parametrize(
    ("script", "bound", "n", "batch_size"),
    [(_ORDER, "n, batch_size, epochs = 50, 4, 3", 50, 4), (_BATCHES, "range(50)), 8, 3", 50, 8)],
)
def test_orders(
    scripts: Scripts, processes: int, script: str, bound: str, n: int, batch_size: int
) -> None:
    endless, found, first_step = _endless(script, bound), dict[int, list[int]](), 0
    for _ in range(2):  # a kill, and a resume that is killed as well
        output = _killed(scripts, processes, endless, first_step, batch_size)
        last_step = _complete(output, batch_size)
        for line in output.split("\n")[:-1]:
            step, *examples = map(int, line.split())
            if step <= last_step:
                found.setdefault(step, []).extend(examples)
        first_step = last_step + 1
    steps_per_epoch = n // batch_size
    assert sorted(found) == list(range(first_step))
    for step, examples in found.items():
        epoch, index = divmod(step, steps_per_epoch)
        batch = epoch_order(0, epoch, n)[index * batch_size : (index + 1) * batch_size]
        assert sorted(examples) == sorted(batch), step


def _check_stopped(script: Script) -> None:
    """Check the exit code 75. torchrun sends SIGTERM to the ranks that have not exited yet."""
    assert 75 in script.codes()
    assert set(script.codes()) <= {75, -signal.SIGTERM}


def _killed(scripts: Scripts, processes: int, code: str, first_step: int, batch_size: int) -> str:
    """Run the script from `first_step`, kill it after some steps, and return its output."""
    started = scripts.start(processes, code, str(first_step))
    wait_until(lambda: _complete(started.output(), batch_size) >= first_step + 30, started)
    scripts.kill(started)
    return started.output()


def _complete(output: str, batch_size: int) -> int:
    """Return the last step that all ranks have printed, or -1."""
    counts: dict[int, int] = {}
    for line in output.split("\n")[:-1]:
        step, *examples = line.split()
        counts[int(step)] = counts.get(int(step), 0) + len(examples)
    return max((step for step, count in counts.items() if count == batch_size), default=-1)


@_on_1_and_2
def test_metrics(scripts: Scripts, processes: int) -> None:
    path = scripts.run / "metrics.jsonl"
    started = scripts.start(processes, _endless(_METRICS, "range(1, 101)"))
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= 20, started)
    scripts.kill(started)
    before = path.read_text().count("\n")
    started = scripts.start(processes, _SCRIPTS[_METRICS])
    assert started.codes() == [0] * processes
    assert started.output().splitlines()[:2] == ["50 0.98", "100 0.99"]
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(entries) == before + 12
    assert [(entry["kind"], entry["step"]) for entry in entries[-3:]] == [
        ("train", 90),
        ("train", 100),
        ("validation", 100),
    ]


@_on_1_and_2
def test_run_folder(scripts: Scripts, processes: int) -> None:
    for number in (1, 2):
        started = scripts.start(processes, _SCRIPTS[_FOLDER])
        assert started.codes() == [0] * processes
        assert started.output() == f"{scripts.run}: start {number}\n"
