"""The GPUs of a script: their load, their energy over restarts, and a failure during the run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entrypoint.driver.gpus import Gpu, Sample
from entrypoint.script.script_folder import ScriptFolder
from entrypoint.script.target import Target
from entrypoint.script.telemetry import GpuRecord
from tests.support.commands import Trainbox, logged
from tests.support.nvml_stub.build import stub_env, write_config

_MJ = 3_600_000  # 0.001 kWh
_GPUS = (Gpu(0, "GPU-a", "H100", 81559), Gpu(1, "GPU-b", "H100", 81559))
# A script that changes the stub's file after the first reading of the GPUs.
_SCRIPT = """
import json, os, pathlib, signal, sys, time
run, stub = pathlib.Path(os.environ["TRAINBOX_RUN"]), pathlib.Path(os.environ["NVML_STUB_CONFIG"])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(json.dumps({"step": 7, "loss": 0.5}), flush=True)
metrics = run / "metrics.jsonl"
def seen():
    text = metrics.read_text() if metrics.exists() else ""
    return '"gpus"' in text and '"loss"' in text
def change(line):
    new = stub.with_suffix(".new")
    new.write_text(stub.read_text() + line)
    new.replace(stub)
while not seen():
    time.sleep(0.02)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ScriptFolder]:
    made = ScriptFolder(tmp_path, Target("a.py", ()), writes=True)
    yield made
    made.close()


def sample(*energy_mj: int | None) -> Sample:
    return Sample(
        0.0, {gpu.uuid: {"energy_mj": mj} for gpu, mj in zip(_GPUS, energy_mj, strict=True)}
    )


def used(folder: ScriptFolder, *samples: Sample, before: dict[str, Any] | None = None) -> Any:
    record = GpuRecord(folder, _GPUS)
    for one in samples:
        record.take(one)
    return record.with_energy(before or {})["energy_kwh"]


def test_the_energy_is_what_the_counters_advance(folder: ScriptFolder) -> None:
    samples = [sample(100, 0), sample(100 + _MJ, None), sample(100 + 2 * _MJ, _MJ)]
    assert used(folder, *samples) == pytest.approx(0.003)
    assert used(folder, *samples, before={"energy_kwh": 1.5}) == pytest.approx(1.503)
    assert used(folder, *samples, before={"energy_kwh": None}) is None


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [sample(0, 0), sample(_MJ, _MJ), sample(2 * _MJ, None)],
        [sample(0, 2 * _MJ), sample(_MJ, 3)],
        [sample(0, None), sample(2 * _MJ, None)],
    ],
    ids=["no sample", "not readable at the end", "counter reset", "never readable"],
)
def test_energy_that_is_not_known_in_whole_is_not_measured(
    folder: ScriptFolder, samples: list[Sample]
) -> None:
    assert used(folder, *samples) is None


def test_an_entry_has_the_newest_step_and_is_written_every_10_s(folder: ScriptFolder) -> None:
    record = GpuRecord(folder, _GPUS)
    folder.report({"kind": "train", "step": 40})
    record.take(sample(0, 0))
    record.take(sample(_MJ, _MJ))
    (entry,) = logged(folder.path, "gpus")
    assert entry["step"] == 40
    assert entry["gpu_utilization_percent_each"] == [None, None]


def _run(forked: Trainbox, library: Path, restarts: int, code: str) -> Any:
    config = write_config(forked.folder / "gpus.conf", "h100", count=2)
    (forked.folder / "train.py").write_text(_SCRIPT + code)
    return forked(
        *("run", "--no-torchrun", "--restarts", str(restarts), "--run", "r", "train.py"),
        env=stub_env(library.parent, config),
    )


def test_the_energy_of_restarts_is_summed_up_to_the_end_of_each(
    forked: Trainbox, library: Path
) -> None:
    """The counter advances after the last reading of a start that ends at once."""
    ended = _run(
        forked,
        library,
        1,
        f"""
print(os.environ["CUDA_VISIBLE_DEVICES"])
starts = run / "starts"
starts.write_text((starts.read_text() if starts.exists() else "") + "x")
count = len(starts.read_text())
change(f"gpu.energy_mj={{5_000_000 + count * {_MJ}}}\\n")
sys.exit(75 if count == 1 else 0)
""",
    )
    assert ended.code == 0, ended.err
    assert ended.out.count("GPU-") == 4  # two at each start
    assert "health     " in ended.err and "health     " not in ended.out
    manifest = json.loads((forked.folder / "runs/r/manifest.json").read_text())
    assert [start["exit_code"] for start in manifest["starts"]] == [75, 0]
    assert [gpu["index"] for gpu in manifest["starts"][0]["gpus"]] == ["0", "1"]
    assert manifest["energy_kwh"] == pytest.approx(0.004)
    assert "energy     0.004 kWh\n" in ended.err


def test_a_gpu_that_fails_stops_the_script_and_closes_the_gate_of_the_restart(
    forked: Trainbox, library: Path
) -> None:
    ended = _run(
        forked,
        library,
        3,
        """
change("gpu1.ret=15\\n")
signal.sigwait([signal.SIGTERM])
print(json.dumps({"step": 8, "loss": 0.25}), flush=True)
sys.exit(75)
""",
    )
    assert ended.code == 3, ended.err
    run = forked.folder / "runs/r"
    (event,) = logged(run, "health")
    assert (event["step"], event["check"], event["result"]) == (7, "handle", "CRITICAL")
    assert event["gpu"] == "1"
    assert [entry["step"] for entry in logged(run, "train")] == [7, 8]
    assert "the hardware failed: the script gets SIGTERM and has 50 s to save" in ended.err
    assert "restart 1 of 3\n" in ended.err
    assert "trainbox: the health gate is closed. GPU 1 (" in ended.err
    assert "exit code  3: the same command starts it again\n" in ended.err
    assert "energy     not measured\n" in ended.err
    (start,) = json.loads((run / "manifest.json").read_text())["starts"]
    assert start["exit_code"] == 3


def test_a_gpu_that_needs_a_reset_is_not_used_by_a_restart(forked: Trainbox, library: Path) -> None:
    """After this Xid, the stub's other values are as on a healthy GPU."""
    code = """
if (run / "started").exists():
    sys.exit(0)
(run / "started").touch()
change("gpu1.xid=79\\n")
signal.sigwait([signal.SIGTERM])
sys.exit(75)
"""
    ended = _run(forked, library, 3, code)
    assert ended.code == 3, ended.err
    assert "not started again, because a GPU needs a reset: GPU 1 (" in ended.err
    assert "Xid 79: the GPU has fallen off the bus" in ended.err
    (start,) = json.loads((forked.folder / "runs/r/manifest.json").read_text())["starts"]
    assert start["exit_code"] == 3
