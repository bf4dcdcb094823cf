"""`trainbox bench` on CPU processes: its tables, a case that fails, a signal.

The bench and its trainings are forks.
"""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, wait_until
from tests.support.ranks import EndedRanks, Ranks

TASK = '''
import time
from pathlib import Path
import torch
from trainer.tasks.digits import Digits

class Hungry(Digits):
    """A task whose model takes at most 32 examples at a time."""

    def losses(self, model, batch):
        if len(batch[0]) > 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().losses(model, batch)
'''


@pytest.fixture
def hungry(trainbox: Trainbox) -> str:
    (trainbox.folder / "hungry.py").write_text(TASK)
    (trainbox.folder / "tmp").mkdir()
    return "hungry.py:Hungry"


def bench(ranks: Ranks, *words: str, **env: str) -> EndedRanks:
    """Run `trainbox bench` with a temporary folder of its own."""
    env["TMPDIR"] = str(ranks.folder / "tmp")
    return ranks.launch("bench", *words, env=env).wait()


def left_over(trainbox: Trainbox) -> list[str]:
    """Return what a bench has left in the temporary folder and in runs/."""
    patterns = ("tmp/trainbox-*", "tmp/torchelastic_*", "runs/*")
    return sorted(path.name for pattern in patterns for path in trainbox.folder.glob(pattern))


def test_two_processes_against_one(trainbox: Trainbox, ranks: Ranks, hungry: str) -> None:
    arguments = ["--processes", "1,2", "--device", "cpu", "--batch-size", "32", "--rounds", "1"]
    arguments += ["--seconds", "0.3", "--out", "tables", "--lr", "0.002"]
    # A training of one process must not inherit the strategy.
    ended = bench(ranks, hungry, *arguments, TRAINBOX_EPOCHS="3", STRATEGY="ddp")
    assert ended.code == 0, ended.errs
    tables = trainbox.folder / "tables"
    assert sorted(path.name for path in tables.iterdir()) == ["bench.json", "bench.md", "bench.svg"]
    assert (tables / "bench.md").read_text() == ended.out
    assert ended.out.startswith(f"`trainbox bench {hungry} --processes 1,2 ")
    assert re.findall(
        r"^\| (\d) \| (\w+) \| (\d+) \| (\d+) \| (\d) \|", ended.out, re.MULTILINE
    ) == [
        ("1", "single", "32", "32", "0"),
        ("2", "ddp", "32", "16", "0"),
        ("1", "single", "32", "32", "0"),
        ("2", "ddp", "64", "32", "0"),
    ]
    assert re.findall(r"^round 1 of 1, .*?(?=, about|$)", ended.errs[0], re.MULTILINE) == [
        "round 1 of 1, 1 process single, batch 32",
        "round 1 of 1, 2 processes ddp, batch 32",
        "round 1 of 1, 2 processes ddp, batch 64",
    ]
    report = json.loads((tables / "bench.json").read_text())
    assert report["rows"][1]["line"] == {
        "scaling": "strong",
        "case": {"count": 2, "strategy": "ddp", "batch_size": 32, "workers": None},
        "base": {"count": 1, "strategy": "single", "batch_size": 32, "workers": None},
    }
    one, two, weak = ([measured] for case in report["cases"] for measured in case["rounds"])
    assert (one[0]["exchange_seconds"], one[0]["threads"]) == (None, two[0]["threads"])
    for (measured,), batch in (two, 32), (weak, 64):
        assert (
            measured["batch_size"],
            len(measured["memory_mib"]),
            len(measured["data_seconds"]),
        ) == (batch, 2, 2)
        assert all(0 < seconds < measured["seconds"] for seconds in measured["exchange_seconds"])
        assert measured["seconds"] >= 0.3
    speeds = [row["speed_up"]["median"] for row in report["rows"]]
    assert speeds[1] == pytest.approx(two[0]["samples_per_second"] / one[0]["samples_per_second"])
    assert left_over(trainbox) == []


def test_a_batch_that_does_not_fit_is_a_row_without_a_result(
    trainbox: Trainbox, ranks: Ranks, hungry: str
) -> None:
    (trainbox.folder / "exp.toml").write_text("[train]\nlr = 0.002\n")
    arguments = ["--processes", "1", "--batch-size", "16,64", "--rounds", "2", "--seconds", "0.1"]
    arguments += ["--config", "exp.toml"]
    # Neither a file nor an empty variable makes the bench split a batch.
    ended = bench(ranks, hungry, *arguments, TRAINBOX_ACCUMULATION="")
    assert ended.code == 0, ended.errs
    assert re.search(r"^\| 1 \| single \| 16 \| 16 \| 0 \| [\d,]+ \| ", ended.out, re.MULTILINE)
    assert re.search(
        r"^\| 1 \| single \| 64 \| 64 \| - \| no result \| - \|", ended.out, re.MULTILINE
    )
    reason = r"the GPU's memory is used up \(CUDA out of memory\)"
    assert re.search(rf"^- 1 process single, batch 64: `{reason}", ended.out, re.MULTILINE)
    assert ended.errs[0].count("batch 64") == 1  # The second round does not try the batch again.
    assert left_over(trainbox) == []


def test_a_signal_ends_the_case_and_prints_the_finished_cases(
    trainbox: Trainbox, ranks: Ranks, hungry: str
) -> None:
    arguments = ["bench", hungry, "--processes", "1", "--batch-size", "16,32", "--rounds", "1"]
    env = {"TMPDIR": str(trainbox.folder / "tmp")}
    process = ranks.launch(*arguments, "--seconds", "0.1", env=env)
    wait_until(lambda: "batch 32" in process.printed("err")[0], process)
    process.send_signal(signal.SIGTERM)
    ended = process.wait()
    assert ended.code == 75
    assert re.search(r"^\| 1 \| single \| 16 \| 16 \| 0 \| [\d,]+ \| ", ended.out, re.MULTILINE)
    assert "- 1 process single, batch 32: `not measured`\n" in ended.out
    text = "\ntrainbox: SIGTERM received: the tables show the cases measured before it\n"
    assert ended.errs[0].endswith(text)
    assert left_over(trainbox) == []


def test_if_no_case_is_measured_the_code_is_that_of_the_first(ranks: Ranks, hungry: str) -> None:
    arguments = ["--processes", "1", "--batch-size", "64", "--seconds", "0.1"]
    ended = bench(ranks, hungry, *arguments)
    text = "the GPU's memory is used up (CUDA out of memory)"
    assert ended.code == 5
    (lines,) = [err.splitlines() for err in ended.errs]
    assert lines[-1].startswith(f"trainbox: bench: no case was measured: {text}")
    assert sum(f"no result: {text}" in line for line in lines) == 1 and f": `{text}" in ended.out


# fmt: off
_REFUSED = [
    (["--processes", "1", "--lr", "nan"], 2, "Invalid value for '--lr': nan is not"),
    (["--gpus", "2", "--device", "cpu"], 2,
     "--gpus 2 and --device cpu contradict each other"),
    (["--gpus", "1,2"], 3, "--gpus 2 requested, no GPU found: run on a GPU host"),
    (["--processes", "1", "--gpu-ids", "0"], 2, "--processes is for CPU runs, and GPUs are"),
    (["--processes", "2", "--device", "cuda"], 2,
     "--processes is for CPU runs, and GPUs are requested: drop one"),
    (["--processes", "1,two"], 2, "'1,two' is not a list of whole numbers from 1, such as 1,4"),
    (["--workers", "4,4"], 2, "'4,4' repeats a number: give each number once"),
    (["--processes", "1", "--run", "mine"], 2, "bench sets --run itself"),
    (["--epochs=3"], 2, "bench sets --epochs itself"),
    (["--batch-size-per-gpu", "8"], 2, "batch-size-per-gpu 8 contradicts the bench, which decides"),
    (["--processes", "1", "--strategies", "dp"], 2, "--strategies dp: dp splits batches over GPUs"),
    (["--processes", "1", "--out", "/proc/none"], 4, "cannot write /proc/none: "),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "code", "text"), _REFUSED)
def test_a_bench_that_cannot_run_is_refused_at_once(
    forked: Trainbox, arguments: list[str], code: int, text: str
) -> None:
    ended = forked("bench", "digits", *arguments, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (ended.code, ended.out) == (code, "")
    (line,) = ended.err.splitlines()
    assert text in line
    assert [path.name for path in Path(forked.folder).iterdir()] == []


def test_tasks_of_a_job_do_not_measure_each_other(forked: Trainbox) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1"}
    job |= {"SLURM_STEP_NUM_TASKS": "2", "CUDA_VISIBLE_DEVICES": ""}
    ended = forked("bench", "digits", "--processes", "1", env=job)
    assert (ended.code, ended.out) == (2, "")
    assert "SLURM started 2 tasks on 1 node(s), and each would train" in ended.err
