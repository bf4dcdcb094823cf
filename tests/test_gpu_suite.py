"""The parts of `make test-gpu` that need no GPU, and its end on a machine without one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import (
    check,
    machine,
    program,
    rows,
    traces,
)
from tests.support.commands import clean_environment
from tests.support.paths import ROOT


def _suite(out: Path, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-c", "tests/gpu/pytest.ini", "tests/gpu", *words],
        cwd=ROOT,
        env=clean_environment(OUT=str(out), **env),
        capture_output=True,
        text=True,
    )


def test_a_machine_without_a_gpu_skips_each_check_with_a_reason(tmp_path: Path) -> None:
    ended = _suite(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["topic"] for row in found["rows"]} == set(rows.TOPICS)
    assert {row["result"] for row in found["rows"]} == {"skipped"}
    assert all(row["reason"].startswith("no GPU: ") for row in found["rows"])
    page = (tmp_path / "gpu.md").read_text()
    assert page.count(" | skipped | ") == len(found["rows"]) == found["counts"]["skipped"]
    assert page in ended.stdout
    assert "needs several GPUs" in page
    budget = sum(row["budget_s"] for row in found["rows"])
    assert f"time budget: {len(found['rows'])} checks, {budget:.0f} s" in ended.stdout
    assert budget <= 480  # so that a command of ten minutes imports torch and runs all checks


@pytest.mark.parametrize("step", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_a_step_is_a_part_of_the_checks(tmp_path: Path, step: int) -> None:
    ended = _suite(tmp_path, "--step", str(step))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads((tmp_path / f"step-{step}.json").read_text())["rows"]
    assert 0 < sum(row["budget_s"] for row in rows) <= 480
    assert (tmp_path / f"step-{step}.md").exists()


@pytest.mark.slow
def test_a_check_that_runs_on_the_cpu_writes_what_it_has_seen(tmp_path: Path) -> None:
    words = ("-k", "each_reading", "--verbose")
    ended = _suite(tmp_path / "out", *words, TRAINBOX_TEST_GPU_DEVICE="cpu")
    assert ended.returncode == 0, ended.stdout
    (row,) = json.loads((tmp_path / "out" / "gpu.json").read_text())["rows"]
    assert row["result"] == "skipped"
    assert row["reason"] == "a dry run on the CPU stops here"
    assert row["seen"][0].startswith("driver ")


def _library(code: int) -> Any:
    return lambda _name: SimpleNamespace(cuInit=lambda _flags: code)


def _missing(_name: str) -> Any:
    raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (_missing, "this machine has no NVIDIA driver (libcuda.so.1 is not found)"),
        (_library(100), "the driver lists no GPU"),
        (_library(34), "libcuda.so.1 is only for linking"),
        (_library(0), None),
        (_library(999), None),  # a driver that fails counts as a GPU
    ],
)
def test_no_gpu_has_a_reason(load: Any, reason: str | None) -> None:
    assert machine.no_gpu(load) == (reason and f"no GPU: {reason}")


@pytest.mark.parametrize(
    ("own", "visible"),
    [({}, "0"), ({"CUDA_VISIBLE_DEVICES": "GPU-8f3a,GPU-11"}, "GPU-8f3a")],
)
def test_a_check_sees_the_first_gpu(own: dict[str, str], visible: str) -> None:
    found = check.environment("cuda", {**own, "PYTHONPATH": "/site"})
    assert found["CUDA_VISIBLE_DEVICES"] == visible
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert found["PYTHONPATH"] == f"{ROOT.resolve()}{os.pathsep}/site"


def test_a_dry_run_and_the_tests_on_the_cpu_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert check.environment("cpu", {})["CUDA_VISIBLE_DEVICES"] == ""
    assert clean_environment()["CUDA_VISIBLE_DEVICES"] == ""
    # The stub replaces the driver, and its GPUs are not GPUs of this machine.
    assert "CUDA_VISIBLE_DEVICES" not in clean_environment(NVML_STUB_CONFIG="x")


def test_results_are_kept_up_to_the_error(tmp_path: Path) -> None:
    def measure(count: int) -> Any:
        for number in range(count):
            yield f"value {number}", number
        raise ValueError("broken")

    file = tmp_path / "results"
    with pytest.raises(ValueError, match="broken"):
        program.write_results(measure, {"count": 2}, file)
    with file.open("a") as lines:
        lines.write('["half", ')
    assert program.read_results(file) == {"value 0": 0, "value 1": 1}
    assert program.read_results(tmp_path / "missing") == {}


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    running = check.Check("cpu", tmp_path, deadline_s=0)
    process = running.start("-c", "import time; time.sleep(60)")
    with pytest.raises(pytest.fail.Exception, match="no end before the limit"):
        running.finish(process)
    assert process.returncode == -signal.SIGKILL


def _event(kind: str, name: str, ts: float, dur: float, stream: int, size: int = 0) -> Any:
    return {"cat": kind, "name": name, "ts": ts, "dur": dur,
            "args": {"stream": stream, "bytes": size}}  # fmt: skip


def test_the_overlap_of_copies_and_kernels_is_measured() -> None:
    events = [
        _event("kernel", "gemm", 0, 100, 7),
        _event("kernel", "relu", 50, 100, 7),
        _event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 100, 100, 13, 4096),
        _event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 160, 10, 13, 4),
        _event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 999, 13, 4096),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5},
    ]
    found = traces.summary(events, steps=2, least_bytes=100)
    assert found == {
        "kernels_per_step": 1.0,
        "busy_share": 1.0,
        "copies": 1,
        "copied_ms": 0.1,
        "overlap_share": 0.5,
        "own_stream": True,
        "kinds": ["Memcpy HtoD (Pinned -> Device)"],
    }
    assert traces.summary([], steps=2)["busy_share"] == 0.0
