"""`trainbox drill run` with real starts."""

import re

import pytest

from tests.support.commands import Ended, Trainbox, finish

pytestmark = pytest.mark.timeout(900)  # up to nine starts of torchrun

# A start that is to be killed waits for it near its end: the first one of each training but the
# undisturbed ones.
_WAIT = """
import os, time
from pathlib import Path
run = Path(os.environ["TRAINBOX_RUN"])
resumes = any(run.glob("checkpoint.*"))
def wait_for_the_kill(undisturbed=1):
    while int(run.parent.name.partition("-")[2] or 0) >= undisturbed and not resumes:
        time.sleep(1)
"""

_SMALL = f"""
{_WAIT}
import csv, json
checkpoint = run / "checkpoint.json"
step, total = json.loads(checkpoint.read_text()) if resumes else (0, 0.5)
while step < 5:
    step, total = step + 1, total * 1.5
    (run / "checkpoint.new").write_text(json.dumps([step, total]))
    (run / "checkpoint.new").rename(checkpoint)
    print(json.dumps({{"step": step}}))
wait_for_the_kill()
(run / "results").mkdir(exist_ok=True)
with (run / "results" / "last.csv").open("w") as file:
    csv.writer(file).writerows([["step", "total"], [step, total]])
"""

# The noise comes from torch's own generator, and each rank trains on its part of a batch.
_DDP = f"""
{_WAIT}
import json
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
data = torch.randn(256, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = torch.Generator().manual_seed(2)
checkpoint, step = run / "checkpoint.pt", 0
if resumes:
    state = torch.load(checkpoint, weights_only=True)
    step = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    sampler.set_state(state["sampler"])
    torch.set_rng_state(state["random"])
while step < 12:
    if step == 11:  # after a resume, at least one step depends on the whole state
        wait_for_the_kill(undisturbed=2)
    batch = data[torch.randint(256, (32,), generator=sampler)] + 0.1 * torch.randn(32, 8)
    part = batch[rank * 32 // world : (rank + 1) * 32 // world]
    loss = (ddp(part) - part.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if rank == 0:
        state = {{"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}}
        state |= {{"sampler": sampler.get_state(), "random": torch.get_rng_state()}}
        torch.save(state, run / "checkpoint.new")
        (run / "checkpoint.new").rename(checkpoint)
        print(json.dumps({{"step": step, "loss": loss.item()}}))
if rank == 0:
    torch.save(model.state_dict(), run / "model.pt")
dist.barrier()  # gloo may abort a rank that still runs when another one has ended
dist.destroy_process_group()
"""


def _drill(trainbox: Trainbox, script: str, *words: str) -> Ended:
    (trainbox.folder / "train.py").write_text(script)
    (trainbox.folder / "tmp").mkdir(exist_ok=True)
    process = trainbox.start(
        *("drill", "run", "train.py", "--cpu", "--kills", "1", "--seed", "1", *words),
        env={"TMPDIR": str(trainbox.folder / "tmp"), "OMP_NUM_THREADS": "1"},
    )
    return finish(process)


def _verdicts(ended: Ended) -> list[tuple[str, str]]:
    """Return the processes and the verdict of each row."""
    rows = [row for row in ended.out.splitlines() if re.match(r"  \d", row)]
    return [(row.strip().split("  ")[0], row.split("  ")[-1]) for row in rows]


def test_a_script_that_resumes(trainbox: Trainbox) -> None:
    """The one real start: the undisturbed training, the kill, the resume and the comparison."""
    ended = _drill(trainbox, _SMALL, "--compare", "results/last.csv")
    assert (ended.code, ended.err) == (0, "")
    first, heading, _, *_, resumed, last = ended.out.splitlines()
    assert first == "drill of train.py on one CPU process, --kills 1 --seed 1"
    assert heading == "results/last.csv"
    assert _verdicts(ended) == [("1", "same"), ("1 -> 1", "same")]
    assert re.search(r"\n  1 -> 1 +SIGKILL at step [1-5] +[0-9a-f]{16}  same\n", ended.out)
    assert resumed == "  resumed, 1 -> 1: the reported steps continued after a kill"
    assert re.fullmatch(r"  the same bits in all 2 trainings: [0-9a-f]{64}", last)


@pytest.mark.slow
def test_a_ddp_script_on_changing_numbers_of_processes(trainbox: Trainbox) -> None:
    words = ("--compare", "model.pt", "--processes", "1,2")
    ended = _drill(trainbox, _DDP, *words, "--tolerance", "1e-4")
    assert (ended.code, ended.err) == (0, "")
    assert [processes for processes, _ in _verdicts(ended)] == [
        "1",
        "2",
        "1 -> 1",
        "1 -> 2",
        "2 -> 1",
    ]
    assert "  all 5 trainings agree within 0.0001; the largest difference is " in ended.out
