"""What the driver answers, and the commands that only ask the driver."""

import json
import time

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.rows import table

# NVML's answers for a value that this GPU or driver does not have, or hides.
_HIDDEN = {3: "not supported", 4: "no permission", 13: "not in this driver"}


@pytest.mark.gpu(seconds=5, settles="health.md: which values a driver reports, and their cost")
def test_each_reading_of_the_driver_is_a_value_or_a_known_refusal(check: Check) -> None:
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
    assert not errors(readings)
    unknown = {n: r["code"] for n, r in readings.items() if r.get("code", 3) not in _HIDDEN}
    assert not unknown, f"readings with other NVML codes, which a rule must expect: {unknown}"


def _shown(reading: dict[str, object]) -> str:
    return f"{reading['code']}: {reading['value']}" if "code" in reading else f"{reading['value']}"


@pytest.mark.gpu(seconds=10, settles="exit codes and times of the commands that train nothing")
def test_health_plan_and_doctor_accept_this_gpu(check: Check) -> None:
    check.needs("click", "pynvml")
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


@pytest.mark.gpu(seconds=28, settles="health.md: the tests of a GPU by computing on it")
def test_the_deep_check_passes(check: Check) -> None:
    words = [] if check.on_gpu else ["--processes", "1"]
    ended = check.trainbox("health", "--deep", *words)
    check.tables.append(
        ("`trainbox health --deep`", ["```", *ended.out.splitlines(), "```"]),
    )


@pytest.mark.gpu(seconds=6, settles="V100 and older: the gate compares the architectures")
def test_torch_has_code_for_this_gpu_and_both_packages_agree(check: Check) -> None:
    found = check.program("architectures")
    check.saw(f"the launcher reads {found['launcher']}, torch {found['torch']}")
    check.needs_gpu()
    assert sorted(found["launcher"]) == sorted(found["torch"])
    assert found["refusal"] is None
