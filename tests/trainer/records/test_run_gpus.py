"""The GPUs of a run: their names, load and energy, read from the NVML stub by a real training."""

import _ctypes
import ctypes
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

import trainer.loop.fit
import trainer.session.train
from tests.support.here import Here, board_of
from tests.support.nvml_stub.build import write_config
from tests.support.ranks import Ranks
from tests.support.tiny import TINY
from trainer.parallel.strategy import STRATEGIES, Strategy
from trainer.parallel.world import World
from trainer.records import run_gpus
from trainer.records.run_folder import RunFolder
from trainer.records.run_gpus import RunGpus

UUIDS = [f"GPU-00000000-0000-0000-0000-00000000000{index}" for index in range(4)]
KWH = 3.6e9  # millijoules

Put = Callable[..., None]


@pytest.fixture
def put(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """Load the NVML stub into this process; `put(profile, keys)` sets its answers."""
    config = tmp_path / "nvml.conf"
    monkeypatch.setenv("NVML_STUB_CONFIG", str(config))
    # The library is then found by its name.
    stub = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)

    def put(profile: str, keys: dict[str, object] | None = None, **more: object) -> None:
        write_config(config, profile, keys, **more)

    yield put
    # Later tests in this process must not find it, so close it as often as it was opened.
    for opened in (stub, pynvml.nvmlLib):
        if opened is not None:
            _ctypes.dlclose(opened._handle)
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let each training compute on these GPUs of the stub, in truth on the CPU."""

    def on(*uuids: str) -> None:
        monkeypatch.setattr(
            Strategy, "own_gpus", lambda _strategy: [(uuid, "NVIDIA H100") for uuid in uuids]
        )

    return on


def energy(here: Here) -> Any:
    return here.json("manifest.json").get("energy_kwh", "on the CPU")


def test_the_header_names_each_gpu_by_its_uuid(
    here: Here, put: Put, on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.node", lambda: "node-7")
    put("h100")
    on(UUIDS[3], UUIDS[1])
    lines = here.train(max_steps=1).splitlines()
    row = lines.index("gpus       3 NVIDIA H100 GPU-00000000 on node-7")
    assert lines[row + 1] == "           1 NVIDIA H100 GPU-00000000 on node-7"


def test_an_entry_has_the_load_of_each_gpu(here: Here, put: Put, on: Callable[..., None]) -> None:
    put("h100", {"gpu1.utilization.gpu": 90, "gpu3.utilization.gpu": 40, "gpu3.memory_used_mib": 7})
    on(UUIDS[1], UUIDS[3])
    here.train(max_steps=1)
    (entry,) = here.entries("train")
    assert entry["gpu_utilization_percent"] == 65.0
    assert entry["gpu_utilization_percent_each"] == [90.0, 40.0]
    # NVML counts the driver's own memory as used.
    assert entry["gpu_memory_used_mib_each"] == [551.0, 558.0]
    board = board_of(here.path())
    shown = {
        tag: board.Scalars(f"train/{tag}")[0].value
        for tag in (
            "gpu_utilization_percent/0",
            "gpu_utilization_percent/1",
            "gpu_memory_used_mib/1",
        )
    }
    assert list(shown.values()) == [90.0, 40.0, 558.0]


def test_rank_0_records_the_gpus_of_all_ranks(ranks: Ranks, library: Path, tmp_path: Path) -> None:
    keys = {"gpu0.utilization.gpu": 10, "gpu1.utilization.gpu": 30}
    config = write_config(tmp_path / "nvml.conf", "h100", keys, count=2)
    ended = ranks(
        2,
        str(library),
        "train",
        TINY,
        "--max-steps=1",
        "--run=r",
        module="tests.support.stub_gpus",
        env={"NVML_STUB_CONFIG": str(config)},
    )
    assert ended.codes == [0, 0], ended
    (entry,) = ranks.entries("r", "train")
    assert entry["gpu_utilization_percent_each"] == [10.0, 30.0]
    assert entry["gpu_memory_used_mib_each"] == [551.0, 551.0]
    manifest = json.loads((tmp_path / "runs/r/manifest.json").read_text())
    assert manifest["energy_kwh"] == 0.0
    lines = ended.out.splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("gpus       0 NVIDIA H100"))
    assert lines[row + 1].startswith("           1 NVIDIA H100 GPU-00000000 on ")


def test_energy_is_summed_over_gpus_and_across_a_resume(
    here: Here, put: Put, on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters start at the driver's load, so only their rise counts."""
    counters = [5.0, 900.0]  # kWh

    def rise(*kwh: float) -> None:
        for index, own in enumerate(kwh):
            counters[index] += own
        put("h100", {f"gpu{i}.energy_mj": int(c * KWH) for i, c in enumerate(counters)}, count=2)

    rise(0, 0)
    on(*UUIDS[:2])
    fit = trainer.session.train.fit

    def using_energy(*arguments: Any) -> None:
        rise(0.25, 0.5)
        fit(*arguments)

    monkeypatch.setattr(trainer.session.train, "fit", using_energy)
    here.stopped(2, max_steps=4)
    assert energy(here) == pytest.approx(0.75)
    rise(100, 100)  # between the two starts, other programs use the GPUs
    printed = here.train(max_steps=4)
    assert "changed since the run's start" not in printed
    assert energy(here) == pytest.approx(1.5)
    assert "energy     1.5 kWh" in printed.splitlines()
    # A complete run uses no more energy.
    rise(100, 100)
    assert "energy     1.5 kWh" in here.train(max_steps=4)
    assert energy(here) == pytest.approx(1.5)


def test_energy_that_a_gpu_does_not_count_is_not_measured(
    here: Here, put: Put, on: Callable[..., None]
) -> None:
    put("h100", {"gpu1.energy_mj": ""}, count=2)
    on(*UUIDS[:2])
    printed = here.train(max_steps=1)
    assert "energy     not measured" in printed.splitlines()
    assert energy(here) is None


def test_a_slice_has_memory_and_no_utilisation(
    here: Here, put: Put, on: Callable[..., None]
) -> None:
    put("a100-mig", {"gpu0.mig1.memory_used_mib": 30})
    on("MIG-00000000-0000-0000-0000-000000000001")
    lines = here.train(max_steps=1).splitlines()
    (entry,) = here.entries("train")
    assert entry["gpu_memory_used_mib_each"] == [30.0]
    assert "gpu_utilization_percent" not in entry
    assert any(line.startswith("gpus       0 NVIDIA H100 MIG-00000000 on ") for line in lines)
    assert "energy     not measured" in lines


def test_a_driver_that_hangs_does_not_stop_the_training(
    here: Here, put: Put, on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_gpus, "_FIRST_S", 0.05)
    monkeypatch.setattr(run_gpus, "_NEXT_S", 0.05)
    put("h100", {"hang": 1})
    on(UUIDS[0])
    printed = here.train(max_steps=3, log_steps=1)
    assert "energy     not measured" in printed.splitlines()
    assert len(here.entries("train")) == 3
    put("h100")  # the thread's call returns, and the thread ends
    for thread in threading.enumerate():
        if thread.name == "gpu-reader":
            thread.join()


def test_entries_do_not_wait_for_the_driver(
    here: Here, put: Put, on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is asked at the begin, at the end and once a second, not for each entry."""
    calls, reading = list[str](), run_gpus._reading
    monkeypatch.setattr(run_gpus, "_READ_EVERY_S", 3600.0)
    monkeypatch.setattr(run_gpus, "_STALE_S", 3600.0)
    monkeypatch.setattr(run_gpus, "_reading", lambda uuid: calls.append(uuid) or reading(uuid))
    put("h100", {"gpu0.utilization.gpu": 90})
    on(UUIDS[0])
    here.train(max_steps=9, log_steps=1)
    assert [entry["gpu_utilization_percent"] for entry in here.entries("train")] == [90.0] * 9
    assert len(calls) == 3


def test_the_load_is_read_once_a_second(
    put: Put, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(run_gpus, "_READ_EVERY_S", 0.01)
    reader = run_gpus.GpuReader(UUIDS[:1])
    request.addfinalizer(reader.close)
    put("h100", {"gpu0.utilization.gpu": 10})
    assert reader.read()[0].utilization_percent == 10
    put("h100", {"gpu0.utilization.gpu": 20})
    end_s = time.monotonic() + 60
    while reader.newest()[0].utilization_percent != 20:
        assert time.monotonic() < end_s
    put("h100", {"hang": 1})
    monkeypatch.setattr(run_gpus, "_STALE_S", 0.05)
    while not math.isnan(reader.newest()[0].utilization_percent):  # no longer known
        assert time.monotonic() < end_s
    put("h100")


def test_without_a_driver_the_gpus_have_their_names_only(
    here: Here, put: Put, on: Callable[..., None]
) -> None:
    put("h100", {"ret.init": 9})
    on(UUIDS[0])
    lines = here.train(max_steps=1).splitlines()
    assert any(line.startswith("gpus       NVIDIA H100 GPU-00000000 on ") for line in lines)
    assert "energy     not measured" in lines


def test_a_run_on_the_cpu_has_no_gpus(here: Here) -> None:
    printed = here.train(max_steps=1)
    assert energy(here) == "on the CPU"
    assert not {name for name in here.entries("train")[0] if "gpu" in name or "energy" in name}
    assert not [line for line in printed.splitlines() if line.startswith(("gpus ", "energy "))]


@pytest.mark.parametrize(
    ("strategy", "each"),
    [("single", [100.0]), ("dp", [100.0, 110.0, 120.0])],
    ids=["one GPU", "three under DataParallel"],
)
def test_the_gpus_of_a_process_are_found_by_uuid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strategy: str, each: list[float]
) -> None:
    """NVML and CUDA order GPUs differently."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda index: (100 + 10 * index) * 2**20
    )
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid=f"0{index}", name="T4"),
    )
    made = STRATEGIES[strategy](strategy, World(0, 1, torch.device("cuda", 0)))
    assert made.own_gpus() == [(f"GPU-0{index}", "T4") for index in range(len(each))]
    gpus = RunGpus(made, RunFolder(tmp_path, writes=False))
    assert gpus.figures() == {"gpu_memory_mib": each[-1], "gpu_memory_mib_each": each}
    gpus.close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert made.own_gpus()[0] == ("MIG-1", "T4")
