"""What the driver answers, and the commands that only ask the driver."""

import json
import shutil
import subprocess
import time

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.rows import table


@pytest.mark.gpu(step=1, seconds=4, settles="health.md: the values of a driver, and their cost")
def test_each_reading_of_the_driver_is_a_value_or_a_refusal(check: Check) -> None:
    check.needs("pynvml")
    found = check.program("readers")
    check.saw(f"driver {found['detection']['value']}")
    if not check.on_gpu and "gpu" not in found:
        check.needs_gpu()
    readings = {name: value for name, value in found.items() if name not in ("detection", "gpu")}
    assert readings, f"the driver lists no GPU: {found}"
    check.tables.append(
        (
            "Readings of the driver",
            table(
                ("Reading", "Value, or NVML's code", "ms"),
                [(n, _shown(r), r["ms"]) for n, r in readings.items()],
            ),
        )
    )
    slowest = max(readings, key=lambda name: readings[name]["ms"])
    check.saw(f"slowest: {slowest}, {readings[slowest]['ms']} ms")
    # Which values are hidden, and with which code, differs between GPUs, drivers and VMs.
    refused = {name: r["code"] for name, r in readings.items() if "code" in r}
    check.saw(f"{len(refused)} of {len(readings)} refused, with NVML's codes {refused}")
    assert not errors(readings)
    assert len(refused) < len(readings)


def _shown(reading: dict[str, object]) -> str:
    return f"{reading['code']}: {reading['value']}" if "code" in reading else f"{reading['value']}"


@pytest.mark.gpu(step=1, seconds=1, settles="the driver's own report, for questions later")
def test_nvidia_smi_answers(check: Check) -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not on PATH")
    ended = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=60)
    check.tables.append(("`nvidia-smi -q`", ["```", *ended.stdout.splitlines(), "```"]))
    assert ended.returncode == 0, ended.stdout


@pytest.mark.gpu(
    step=1, seconds=7, settles="exit codes and times of the commands that train nothing"
)
def test_health_plan_and_doctor_accept_this_gpu(check: Check) -> None:
    commands = {
        "health --list --json": ("health", "--list", "--json"),
        "plan": ("plan", "digits"),
        "health --gate --json": ("health", "--gate", "--json"),
        "health": ("health",),
        "doctor": ("doctor",),
    }
    refused = {}
    for name, words in commands.items():
        begin = time.monotonic()
        ended = check.trainbox(*words, codes=range(256))
        check.saw(f"{name}: {time.monotonic() - begin:.2f} s")
        text = ended.out if name in ("health", "doctor") or ended.code else ""
        if text:
            check.tables.append((f"`trainbox {name}`", ["```", *text.splitlines(), "```"]))
        if ended.code and name != "doctor":  # doctor also reports what this machine lacks
            refused[name] = f"exit code {ended.code}: {(ended.out + ended.err)[-1500:]}"
        if name == "plan" and not ended.code and check.on_gpu:
            plan = json.loads(ended.out)
            assert (plan["strategy"], len(plan["gpus"])) == ("single", 1), plan
    check.needs_gpu()
    assert not refused


@pytest.mark.gpu(step=4, seconds=18, settles="health.md: the tests of a GPU by computing on it")
def test_the_deep_check_passes(check: Check) -> None:
    words = [] if check.on_gpu else ["--processes", "1"]
    ended = check.trainbox("health", "--deep", *words)
    check.tables.append(
        ("`trainbox health --deep`", ["```", *ended.out.splitlines(), "```"]),
    )


@pytest.mark.gpu(step=1, seconds=4, settles="V100 and older: the gate compares the architectures")
def test_torch_has_code_for_this_gpu_and_both_packages_agree(check: Check) -> None:
    found = check.program("architectures")
    check.saw(f"the launcher reads {found['launcher']}, torch {found['torch']}")
    check.needs_gpu()
    assert sorted(found["launcher"]) == sorted(found["torch"])
    assert found["refusal"] is None
