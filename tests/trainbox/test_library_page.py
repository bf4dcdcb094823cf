"""The scripts of docs/guides/library.md run on 1 and 2 processes, and survive kills.

The fast tests fork the processes. The slow tests start `python FILE` and `torchrun FILE`, or drill
the scripts of the page and of examples/.
"""

import importlib.util
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
from trainbox.files.sidecar import steps_in

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs/guides/library.md").read_text(encoding="utf-8")
_SCRIPTS = {
    code.splitlines()[0].strip('"'): code
    for code in re.findall(r"```python\n(\"\"\".*?)```", _PAGE, re.DOTALL)
}
_CHECKPOINTS = "Resume from the newest checkpoint."
_RESUME = "Train, and resume from the newest epoch."
_BATCHES = "Load batches from any step; resume from the step in the argument."

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
        *("drill", "run", str(script), "--compare", "model.pt", "--gpus", "0", "--seed", "1"),
        *("--processes", str(processes), "--kills", "1", "--", *arguments),
        env={"OMP_NUM_THREADS": "1", "TMPDIR": str(trainbox.folder)},
    )
    ended = finish(process)
    assert (ended.code, ended.err) == (0, "")
    assert "  the same bits in all 2 trainings: " in ended.out


def _endless(script: str, bound: str) -> str:
    """Return a script of the page that runs until it is stopped or killed."""
    code = _SCRIPTS[script]
    assert code.count(bound) == 1
    return code.replace(bound, bound.replace(re.findall(r"\d+", bound)[-1], "10**9"))


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
def test_batches(scripts: Scripts, processes: int) -> None:
    endless, found, first_step = _endless(_BATCHES, "range(50)), 8, 3"), dict[int, list[int]](), 0
    n, batch_size = 50, 8
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
