"""`trainbox health --deep` on CPU processes over gloo, also with programs that fail on purpose."""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Trainbox, finish, wait_until
from tests.support.nvml_stub.build import stub_env, write_config
from tests.support.paths import SUPPORT
from tests.support.processes import started_with, wait_until_none
from tests.support.ranks import Ranks

_ON_CPUS = ("health", "--deep", "--gpus", "0")
_BROKEN_TORCH = SUPPORT / "broken_torch"
# A cluster sets these variables for the nodes of a job. The programs of --deep must ignore them.
_OF_A_JOB = {"PET_NNODES": "2", "WORLD_SIZE": "9", "RANK": "4", "LOCAL_RANK": "3"}

Finding = dict[str, Any]


def deep_findings(out: str) -> tuple[dict[str, Any], list[Finding]]:
    """Return the verdict and the findings of --deep."""
    verdict = json.loads(out)
    return verdict, [
        finding for finding in verdict["findings"] if finding["check"].startswith("deep")
    ]


def broken(folder: Path, **faults: str) -> dict[str, str]:
    """Return the environment for these faults, which also marks the programs."""
    counted = folder / "programs"
    counted.mkdir()
    named = {name.replace("_", " "): fault for name, fault in faults.items()}
    return {
        "PYTHONPATH": str(_BROKEN_TORCH),
        "BROKEN": json.dumps(named),
        "BROKEN_IN": str(counted),
    }


def marked(folder: Path, text: str = "") -> list[int]:
    """Return the processes that were started with the environment of `broken`."""
    return started_with(str(folder / "programs"), text)


def stopped(folder: Path, text: str) -> bool:
    """Return whether a marked process has stopped itself."""
    states = [
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        for pid in marked(folder, text)
    ]
    return "T" in states


def test_two_processes(ranks: Ranks) -> None:
    required = "deep,deep-matmul,deep-memory,deep-all-reduce"
    words = (*_ON_CPUS, "--json", "--require", required, "--runs-dir", ".")
    ended = ranks.launch(*words, env=_OF_A_JOB).wait()
    assert ended.code == 0, ended.out + ended.errs[0]
    verdict, findings = deep_findings(ended.out)
    assert (verdict["mode"], verdict["open"]) == ("deep", True)
    assert {(f["result"], f["gpu"], f["uuid"], f["action"]) for f in findings} == {
        ("PASS", None, None, "")
    }
    number = r"(\d[\d.,]*)"
    matmul = (
        rf"CPU process {{}}: {number} TFLOP/s; largest error (0\.\d+) of the bound, 0 values "
        r"differ in 20 repeats"
    )
    memory = rf"CPU process {{}}: {number} GB/s; 0 wrong values in 5 copies of 64 MiB"
    expected = [
        ("deep", r"5 tests on CPU processes 0 and 1 in (\d+) s"),
        ("deep-matmul", matmul.format(0)),
        ("deep-memory", memory.format(0)),
        ("deep-matmul", matmul.format(1)),
        ("deep-memory", memory.format(1)),
        (
            "deep-all-reduce",
            rf"CPU processes 0 and 1: {number} GB/s; 0 wrong values in 6 sums of 4 MiB",
        ),
    ]
    assert [f["check"] for f in findings] == [check for check, _ in expected]
    for finding, (_, pattern) in zip(findings, expected, strict=True):
        match = re.fullmatch(pattern, finding["read"])
        assert match and all(float(figure.replace(",", "")) > 0 for figure in match.groups()), (
            finding["read"]
        )
    # The speeds were compared, and were above the limit.
    assert 1e-4 < float(re.findall(r"error ([\d.]+)", findings[1]["read"])[0]) < 0.1
    assert (
        findings[1]["source"]
        == "Higham, Accuracy and Stability of Numerical Algorithms, section 3.1"
    )
    lines = ended.errs[0].splitlines()
    assert len(lines) == 5
    assert re.fullmatch(rf"deep: matmul CPU process 0: {number} TFLOP/s, right", lines[0])
    assert re.fullmatch(rf"deep: all-reduce CPU processes 0 and 1: {number} GB/s, right", lines[4])


@pytest.mark.slow
@pytest.mark.rare
def test_each_fault_is_found_on_its_device(trainbox: Trainbox) -> None:
    faults = {"compute_1": "bit", "compute_2": "matmul", "compute_3": "copy"}
    faults |= {"exchange_1": "sum", "exchange_2": "stop", "exchange_3": "fail"}
    environment = broken(trainbox.folder, **faults)
    ended = trainbox(
        *_ON_CPUS, "--processes", "3", "--deadline-s", "120", "--json", env=environment
    )
    assert ended.code == 1, ended.err
    assert marked(trainbox.folder) == []
    verdict, findings = deep_findings(ended.out)
    closing = [(f["check"], f["read"], f["action"]) for f in findings if f["closes"]]
    bound = r"WRONG: largest error 1\d\d\.\d+ of the bound, 0 values differ in 20 repeats"
    for (check, read, action), (expected, pattern, cure) in zip(
        closing,
        [
            (
                "deep-matmul",
                r"CPU process 0: WRONG: largest error 0\.\d+ of the bound, 1 values differ "
                r"in 20 repeats",
                "drain",
            ),
            ("deep-matmul", rf"CPU process 1: {bound}", "drain"),
            ("deep-memory", r"CPU process 2: WRONG: 5 wrong values in 5 copies of 64 MiB", "drain"),
            (
                "deep-all-reduce",
                r"CPU processes 0 and 1: WRONG: CPU process 1: 6 wrong values in 6 sums of 4 MiB",
                "drain",
            ),
            (
                "deep-all-reduce",
                r"CPU processes 0 and 2: not finished after 120 s: killed",
                "make_room",
            ),
            (
                "deep-all-reduce",
                r"CPU processes 1 and 2: (.*; )?CPU process 2: RuntimeError: CUDA error: "
                r"an illegal memory access was "
                r"encountered(; .*)? \(exit code (1|143)\)",  # 143 was seen once, on a busy machine
                "make_room",
            ),
        ],
        strict=True,
    ):
        assert (check, action) == (expected, cure)
        assert re.fullmatch(pattern, read), read
    good = [
        f["read"].partition(":")[0]
        for f in findings
        if f["result"] in ("PASS", "WARN") and f["check"] == "deep-all-reduce"
    ]
    assert good == ["CPU processes 0, 1 and 2"]
    assert (
        "deep: all-reduce CPU processes 0 and 2: not finished after 120 s: killed"
        in ended.err.splitlines()
    )


def test_a_program_that_hangs_is_killed_at_its_deadline(trainbox: Trainbox) -> None:
    environment = broken(trainbox.folder, compute_1="stop at once", compute_2="stop at once")
    begin_s = time.monotonic()
    process = trainbox.start(*_ON_CPUS, "--json", "--deadline-s", "1.5", env=environment)
    wait_until(lambda: len(list((trainbox.folder / "programs").iterdir())) == 2, process)
    assert len(marked(trainbox.folder, "compute")) == 1  # the first process is gone
    ended = finish(process)
    assert time.monotonic() - begin_s >= 3
    assert ended.code == 1
    assert marked(trainbox.folder) == []
    _, findings = deep_findings(ended.out)
    assert [
        (f["check"], f["result"], f["read"], f["limit"], f["source"]) for f in findings[1:3]
    ] == [
        (
            "deep-matmul",
            "CRITICAL",
            "CPU process 0: not finished after 1.5 s: killed",
            "finished within 1.5 s",
            "--deadline-s",
        ),
        ("deep-memory", "UNKNOWN", "CPU process 0: not tested after the failure", "", ""),
    ]
    left_out = "not tested: its own tests, or the tests of all others, did not finish"
    assert [(f["result"], f["read"]) for f in findings if f["check"] == "deep-all-reduce"] == [
        ("UNKNOWN", f"CPU process {number}: {left_out}") for number in (0, 1)
    ]
    assert ended.err.splitlines()[2:] == [
        "deep: matmul CPU process 1: not finished after 1.5 s: killed",
        "deep: memory CPU process 1: not tested after the failure",
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_check_leaves_no_process(
    trainbox: Trainbox, number: signal.Signals, code: int
) -> None:
    environment = broken(trainbox.folder, compute_1="stop at once")
    process = trainbox.start(*_ON_CPUS, env=environment)
    wait_until(lambda: stopped(trainbox.folder, "compute"), process)
    process.send_signal(number)
    assert finish(process).code == code
    wait_until_none(str(trainbox.folder / "programs"))


@pytest.mark.slow
def test_a_killed_check_leaves_no_ranks(trainbox: Trainbox) -> None:
    environment = broken(trainbox.folder, exchange_1="stop")
    process = trainbox.start(*_ON_CPUS, env=environment)
    wait_until(lambda: stopped(trainbox.folder, "exchange"), process)
    assert len(marked(trainbox.folder, "exchange")) == 3  # torchrun and its ranks
    process.send_signal(signal.SIGKILL)
    wait_until_none(str(trainbox.folder / "programs"))


def test_a_closed_verdict_starts_no_test(trainbox: Trainbox, forked: Trainbox) -> None:
    ended = forked("health", "--deep", "--gpus", "99", env=broken(trainbox.folder))
    assert (ended.code, ended.err) == (1, "")
    assert list((trainbox.folder / "programs").iterdir()) == []
    assert "deep   INFO      not started: fix the failed checks first" in ended.out.splitlines()
    assert ended.out.splitlines()[-1].startswith("CLOSED, CRITICAL: ")


def test_a_gpu_that_only_the_driver_sees(trainbox: Trainbox, library: Path) -> None:
    config = write_config(trainbox.folder / "nvml.conf", "h100", count=1)
    ended = trainbox(
        "health", "--deep", "--json", "--processes", "1", env=stub_env(library.parent, config)
    )
    assert ended.code == 1
    verdict, findings = deep_findings(ended.out)
    reads = {finding["check"]: finding["read"] for finding in verdict["findings"]}
    assert reads["slowdown"] == "none now, in 0 of the last 10 samples"
    assert reads["xid"] == "none since the first sample"
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    assert [(f["check"], f["result"], f["gpu"], f["uuid"], f["action"]) for f in findings[1:]] == [
        ("deep-matmul", "CRITICAL", "0", uuid, "ask_host"),
        ("deep-memory", "UNKNOWN", "0", uuid, "ask_host"),
        ("deep-all-reduce", "NA", "0", uuid, ""),
    ]
    assert re.match(
        r"process 0 was given a GPU, but torch .* finds 0 GPUs \(.*\): .* \(exit code 3\)$",
        findings[1]["read"],
    )
