"""A training that compiles nothing does not import torch's compiler; a later use gets the real one.

`--compile` is compared with the plain model by a slow test.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import clean_environment
from tests.support.paths import ROOT
from tests.support.ranks import Ranks
from tests.support.tiny import TINY

# Trains, and then forks for each use of the compiler.
_PROGRAM = """
import inspect, os, sys
import torch
from trainer.cli.commands import main
from trainer.loop import compiler

def imported():
    return [name for name in sys.modules if name.startswith(("torch._dynamo.", "sympy"))]

used = sys.argv[1:]
sys.argv = "trainer train digits --max-steps 1 --device cpu --threads 1".split()
os._exit, leave = sys.exit, os._exit
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code

weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight])

def step():
    torch.autograd.backward([weight * 2], [torch.ones(2)])
    assert weight.grad.tolist() == [2.0, 2.0]
    optimizer.step()
    optimizer.zero_grad()

step()
inspect.getsource(torch.optim.AdamW), inspect.getmodule(step)  # look at all modules
for size in ((3,), (2, 1)):
    try:
        torch.autograd.backward([weight * 2], [torch.ones(size)])
    except RuntimeError as error:
        assert "Mismatch in shape" in str(error), error
    else:
        raise AssertionError(size)
compiler.postpone()  # as the next training of a sweep does
assert imported() == []

def compiles():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def moved(x):
        optimizer.zero_grad()  # excluded from the graph, as without the stand-in
        return x + 1

    assert torch.compile(moved, backend=backend)(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert len(graphs) == 1
    disabled = vars(torch.optim.Optimizer.zero_grad.__wrapped__)["__dynamo_disable"]
    assert disabled._torchdynamo_disable

def excludes():
    assert torch.compiler.disable(abs)._torchdynamo_disable

def imports_a_part():
    import torch._dynamo.config
    from torch._dynamo import optimize
    assert torch._dynamo.config.recompile_limit > 0
    assert torch._dynamo is sys.modules["torch._dynamo"]
    compiler.postpone()
    assert type(torch._dynamo).__name__ == type(sys.modules["torch._dynamo"]).__name__ == "module"

def compares_symbols():
    from torch.fx.experimental.symbolic_shapes import expect_true, sym_eq
    assert imported() == []
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    size = ShapeEnv().create_unbacked_symint()
    same = sym_eq((size, 2), (size, 2))
    assert type(same) is torch.SymBool and expect_true(same) is True

for use in (globals()[name] for name in used):
    if not (pid := os.fork()):
        try:
            use()
            assert imported()
            step()
            leave(0)
        finally:
            sys.excepthook(*sys.exc_info())
            leave(1)
    assert os.waitpid(pid, 0)[1] == 0, use
leave(0)
"""


@pytest.mark.parametrize(
    "used",
    [
        (),
        pytest.param(
            ("compiles", "excludes", "imports_a_part", "compares_symbols"), marks=pytest.mark.slow
        ),
    ],
    ids=["no use", "uses"],
)
def test_a_training_imports_the_compiler_only_for_a_use(
    tmp_path: Path, used: tuple[str, ...]
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *used],
        cwd=tmp_path,
        env=clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
def test_a_compiled_model_trains_like_the_plain_one(ranks: Ranks) -> None:
    arguments = (TINY, "--max-steps", "5", "--log-steps", "1", "--device", "cpu", "--threads", "1")
    losses = []
    for run, more in (("plain", ()), ("compiled", ("--compile",))):
        ranks.train(1, *arguments, "--run", run, *more)
        losses.append([entry["loss"] for entry in ranks.entries(run, "train")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 5
