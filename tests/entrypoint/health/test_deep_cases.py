"""The programs that --deep starts, and the findings from the lines that they print."""

import json
from typing import Any

import pytest

from entrypoint.health.deep_cases import (
    Device,
    Probe,
    Reading,
    devices_of,
    ended,
    env_of,
    exchanges,
    findings,
    out_of_time,
)
from entrypoint.health.limits import Limits
from entrypoint.health.verdict import Finding, Mode, Result, Verdict, screen
from trainbox.processes.environment import LaunchFacts, launch_facts

_H100 = "NVIDIA H100 80GB HBM3"
_GPUS = devices_of([{"gpu": f"{n}", "uuid": f"GPU-{n}", "name": _H100} for n in range(4)], 5)
_CPUS = devices_of((), 3)
_SLICES = (Device("0:0", "MIG-a", "1g.10gb"), Device("0:1", "MIG-b", "1g.10gb"))
_PAIR = Probe(_GPUS[:2])


def line(
    test: str,
    speed: float = 41.2e9,
    right: bool = True,
    rank: int = 0,
    detail: str = "as it should",
) -> dict[str, Any]:
    return {"rank": rank, "test": test, "right": right, "detail": detail, "speed": speed}


def text(*lines: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(each)}\n" for each in lines)


def found(outcome: list[Reading]) -> list[Finding]:
    return [reading.finding for reading in outcome]


def judged(
    *outcomes: list[Reading], devices: tuple[Device, ...] = _GPUS, **limits: float
) -> list[Finding]:
    every = [reading for outcome in outcomes for reading in outcome]
    return findings(every, devices, Limits(**limits))  # type: ignore[arg-type]


def memory(device: Device, speed: float, right: bool = True) -> list[Reading]:
    probe = Probe((device,))
    return ended(probe, text(line("matmul", 1e12), line("memory", speed, right)), "", 0)


def exchange(*devices: Device, speed: float = 41.2e9) -> list[Reading]:
    probe = Probe(devices)
    return ended(
        probe, text(*(line("all-reduce", speed, rank=rank) for rank in range(len(devices)))), "", 0
    )


def test_the_exchanges_are_pairs_and_then_all_without_slices() -> None:
    names = [probe.name for probe in exchanges((_SLICES[0], *_GPUS[1:]))]
    assert names == ["GPU 1 and 2", "GPU 1 and 3", "GPU 2 and 3", "GPU 1, 2 and 3"]
    assert [probe.name for probe in exchanges((*_SLICES, *_GPUS[1:3]))] == ["GPU 1 and 2"]


def test_a_child_sees_only_its_own_gpus_and_job() -> None:
    around = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "7",
        "PET_NNODES": "2",
    }
    assert env_of(_PAIR, around, cpus=5) == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **LaunchFacts(device="cuda").variable(),
    }
    on_cpus = env_of(Probe(_CPUS), {"CUDA_VISIBLE_DEVICES": "7", "OMP_NUM_THREADS": "6"}, cpus=2)
    assert (
        on_cpus["CUDA_VISIBLE_DEVICES"],
        launch_facts(on_cpus).device,
        on_cpus["OMP_NUM_THREADS"],
    ) == ("", "cpu", "6")
    assert env_of(Probe(_CPUS), {}, cpus=2)["OMP_NUM_THREADS"] == "1"


def test_a_correct_result_passes_with_its_speed() -> None:
    alone = ended(
        Probe(_GPUS[2:3]), text(line("matmul", 51.23e12), line("memory", 3012e9)), "a warning", 0
    )
    assert [(each.read, each.limit, each.subject, each.uuid) for each in found(alone)] == [
        (
            "51.2 TFLOP/s; as it should",
            "within the error bound of float32, the same bits each time",
            "GPU 2",
            "GPU-2",
        ),
        ("3,012 GB/s; as it should", "all values right", "GPU 2", "GPU-2"),
    ]
    of_libraries = 'NCCL version 2.27\n{"rank"\n{"level": "info"}\nnull\n'
    slower = text(line("all-reduce", 41.2e9), line("all-reduce", 39.9e9, rank=1))
    (pair,) = ended(_PAIR, of_libraries + slower, "", 0)
    assert (pair.finding.result, pair.finding.subject, pair.finding.uuid) == (
        Result.PASS,
        "GPU 0+1",
        None,
    )
    assert pair.finding.read == "39.9 GB/s; as it should"
    assert pair.line == "all-reduce GPU 0 and 1: 39.9 GB/s, right"


# fmt: off
_WRONG_VALUES = [
    (Probe(_GPUS[1:2]), "matmul", "replace: take the GPU out of service and replace it"),
    (_PAIR, "all-reduce",
     "reset_gpu: stop what runs on the GPU, then `nvidia-smi --gpu-reset -i 0,1` as root"),
    (Probe(_CPUS[:2]), "all-reduce",
     "drain: take the node out of service and test its memory and CPUs"),
]
# fmt: on


@pytest.mark.parametrize(("probe", "test", "advice"), _WRONG_VALUES)
def test_a_wrong_value_is_critical_whatever_its_speed(probe: Probe, test: str, advice: str) -> None:
    lines = [
        line(each, rank=rank, right=each != test)
        for each in probe.tests
        for rank in range(len(probe.devices))
    ]
    (finding,) = [
        each for each in found(ended(probe, text(*lines), "", 0)) if each.result is not Result.PASS
    ]
    assert (finding.check, finding.result, finding.advice) == (
        f"deep-{test}",
        Result.CRITICAL,
        advice,
    )
    assert "WRONG: " in finding.read


def test_the_device_of_a_pair_with_wrong_values_is_named() -> None:
    lines = text(
        line("all-reduce"), line("all-reduce", rank=1, right=False, detail="3 wrong values")
    )
    (on_gpus,) = ended(Probe((_GPUS[0], _GPUS[3])), lines, "", 0)
    assert on_gpus.finding.read == "WRONG: GPU 3: 3 wrong values"
    assert on_gpus.line == "all-reduce GPU 0 and 3: WRONG: GPU 3: 3 wrong values"
    (on_cpus,) = ended(Probe((_CPUS[0], _CPUS[2])), lines, "", 0)
    assert on_cpus.finding.read == "CPU processes 0 and 2: WRONG: CPU process 2: 3 wrong values"
    assert on_cpus.line == f"all-reduce {on_cpus.finding.read}"


def test_a_pair_that_does_not_end_is_named_with_the_deadline() -> None:
    (reading,) = out_of_time(_PAIR, text(line("all-reduce")), 120)
    assert reading.finding == Finding(
        "deep-all-reduce",
        Result.CRITICAL,
        "not finished after 120 s: killed",
        gpu="0+1",
        limit="finished within 120 s",
        source="--deadline-s",
        action="reset_gpu",
    )
    assert out_of_time(Probe(_CPUS[:1]), "", 1.5)[0].finding.action == "make_room"


# fmt: off
_FAILED = [
    (text({"rank": 1, "error": "a"}, {"rank": 0, "error": "b"}), "a traceback", 1,
     "GPU 1: a; GPU 0: b (exit code 1)"),
    ("", "no torch here\nModuleNotFoundError: torch\n\n", 1,
     "ModuleNotFoundError: torch (exit code 1)"),
    ("NCCL version 2.27\n[1]\n17\n", "", -11, "no output (killed by SIGSEGV)"),
    (text(line("all-reduce")), "", 0, "it exited without a result"),
    (text(line("all-reduce"), line("all-reduce", rank=1)), "terminate called", 134,
     "terminate called (exit code 134)"),
    ("", "x" * 1000, 1, "x" * 300 + " (exit code 1)"),
]
# fmt: on


@pytest.mark.parametrize(("out", "err", "code", "read"), _FAILED)
def test_a_failed_child_is_critical_with_its_last_message(
    out: str, err: str, code: int, read: str
) -> None:
    (finding,) = found(ended(_PAIR, out, err, code))
    assert (finding.result, finding.read, finding.action) == (Result.CRITICAL, read, "ask_host")


def results(given: list[Finding], check: str = "deep-memory") -> list[str]:
    return [finding.result for finding in given if finding.check == check]


@pytest.mark.parametrize(
    ("speeds", "limits", "expected"),
    [
        ((1000e9, 799e9, 1000e9, 1001e9), {}, "PASS WARN PASS PASS"),
        ((1000e9, 800e9, 1000e9), {}, "PASS PASS PASS"),
        ((100e9, 40e9, 100e9), {"deep_slowest_of_median": 0.4}, "PASS PASS PASS"),
        ((1000e9, 1e9), {}, "PASS PASS"),
    ],
)
def test_a_device_that_is_slower_than_two_similar_ones_is_a_warning(
    speeds: tuple[float, ...], limits: dict[str, float], expected: str
) -> None:
    given = judged(*map(memory, _GPUS, speeds), **limits)
    assert " ".join(results(given)) == expected
    for warned in given:
        if warned.result is Result.WARN:
            assert warned.line == (
                "GPU 1 (GPU-1): deep-memory WARN: 799 GB/s; as it should; limit: 0.8 of 1,000 "
                "GB/s, the median of 4 similar ones (Trainbox) -> inspect: inspect the GPU when "
                "convenient; the run may start"
            )


def test_only_tests_of_the_same_models_and_numbers_of_devices_are_compared() -> None:
    t4 = Device("3", "GPU-3", "Tesla T4")
    mixed = [*(memory(gpu, 3000e9) for gpu in _GPUS[:3]), memory(t4, 300e9)]
    assert results(judged(*mixed)) == ["PASS"] * 4
    speeds = {(0, 1): 40e9, (0, 2): 12e9, (1, 2): 41e9, (0, 3): 10e9, (0, 1, 2): 1e9}
    devices = (*_GPUS[:3], t4)
    pairs = [exchange(*(devices[n] for n in given), speed=each) for given, each in speeds.items()]
    assert results(judged(*pairs, devices=devices), "deep-all-reduce") == [
        *("PASS", "WARN", "PASS", "PASS", "PASS")
    ]


def test_a_wrong_value_stays_critical_if_the_device_is_slow() -> None:
    speeds = [memory(_GPUS[0], 1e9, right=False), *(memory(gpu, 1000e9) for gpu in _GPUS[1:])]
    assert results(judged(*speeds)) == ["CRITICAL", "PASS", "PASS", "PASS"]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (_CPUS[:1], [(None, "NA", "CPU process 0: no other device to exchange with")]),
        (
            (*_SLICES[:1], _GPUS[1]),
            [
                ("0:0", "NA", "CUDA shows a process only one MIG slice"),
                ("1", "NA", "no other device to exchange with"),
            ],
        ),
    ],
)
def test_a_device_without_an_exchange_has_a_finding(
    devices: tuple[Device, ...], expected: list[tuple[str | None, str, str]]
) -> None:
    outcomes = [memory(device, 1e9) for device in devices]
    given = [f for f in judged(*outcomes, devices=devices) if f.check == "deep-all-reduce"]
    assert [(finding.gpu, finding.result, finding.read) for finding in given] == expected
    assert Verdict(Mode.DEEP, tuple(given)).open
    required = Verdict(Mode.DEEP, tuple(given), required=("deep-all-reduce",))
    assert (required.open, required.result) == (False, Result.UNKNOWN)


def test_a_device_left_out_of_the_exchange_is_unknown_and_closes() -> None:
    hung = out_of_time(Probe(_GPUS[2:3]), "", 120)
    given = judged(
        memory(_GPUS[0], 1e9), memory(_GPUS[1], 1e9), hung, exchange(*_GPUS[:2]), devices=_GPUS[:3]
    )
    (finding,) = (f for f in given if f.check == "deep-all-reduce" and f.result is not Result.PASS)
    assert (finding.gpu, finding.result, finding.action) == ("2", Result.UNKNOWN, "ask_host")
    assert finding in Verdict(Mode.DEEP, (finding,)).closing


def test_the_screen_has_a_row_for_each_test_and_explains_failures() -> None:
    given = judged(
        memory(_GPUS[0], 3000e9),
        memory(_GPUS[1], 2990e9),
        out_of_time(_PAIR, "", 120),
        devices=_GPUS[:2],
    )
    described = tuple(
        {"gpu": gpu.label, "uuid": gpu.uuid, "name": gpu.name, "memory_mib": 81559}
        for gpu in _GPUS[:2]
    )
    summary = Finding("deep", Result.PASS, "5 tests on GPU 0 and 1 in 140 s")
    shown = Verdict(Mode.DEEP, (Finding("cpus", Result.PASS, "8 CPUs"), summary, *given), described)
    assert screen(shown).splitlines() == [
        "GPU 0  PASS      NVIDIA H100 80GB HBM3, 81,559 MiB  GPU-0",
        "GPU 1  PASS      NVIDIA H100 80GB HBM3, 81,559 MiB  GPU-1",
        "node   PASS      8 CPUs",
        "deep   CRITICAL  5 tests on GPU 0 and 1 in 140 s",
        "       matmul     GPU 0: 1 TFLOP/s; as it should",
        "       memory     GPU 0: 3,000 GB/s; as it should",
        "       matmul     GPU 1: 1 TFLOP/s; as it should",
        "       memory     GPU 1: 2,990 GB/s; as it should",
        "",
        "CRITICAL  deep-all-reduce on GPU 0+1",
        "          read   not finished after 120 s: killed",
        "          limit  finished within 120 s (--deadline-s)",
        "          do     reset_gpu: stop what runs on the GPU, then `nvidia-smi "
        "--gpu-reset -i 0,1` as root",
        "",
        "CLOSED, CRITICAL: 2 GPUs; deep-all-reduce (GPU 0+1)",
    ]
