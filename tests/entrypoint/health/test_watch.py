"""The watch during a training, with a driver that returns the values of the test."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import entrypoint.health.node
import entrypoint.health.watch
from entrypoint.driver.gpus import Gpu, Sample, Unread
from entrypoint.health.limits import Limits
from entrypoint.health.rules.gpus import RULES, names_to_read
from entrypoint.health.verdict import Mode, Result
from entrypoint.health.watch import Watch
from entrypoint.launch.plan import LaunchPlan
from entrypoint.system.infiniband import InfiniBand
from trainbox.errors import DeviceMissing

GPUS = (Gpu(0, "GPU-0", "H100", 81559), Gpu(1, "GPU-1", "H100", 81559))
# The values of a healthy GPU that the gate and the watch read.
HEALTHY: dict[str, Any] = dict.fromkeys(names_to_read(RULES), Unread(3, "Not Supported")) | {
    "handle": 0,
    "recovery_action": 0,
    "ecc_uncorrected": 0,
    "remapped_rows": (0, 0, 0, 0),
    "clocks_event_reasons": 0,
    "compute_mode": 3,
    "processes": (),
    "persistence": 1,
}


class Answering:
    """A stand-in for Driver with the readings of each GPU, by UUID, and the Xids to report."""

    def __init__(self) -> None:
        self.read: dict[str, dict[str, Any]] = {gpu.uuid: dict(HEALTHY) for gpu in GPUS}
        self.xids: tuple[tuple[str, int], ...] = ()
        self.waiting_since_s: float | None = None
        self.died_at_s: float | None = None
        self.deadline_s = 10.0
        self.question = ""

    def ask(self, question: str, *_arguments: Any) -> None:
        self.question, self.waiting_since_s = question, 0.0

    def answer(self, _within_s: float) -> Sample:
        self.waiting_since_s = None
        if self.question == "xids":
            heard, self.xids = self.xids, ()
            return Sample(1.0, {uuid: {"handle": 0, "events": 0} for uuid in self.read}, heard)
        return self.sample(())

    def sample(self, _uuids: Any, _names: Any = (), events: bool = False) -> Sample:
        return Sample(1.0, self.read, driver={"driver_version": "1", "cuda": 99000})

    def close(self) -> None:
        """Do nothing."""


def events(watch: Watch) -> list[tuple[str, str, str]]:
    lines = watch.events.read_text().splitlines() if watch.events.exists() else []
    return [(entry["check"], entry["result"], entry["gpu"]) for entry in map(json.loads, lines)]


def made(driver: Answering, listener: Answering, folder: Path, **more: Any) -> Watch:
    return Watch(driver, listener, GPUS, Limits(), folder / "events", **({"known": {}} | more))  # type: ignore[arg-type]


def test_a_change_is_logged_once(tmp_path: Path) -> None:
    driver, listener = Answering(), Answering()
    watch = made(driver, listener, tmp_path, known={("temperature", "1"): Result.WARN})
    driver.read["GPU-1"] |= {
        "temperature_c": 88,
        "working_c": 87,
        "slowdown_c": 89,
        "shutdown_c": 95,
    }
    assert (watch.final_check(), watch.final_check(), events(watch)) == (None, None, []), (
        "it was so at the start"
    )
    driver.read["GPU-1"]["temperature_c"] = 50
    driver.read["GPU-0"]["clocks_event_reasons"] = 0x40
    assert (watch.final_check(), watch.final_check()) == (None, None)
    assert events(watch) == [("slowdown", "WARN", "0"), ("temperature", "PASS", "1")]


def test_an_xid_is_logged_each_time_and_a_fatal_xid_ends_the_run(tmp_path: Path) -> None:
    driver, listener = Answering(), Answering()
    watch = made(driver, listener, tmp_path)
    for xids in ((("GPU-1", 31),), (("GPU-1", 31),), ()):
        listener.xids = xids
        assert watch.final_check() is None
    listener.xids = (("GPU-1", 79),)
    assert "Xid 79" in str(watch.final_check())
    assert events(watch) == [("xid", "WARN", "1"), ("xid", "WARN", "1"), ("xid", "CRITICAL", "1")]


def test_an_event_that_does_not_fit_on_the_disk_does_not_damage_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    driver, listener = Answering(), Answering()
    watch = made(driver, listener, tmp_path)
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr("os.write", lambda number, data: write(number, data[: len(data) // 2 or 1]))
        listener.xids = (("GPU-1", 31),)
        assert watch.final_check() is None
    assert "(not in the run's metrics.jsonl: [Errno 28]" in capsys.readouterr().err
    listener.xids = (("GPU-0", 31),)
    assert watch.final_check() is None
    damaged, whole = watch.events.read_text().splitlines()
    assert (json.loads(whole)["gpu"], damaged[:1], damaged[-1:] == "}") == ("0", "{", False)


@pytest.mark.parametrize(
    ("check", "values"),
    [
        ("recovery-action", {"recovery_action": 1}),
        ("row-remap", {"remapped_rows": (0, 0, 0, 1)}),
        ("retired-pages", {"retired_pages": 63, "retired_pages_pending": 0}),
        ("handle", {"handle": Unread(15, "GPU is lost")}),
    ],
)
def test_a_critical_finding_of_these_checks_ends_the_run(
    check: str, values: dict[str, Any], tmp_path: Path
) -> None:
    driver = Answering()
    for readings in driver.read.values():
        readings |= {"nvlink_active": (1, 1), "fabric": (3, 0, 0x1AA, 1)}
    watch = made(driver, Answering(), tmp_path)
    assert watch.final_check() is None
    driver.read["GPU-1"] |= values
    assert f"GPU 1 (GPU-1): {check} CRITICAL" in str(watch.final_check())


@pytest.mark.parametrize(
    ("check", "bad"),
    [("nvlink", {"nvlink_active": (1, 0)}), ("fabric", {"fabric": (2, 0, 0x1AA, 1)})],
)
def test_a_link_that_is_back_at_the_next_reading_does_not_end_the_run(
    check: str, bad: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entrypoint.health.watch.INTERVAL_S", 0.0)
    driver = Answering()
    for readings in driver.read.values():
        readings |= {"nvlink_active": (1, 1), "fabric": (3, 0, 0x1AA, 1)}
    watch = made(driver, Answering(), tmp_path)

    def read(**values: Any) -> str | None:
        driver.read["GPU-1"] |= values
        watch.fatal()  # asks
        return watch.fatal()

    good = {name: driver.read["GPU-1"][name] for name in bad}
    assert [read(**values) for values in (good, bad, good, bad, good)] == [None] * 5
    assert events(watch) == [(check, "WARN", "1"), (check, "PASS", "1")] * 2
    assert "; the next reading decides" in watch.events.read_text()
    assert read(**bad) is None
    assert f"GPU 1 (GPU-1): {check} CRITICAL" in str(read(**bad))
    assert events(watch)[4:] == [(check, "WARN", "1"), (check, "CRITICAL", "1")]


def test_an_error_of_nvlink_5_ends_the_run_if_a_link_stays_down(tmp_path: Path) -> None:
    """The listener reads no link: the newest samples of the other process have them."""
    driver, listener = Answering(), Answering()
    driver.read["GPU-1"]["nvlink_active"] = (1, -1)
    # On these machines, a link that is down is only a warning.
    watch = made(driver, listener, tmp_path, known={("nvlink", "0"): Result.WARN})
    for links in ((1, 1), (1, 0)):
        read = driver.read["GPU-0"] | {"nvlink_active": links}
        driver.read = driver.read | {"GPU-0": read}
        assert watch.final_check() is None
    # The link may be back at the next reading, and the other GPU does not use it.
    for uuid in ("GPU-0", "GPU-1"):
        listener.xids = ((uuid, 149),)
        assert watch.final_check() is None
    listener.xids = (("GPU-0", 149),)
    assert "xid CRITICAL: Xid 149: NVLink error (NETIR), and a link is down" in str(
        watch.final_check()
    )
    assert events(watch)[-3:] == [
        ("xid", "WARN", "0"),
        ("xid", "WARN", "1"),
        ("xid", "CRITICAL", "0"),
    ]


def test_each_rule_that_ends_a_run_is_watched() -> None:
    ending = [rule for rule in RULES if rule.ends_a_run]
    of_memory = {"recovery-action", "ecc-uncorrected", "sram-threshold", "row-remap"}
    assert {rule.check for rule in ending} == {*of_memory, "retired-pages", "nvlink", "fabric"}
    assert [rule.check for rule in ending if Mode.WATCH not in rule.modes] == []


def plan(strategy: str, processes: int) -> LaunchPlan:
    return LaunchPlan(strategy, "cuda", GPUS, 1, processes, ("python",), "because")


def test_the_gate_of_a_sweep_and_of_a_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrypoint.health.watch, "Driver", Answering)
    driver: Any = Answering()
    with entrypoint.health.watch.watched(plan("sweep", 2), driver) as watch:
        driver.read["GPU-0"]["ecc_uncorrected"] = 7
        assert watch.final_check() is None, "no finding ends a sweep"
        assert events(watch) == [("ecc-uncorrected", "CRITICAL", "0")]
    driver = Answering()
    with entrypoint.health.watch.watched(plan("ddp", 2), driver) as watch:
        assert events(watch) == []
        driver.read["GPU-0"]["ecc_uncorrected"] = 7
        assert "ecc-uncorrected CRITICAL" in str(watch.final_check())
    with pytest.raises(
        DeviceMissing,
        match="compute-mode CRITICAL: EXCLUSIVE_PROCESS, 0 program.s. on the GPU, 2 to start",
    ):
        entrypoint.health.watch.watched(plan("sweep", 4), Answering()).__enter__()  # type: ignore[arg-type]


def test_the_gate_judges_the_network_between_nodes_only_for_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = InfiniBand(devices={"mlx5_0": "InfiniBand"}, fault="libibverbs.so.1: not found")
    monkeypatch.setattr(entrypoint.health.node, "read_infiniband", lambda _env: found)
    monkeypatch.setattr(entrypoint.health.watch, "Driver", Answering)
    driver: Any = Answering()
    for nnodes in (1, 2):
        launch = replace(plan("ddp", 2), nnodes=nnodes)
        with entrypoint.health.watch.watched(launch, driver):
            assert ("infiniband (node)" in capsys.readouterr().out) == (nnodes == 2)
