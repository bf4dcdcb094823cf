"""Torch's compiler and symbolic shapes: a training that compiles nothing does not import them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.commands import clean_environment
from tests.support.paths import ROOT
from tests.support.ranks import Ranks
from tests.support.tiny import TINY
from trainer.loop import compiler

_SHAPES = "torch.fx.experimental.symbolic_shapes"

# Runs each program of standard input in a fork. The parent has torch, but not its compiler.
_FORK_EACH = """
import json, os, sys, traceback
import torch
import torch.utils.tensorboard
import trainer.session.train

def run(name, program):
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        exec(compile(program, name, "exec"), {"__name__": "program"})
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)

assert [name for name in sys.modules if name.startswith("torch._dynamo")] == []
print(json.dumps({name: run(name, program) for name, program in json.load(sys.stdin).items()}))
"""

_PLAIN = """
import inspect, sys
import torch
from trainer.loop import compiler

compiler.postpone()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight])

def step():
    torch.autograd.backward([weight * 2], [torch.ones(2)])
    assert weight.grad.tolist() == [2.0, 2.0]
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())

compiler.postpone()  # as the next training of a sweep does
step()
inspect.getsource(torch.optim.AdamW), inspect.getmodule(step)  # look at all modules
for size in ((3,), (2, 1)):
    try:
        torch.autograd.backward([weight * 2], [torch.ones(size)])
    except RuntimeError as error:
        assert "Mismatch in shape" in str(error), error
    else:
        raise AssertionError(size)
assert [name for name in sys.modules if name.startswith(("torch._dynamo.", "sympy"))] == []
"""

_COMPILES = """
import importlib.util

assert importlib.util.find_spec("torch._dynamo").origin.endswith("__init__.py")
graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

def moved(x):
    optimizer.zero_grad()  # disabled for the compiler
    return x + 1

assert torch.compile(moved, backend=backend)(torch.zeros(2)).tolist() == [1.0, 1.0]
assert len(graphs) == 1
disabled = vars(torch.optim.Optimizer.zero_grad.__wrapped__)["__dynamo_disable"]
assert disabled._torchdynamo_disable
step()
"""

_IMPORTS_A_PART = """
import torch._dynamo.config
from torch._dynamo import optimize
assert torch._dynamo.config.recompile_limit > 0
assert torch._dynamo is sys.modules["torch._dynamo"] is not None
assert type(torch._dynamo).__name__ == "module"
compiler.postpone()
assert type(torch._dynamo).__name__ == type(sys.modules["torch._dynamo"]).__name__ == "module"
step()
"""

_OTHER_ARGUMENTS = """
assert torch._dynamo.disable(abs, wrapping=False)._torchdynamo_disable
step()
"""

_SYMBOLIC_VALUES = """
from torch.fx.experimental.symbolic_shapes import expect_true, sym_eq
assert [name for name in sys.modules if name.startswith("sympy")] == []
from torch.fx.experimental.symbolic_shapes import ShapeEnv

assert type(sys.modules[ShapeEnv.__module__]).__name__ == "module"
size = ShapeEnv().create_unbacked_symint()
same = sym_eq((size, 2), (size, 2))
assert type(same) is torch.SymBool and expect_true(same) is True
step()
"""

_TRAIN = """
import functools, os, sys
import torch
from tests.support.tiny import TINY
from trainer.cli.commands import main

def train(task, *options):
    sys.argv = ["trainer", "train", task, *options, "--device", "cpu", "--threads", "1"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, ended.code

os._exit, leave = sys.exit, os._exit
"""

_TRAINS_WITHOUT = """
train("digits", "--max-steps", "1", "--run", "without")
assert [name for name in sys.modules if name.startswith(("torch._dynamo.", "sympy"))] == []
leave(0)
"""

# The eager backend traces the model with the compiler and generates no code.
_TRAINS_COMPILED = """
graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

torch.compile = functools.partial(torch.compile, backend=backend)
train(TINY, "--max-steps", "3", "--log-steps", "1", "--run", "plain")
assert graphs == []
train(TINY, "--max-steps", "3", "--log-steps", "1", "--run", "compiled", "--compile")
assert graphs
leave(0)
"""

# The kernels that the compiler generates are deterministic as well, unless --fast is given.
_SETS_ARITHMETIC = """
import sys
import torch
from trainer.loop.arithmetic import set_arithmetic
from trainbox.contract.config import Settings

def set_switches(**settings):
    set_arithmetic(Settings(8, 0.1, "fp32", "min:loss", shards=1, threads=1, **settings))
    return torch.are_deterministic_algorithms_enabled()

assert set_switches(deterministic=True)
assert "torch._inductor.config" not in sys.modules
for deterministic in (True, False):
    assert set_switches(deterministic=deterministic, compile=True) == deterministic
    assert torch._inductor.config.deterministic == deterministic
"""

_PROGRAMS = {
    "compare symbolic values": _PLAIN + _SYMBOLIC_VALUES,
    "train without": _TRAIN + _TRAINS_WITHOUT,
}
_MORE_PROGRAMS = {
    "set arithmetic": _SETS_ARITHMETIC,
    "train compiled": _TRAIN + _TRAINS_COMPILED,
    "import a part": _PLAIN + _IMPORTS_A_PART,
    "compile": _PLAIN + _COMPILES,
    "call disable with other arguments": _PLAIN + _OTHER_ARGUMENTS,
}


def _losses(run: Path) -> list[float]:
    entries = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if entry["kind"] == "train"]


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
    monkeypatch.setitem(sys.modules, _SHAPES, torch)
    monkeypatch.delitem(sys.modules, _SHAPES)
    monkeypatch.setattr(torch, "__version__", version)
    compiler.postpone()
    assert ("torch._dynamo" in sys.modules) is replaced
    assert (_SHAPES in sys.modules) is replaced
    assert (torch._dynamo is not before) is replaced


def test_the_torch_version_of_the_lock_is_tested() -> None:
    (locked,) = re.findall(r"^torch==(\S+)", (ROOT / "requirements.lock").read_text(), re.M)
    assert locked in compiler.TESTED_TORCH


def test_programs_that_do_not_need_the_compiler_do_not_import_it(tmp_path: Path) -> None:
    _run(tmp_path, _PROGRAMS)


@pytest.mark.slow
def test_programs_that_need_the_compiler_import_it(tmp_path: Path) -> None:
    _run(tmp_path, _MORE_PROGRAMS)
    plain, compiled = (_losses(tmp_path / "runs" / run) for run in ("plain", "compiled"))
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert len(plain) == 3


def _run(folder: Path, programs: dict[str, str]) -> None:
    """Run programs that assert their own values, each in a fork."""
    ended = subprocess.run(
        [sys.executable, "-c", _FORK_EACH],
        cwd=folder,
        env=clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
        input=json.dumps(programs),
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    codes = json.loads(ended.stdout)
    found = {name: (code, (folder / name).read_text()) for name, code in codes.items()}
    assert found == dict.fromkeys(programs, (0, ""))


@pytest.mark.slow
def test_a_compiled_model_trains_like_the_plain_one(ranks: Ranks) -> None:
    arguments = (TINY, "--max-steps", "5", "--log-steps", "1", "--device", "cpu", "--threads", "1")
    losses = []
    for run, more in (("plain", ()), ("compiled", ("--compile",))):
        ranks.train(1, *arguments, "--run", run, *more)
        losses.append([entry["loss"] for entry in ranks.entries(run, "train")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 5
