"""A training that compiles nothing does not import torch's compiler; any other use finds it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.commands import Trainbox, clean_environment
from tests.support.tiny import TINY
from trainer.loop import compiler

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
    optimizer.zero_grad()  # excluded from tracing
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


OTHER_ARGUMENTS = """
assert torch._dynamo.disable(abs, wrapping=False)._torchdynamo_disable
step()
"""


@pytest.mark.parametrize(
    ("version", "replaced"),
    [("2.15.0", True), ("2.15.0+cu132", True), ("2.15.1", False), ("2.16.0", False)],
)
def test_another_torch_version_gets_the_real_module(
    version: str, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = object()
    monkeypatch.setitem(vars(torch), "_dynamo", before)
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)  # so that both are restored afterwards
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    monkeypatch.setattr(torch, "__version__", version)
    compiler.postpone()
    assert ("torch._dynamo" in sys.modules) is replaced
    assert (torch._dynamo is not before) is replaced


def test_the_torch_version_of_the_lock_is_tested() -> None:
    (locked,) = re.findall(r"^torch==(\S+)", (ROOT / "requirements.lock").read_text(), re.M)
    assert locked in compiler.TESTED_TORCH


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


def test_a_later_compilation_gets_the_real_module() -> None:
    run(PLAIN, COMPILES)


def test_the_import_of_a_part_gets_the_real_module() -> None:
    run(PLAIN, PARTS)


def test_other_arguments_get_the_real_module() -> None:
    run(PLAIN, OTHER_ARGUMENTS)


def test_a_training_does_not_import_the_compiler(tmp_path: Path) -> None:
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


def test_a_compiled_model_has_the_losses_of_the_plain_one(trainbox: Trainbox) -> None:
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
