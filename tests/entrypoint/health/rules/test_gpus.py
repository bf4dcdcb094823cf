"""The findings of the pure rules on several samples, on other GPUs, and on errors."""

import dataclasses
from typing import Any

import pytest

from entrypoint.driver.gpus import Gpu, Sample, Unread
from entrypoint.health.check import Question, verdict
from entrypoint.health.limits import Limits
from entrypoint.health.rules.gpus import RULES, Selection, judge_gpus, rules_for
from entrypoint.health.rules.rule import window
from entrypoint.health.verdict import Finding, Mode, Result

GPUS = tuple(Gpu(index, f"GPU-{index}", "H100", 81559) for index in range(2))


def judged(
    check: str,
    readings: list[dict[str, Any]],
    every_s: float = 1.0,
    gpus: tuple[Gpu, ...] = GPUS[:1],
    **limits: Any,
) -> Finding:
    """Return the finding of `check` on GPU 0 after these samples."""
    rules = [rule for rule in RULES if rule.check == check]
    samples = [
        Sample(number * every_s, {gpu.uuid: {"handle": 0, **reading} for gpu in gpus})
        for number, reading in enumerate(readings)
    ]
    found = judge_gpus(samples, Selection(gpus), rules, dataclasses.replace(Limits(), **limits))
    (finding,) = (f for f in found if f.check == check and f.gpu == "0")
    return finding


@pytest.mark.parametrize(
    ("slow", "every_s", "result"),
    [
        ([1] * 6, 1.0, Result.CRITICAL),
        ([1] * 6 + [0] * 4, 1.0, Result.CRITICAL),
        ([1] * 6 + [0] * 5, 1.0, Result.WARN),
        ([1] * 10, 0.1, Result.WARN),
        ([1] + [0] * 10, 1.0, Result.PASS),
    ],
)
def test_a_sustained_slowdown_differs_from_a_short_one(
    slow: list[int], every_s: float, result: Result
) -> None:
    readings = [{"clocks_event_reasons": 0x40 if each else 0x5} for each in slow]
    assert judged("slowdown", readings, every_s).result is result
    readings = [{"clocks_event_reasons": 0x20 if each else 0x5} for each in slow]
    by_software = judged("slowdown", readings, every_s).result
    assert by_software is (Result.WARN if result is Result.CRITICAL else result)


def test_memory_of_a_hidden_program_is_named() -> None:
    used = {"memory_used_mib": 70000}
    hidden = judged("memory-in-use", [used | {"processes": ()}]).read
    assert hidden == (
        "70,000 MiB in use by programs that are not visible here, such as programs of "
        "another container"
    )
    shown = judged("memory-in-use", [used | {"processes": (4242,)}]).read
    assert shown == "70,000 MiB in use by the programs that use the GPU"


def test_memory_in_use_and_power_of_a_gpu_are_not_those_of_its_slices() -> None:
    readings = {"handle": 0, "recovery_action": 0, "power_w": 300, "memory_used_mib": 70000}
    own = Gpu(0, "MIG-0", "H100 1g.10gb", 9728, mig_index=0, mig_parent="GPU-0")
    question = Question(Mode.LIVE, selection=Selection((own, GPUS[0])))
    shown = verdict([Sample(0.0, {"GPU-0": readings})], question, None).gpus
    assert [gpu.get("memory_used_mib") for gpu in shown] == [None, 70000]
    assert [gpu.get("power_w") for gpu in shown] == [None, 300]


def test_links_are_named_by_their_numbers() -> None:
    links = (1, -1, 0, 1)  # the model does not use link 1
    readings = {"nvlink_active": links, "nvlink_switch": 0, "fabric": Unread(3, "no")}
    finding = judged("nvlink", [readings], gpus=GPUS)
    assert finding.read == (
        "2 of 3 links active: down 2; the same links are down on each GPU in use"
    )


@pytest.mark.parametrize(
    ("counts", "result", "rate"),
    [
        ([0, 8], Result.PASS, 8),
        ([0, 9], Result.WARN, 9),
        ([500, 3], Result.PASS, 0),
        ([*range(0, 240, 2)], Result.WARN, 120),
    ],
)
def test_pcie_replays_are_counted_over_a_minute(
    counts: list[int], result: Result, rate: float
) -> None:
    """A reset of the counter is not a rise, and one replay after a second is not 60 a minute."""
    finding = judged("pcie-replays", [{"pcie_replays": count} for count in counts])
    assert (finding.result, finding.read) == (result, f"{rate:g} replays a minute")


@pytest.mark.parametrize(
    ("counts", "every_s", "result"),
    [
        ([0, 99], 0.1, Result.PASS),
        ([0, 200], 2.0, Result.CRITICAL),
    ],
)
def test_crc_errors_are_counted_over_a_second(
    counts: list[int], every_s: float, result: Result
) -> None:
    readings = [{"nvlink_crc": (0, count)} for count in counts]
    assert judged("nvlink-crc", readings, every_s).result is result


def test_a_window_has_the_last_minute_and_at_least_ten_samples() -> None:
    def kept(count: int, every_s: float) -> int:
        samples: list[Sample] = []
        for number in range(count):
            samples = window([*samples, Sample(number * every_s)])
        assert samples[-1].time_s == (count - 1) * every_s
        return len(samples)

    assert [kept(5, 1.0), kept(100, 1.0), kept(100, 30.0)] == [5, 61, 10]


@pytest.mark.parametrize(
    ("counts", "result"),
    [
        ([(0, 4), (0, 5)], Result.CRITICAL),
        ([(0, 9), (0, 2)], Result.WARN),
    ],
)
def test_nvlink_errors_are_critical_when_they_are_new(
    counts: list[tuple[int, int]], result: Result
) -> None:
    assert judged("nvlink-errors", [{"nvlink_errors": each} for each in counts]).result is result


def test_a_value_that_becomes_unreadable_does_not_pass() -> None:
    finding = judged(
        "pcie-replays", [{"pcie_replays": 1}, {"pcie_replays": Unread(999, "Unknown Error")}]
    )
    assert finding.result is Result.UNKNOWN


@pytest.mark.parametrize(("code", "action"), [(15, "reboot"), (16, "reset_gpu")])
def test_a_lost_gpu_gives_one_finding(code: int, action: str) -> None:
    samples = [
        Sample(
            0.0,
            {"GPU-0": {"handle": 0, "temperature_c": Unread(code, "gone"), "ecc_uncorrected": 0}},
        )
    ]
    found = judge_gpus(samples, Selection(GPUS[:1]), RULES, Limits())
    assert [(finding.check, finding.result, finding.action) for finding in found] == [
        ("handle", Result.CRITICAL, action)
    ]


def test_the_rules_that_each_mode_leaves_out() -> None:
    """All rules run in the thorough modes; the other modes leave some out, or name theirs."""
    every = [rule.check for rule in RULES]
    runs = {mode: [rule.check for rule in rules_for(mode)] for mode in Mode}
    missing = {
        mode: [check for check in every if check not in runs[mode]]
        for mode in (Mode.GATE, Mode.CHECK, Mode.DEEP, Mode.MONITOR)
    }
    assert missing == {
        Mode.GATE: ["pcie-replays", "nvlink-crc"],
        Mode.CHECK: [],
        Mode.DEEP: [],
        Mode.MONITOR: ["compute-mode", "memory-in-use", "processes"],
    }
    assert runs[Mode.LIVE] == ["recovery-action"]
