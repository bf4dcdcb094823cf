"""The compiler is not imported by a training that compiles nothing, and is all there for one that
does.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, clean_environment
from tests.support.tiny import TINY

ROOT = Path(__file__).parents[3]

PLAIN = """
import inspect, sys
import torch
from trainer.loop import compiler

compiler.postpone()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight])

def step():
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())

compiler.postpone()  # as the next training of a sweep does
step()
inspect.getsource(torch.optim.AdamW), inspect.getmodule(step)  # look at all modules
assert [name for name in sys.modules if name.startswith("torch._dynamo.")] == []
"""

COMPILES = """
import importlib.util

assert importlib.util.find_spec("torch._dynamo").origin.endswith("__init__.py")
graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

def moved(x):
    optimizer.zero_grad()  # which the compiler is told to leave alone
    return x + 1

assert torch.compile(moved, backend=backend)(torch.zeros(2)).tolist() == [1.0, 1.0]
assert len(graphs) == 1
told = vars(torch.optim.Optimizer.zero_grad.__wrapped__)["__dynamo_disable"]
assert told._torchdynamo_disable
step()
"""

PARTS = """
import torch._dynamo.config
from torch._dynamo import optimize
assert torch._dynamo.config.recompile_limit > 0
assert torch._dynamo is sys.modules["torch._dynamo"] is not None
assert type(torch._dynamo).__name__ == "module"
compiler.postpone()
assert type(torch._dynamo).__name__ == type(sys.modules["torch._dynamo"]).__name__ == "module"
step()
"""


OTHER_WORDS = """
assert torch._dynamo.disable(abs, wrapping=False)._torchdynamo_disable
step()
"""


def run(*parts: str) -> None:
    program = "\n".join(parts)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_who_compiles_after_all_finds_the_compiler() -> None:
    run(PLAIN, COMPILES)


def test_who_imports_a_part_of_it_finds_it() -> None:
    run(PLAIN, PARTS)


def test_who_asks_in_other_words_asks_the_compiler() -> None:
    run(PLAIN, OTHER_WORDS)


def test_a_training_does_without(tmp_path: Path) -> None:
    words = ["train", "digits", "--max-steps", "1", "--device", "cpu", "--runs-dir", str(tmp_path)]
    ended = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-m", "trainer", *words],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    imported = {
        line.rpartition("|")[2].strip()
        for line in ended.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "torch" in imported
    assert sorted(name for name in imported if name.startswith("torch._dynamo")) == []


def test_a_compiled_model_trains_as_the_plain_one_does(trainbox: Trainbox) -> None:
    words = [
        "train",
        TINY,
        "--max-steps",
        "5",
        "--log-steps",
        "1",
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    losses = []
    for run, more in (("plain", []), ("compiled", ["--compile"])):
        ended = trainbox(
            *words, "--run", run, *more, module="trainer", env={"PYTHONPATH": str(ROOT)}
        )
        assert ended.code == 0, ended.err
        losses.append([entry["loss"] for entry in trainbox.entries(run, "train")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 5
