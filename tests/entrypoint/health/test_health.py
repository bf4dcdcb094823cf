"""`trainbox health` on the NVML stub: each rule, each kind of GPU, broken drivers.

One process that has imported `trainbox` forks for each case. The tests of a driver that hangs and
of the monitor start real processes.
"""

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from entrypoint.driver.gpus import Detection
from entrypoint.health import check
from entrypoint.health.check import Question, check_names
from entrypoint.health.limits import Limits, read_limits
from entrypoint.health.monitor import Warned, steady
from entrypoint.health.rules.gpus import RULES, rules_for
from entrypoint.health.verdict import Finding, Mode, Result, Verdict, screen
from entrypoint.system.nvidia import unusable_gpus
from tests.support.commands import Ended, Trainbox, finish, wait_until
from tests.support.health_cases import (
    CASES,
    CRITICAL,
    INFO,
    NA,
    NEW_ENOUGH,
    PASS,
    PROFILES,
    UNKNOWN,
    WARN,
    Case,
)
from tests.support.nvml_stub.build import build_stub, stub_env, write_config
from tests.support.processes import started_with, wait_until_none
from trainbox.errors import WrongUse

ROOT = Path(__file__).parents[3]


def put(folder: Path, profile: str, keys: dict[str, object] | None = None, **more: object) -> Path:
    """Write the file that the NVML stub reads at each call."""
    return write_config(folder / "nvml.conf", profile, keys, **more)


def on_stub(library: Path, config: Path) -> dict[str, str]:
    """Return the environment of a process on the stub, with its own folder for probes' files."""
    return stub_env(library.parent, config) | {"TMPDIR": str(config.parent)}


def health(
    trainbox: Trainbox,
    library: Path,
    config: Path,
    *arguments: str,
    verb: str = "health",
    **env: str,
) -> Ended:
    return trainbox(verb, *arguments, env=on_stub(library, config) | env)


def run_case(case: Case, library: Path, trainbox: Trainbox) -> tuple[dict[str, Any], int]:
    """Run `trainbox health --gate` on the case; return the verdict and the exit code."""
    if case.keys.get("ret.init") == 9 and unusable_gpus(is_container=False):
        pytest.skip("this machine has NVIDIA GPUs")
    count = {} if "mig" in case.profile else {"count": 2}
    config = put(trainbox.folder, case.profile, dict(case.keys), **count)
    words = [*case.words]
    if case.limits:
        (trainbox.folder / "limits.toml").write_text(case.limits + "\n")
        words += ["--health-limits", "limits.toml"]
    ended = health(trainbox, library, config, "--gate", "--json", *words)
    assert ended.err == "", ended.err
    return json.loads(ended.out), ended.code


def result_of(verdict: Mapping[str, Any], check: str) -> str:
    """Return the worst result of the check."""
    order = [NA, PASS, INFO, WARN, UNKNOWN, CRITICAL]
    return max((f["result"] for f in verdict["findings"] if f["check"] == check), key=order.index)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule(case: Case, library: Path, forked: Trainbox) -> None:
    verdict, code = run_case(case, library, forked)
    assert (result_of(verdict, case.check), code) == (case.result, case.code), verdict["findings"]
    assert verdict["open"] == (code == 0)
    for finding in verdict["findings"]:
        if finding["check"] == case.check and finding["result"] in (WARN, UNKNOWN, CRITICAL):
            assert finding["read"], finding
            assert (finding["action"] and finding["advice"]) or "not judged here" in finding[
                "read"
            ], finding


def test_the_page_lists_each_rule() -> None:
    page = (ROOT / "docs/reference/health-rules.md").read_text()
    listed = [cell for line in page.splitlines() for cell in re.findall(r"^\| (`.*?) \|", line)]
    names = re.findall(r"`([a-z-]+)`", " ".join(listed))
    assert sorted(names) == sorted(check_names())
    for rule in RULES:
        (listing,) = (line for line in page.splitlines() if line.startswith(f"| `{rule.check}`"))
        source = re.sub(r"\[(.*?)\](\[.*?\])?", r"\1", listing.split("|")[3])
        assert rule.source in source, rule.check
    watched = re.search(r"During a training, Trainbox judges (.*?)\.", page, re.DOTALL)
    assert watched
    rules = [rule.check for rule in rules_for(Mode.WATCH)]
    assert re.findall(r"`([a-z-]+)`", watched[1]) == ["handle", "xid", *rules]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_healthy_machine_of_each_kind(library: Path, forked: Trainbox, profile: str) -> None:
    keys = NEW_ENOUGH if profile == "old-driver" else {}
    case = Case("", "", "", profile=profile, keys=keys, words=("--processes", "1"))
    verdict, code = run_case(case, library, forked)
    results: dict[str, set[str]] = {}
    for finding in verdict["findings"]:
        results.setdefault(finding["result"], set()).add(finding["check"])
    assert results[NA] == PROFILES[profile]
    assert results.get(WARN, set()) == ({"persistence"} if profile == "geforce" else set())
    # The installed torch has no code for Volta. Apart from that, the machine is healthy.
    assert results.get(CRITICAL, set()) == ({"architecture"} if profile == "v100" else set())
    assert code == (1 if profile == "v100" else 0)
    assert UNKNOWN not in results


@pytest.mark.usefixtures("library")  # skips without a C compiler
def test_a_library_without_a_symbol_is_an_old_driver(trainbox: Trainbox, tmp_path: Path) -> None:
    names = ("FieldValues", "RemappedRows", "MarginTemperature")
    absent = ["nvmlEventSetCreate", *(f"nvmlDeviceGet{name}" for name in names)]
    old = build_stub(tmp_path / "old", without=absent)
    verdict, code = run_case(Case("", "", "", words=("--processes", "1")), old, trainbox)
    assert code == 0
    missing = {"recovery-action": NA, "row-remap": NA, "temperature-margin": NA}
    found = {check: result_of(verdict, check) for check in (*missing, "ecc-uncorrected")}
    assert found == missing | {"ecc-uncorrected": PASS}


def test_a_driver_without_events_does_not_close(
    forked: Trainbox, library: Path, tmp_path: Path
) -> None:
    config = put(tmp_path, "h100", {"ret.event_register": 999}, count=1)
    ended = health(forked, library, config, "--json", "--processes", "1")
    verdict = json.loads(ended.out)
    assert (result_of(verdict, "xid"), ended.code) == (UNKNOWN, 0)


# Output.


def test_the_screen(forked: Trainbox, library: Path, tmp_path: Path) -> None:
    config = put(
        tmp_path, "h100", {"gpu1.ecc.volatile.uncorrected": 2, "gpu0.persistence_mode": 0}, count=2
    )
    limits = tmp_path / "limits.toml"
    limits.write_text("disk_mib = 1\nmemory_mib_per_process = 1\n")
    ended = health(
        forked, library, config, "--gate", "--health-limits", str(limits), "--processes", "1"
    )
    assert (ended.code, ended.err) == (1, "")
    lines = ended.out.splitlines()
    assert lines[0] == "NVIDIA driver 580.95.05 (stub)"
    stub = "This is a test stub of NVML, not a driver: the results describe no real hardware."
    assert lines[1] == stub
    uuids = [f"GPU-00000000-0000-0000-0000-00000000000{gpu}" for gpu in (0, 1)]
    about = "NVIDIA H100 80GB HBM3, 81,559 MiB, 33 °C, 0 %, 71 W "
    assert lines[2] == f"GPU 0  WARN      {about} {uuids[0]}"
    assert lines[3] == f"GPU 1  CRITICAL  {about} {uuids[1]}"
    assert re.match(r"node   PASS      \d+ usable CPU\(s\); ", lines[4])
    assert lines[6:10] == [
        f"CRITICAL  ecc-uncorrected on GPU 1, {uuids[1]}",
        "          read   2 uncorrected memory errors since the driver was loaded",
        "          limit  at most 0 (NVIDIA Health Validation)",
        "          do     reset_gpu: stop what runs on the GPU, then `nvidia-smi "
        "--gpu-reset -i 1` as root",
    ]
    assert lines[11].startswith("WARN      persistence on GPU 0")
    assert "not supported by this hardware or driver: retired-pages (GPU 0 1)" in lines
    assert (
        "limits overridden: memory_mib_per_process 1 (default 2048), disk_mib 1 (default 2048)"
        in lines
    )
    assert lines[-1] == "CLOSED, CRITICAL: 2 GPUs; ecc-uncorrected (GPU 1)"


def test_the_json_matches_its_schema(library: Path, forked: Trainbox) -> None:
    schema = json.loads((ROOT / "docs/reference/health.schema.json").read_text())
    for case in (
        Case("", "", ""),
        Case("", "", "", keys={"ret.init": 999}),
        Case("", "", "", limits="disk_mib = 1"),
    ):
        verdict, _ = run_case(case, library, forked)
        assert mismatches(verdict, schema) == []
    verdict["findings"][0]["result"] = "GOOD"
    del verdict["open"]
    assert mismatches(verdict, schema) == [
        "$: no open",
        "$.findings[0].result: GOOD is not in the enum",
    ]


def mismatches(value: Any, schema: dict[str, Any], path: str = "$") -> list[str]:
    """Return the differences between `value` and the schema.

    Only the keywords of JSON Schema that docs/reference/health.schema.json uses are checked.
    """
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kinds |= {"null": type(None), "number": float}
    names = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    if names and not isinstance(value, tuple(kinds[name] for name in names)):
        return [f"{path}: {value!r} is not {names}"]
    found = []
    if value not in schema.get("enum", [value]):
        found.append(f"{path}: {value} is not in the enum")
    if value != schema.get("const", value):
        found.append(f"{path}: {value} is not {schema['const']}")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        found += [f"{path}: no {name}" for name in schema.get("required", []) if name not in value]
        if schema.get("additionalProperties") is False:
            found += [f"{path}: {name} is unknown" for name in value if name not in known]
        for name, part in value.items():
            found += mismatches(part, known.get(name, {}), f"{path}.{name}")
    if isinstance(value, list):
        for number, item in enumerate(value):
            found += mismatches(item, schema.get("items", {}), f"{path}[{number}]")
    return found


# fmt: off
_WRONG_USE = [
    (["--deep", "--deadline-s", "0"], "", "'--deadline-s'"),
    (["--gate", "--require", "deep-matmul"], "",
     "--require deep-matmul: no such check 'deep-matmul': use some of driver, count"),
    (["--health-limits", "none.toml"], "",
     "--health-limits none.toml cannot be read (No such file or directory): give a TOML"),
    (["--health-limits", "/dev/zero"], "",
     "--health-limits /dev/zero cannot be read (not a file): give a TOML"),
    (["--health-limits", "limits.toml"], "rows = 3",
     "unknown limit 'rows': use one of ecc_uncorrected, remapped_rows"),
    (["--health-limits", "limits.toml"], 'remapped_rows = "3"',
     "remapped_rows = '3' is not a number from 0 to 1e+15: set it as in remapped_rows = 512"),
    (["--health-limits", "limits.toml"], "memory_mib_per_process = 1e300",
     "memory_mib_per_process = 1e+300 is not a number from 0 to 1e+15: set it as in"),
    (["--health-limits", "limits.toml"], 'remap_pending = "PASS"',
     'remap_pending = \'PASS\' is not a result: set it to "WARN" or "CRITICAL"'),
    (["--monitor", "--listen", "9400"], "", "--listen 9400 is not HOST:PORT"),
    (["--monitor", "--listen", "192.0.2.1:0"], "",
     "--listen 192.0.2.1:0 cannot be used (Cannot assign requested address)"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "limits", "text"), _WRONG_USE)
def test_wrong_use_exits_with_code_2(
    forked: Trainbox, library: Path, tmp_path: Path, arguments: list[str], limits: str, text: str
) -> None:
    (tmp_path / "limits.toml").write_text(limits)
    ended = health(forked, library, put(tmp_path, "h100"), *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert text in ended.err and len(ended.err.splitlines()) == 1


def test_a_liveness_probe_ignores_limits_of_the_environment(
    forked: Trainbox, library: Path, tmp_path: Path
) -> None:
    """A mistake in HEALTH_LIMITS must not end a pod whose training works."""
    config = put(tmp_path, "h100")
    assert health(forked, library, config, "--live", HEALTH_LIMITS="none.toml").code == 0
    assert health(forked, library, config, "--gate", HEALTH_LIMITS="none.toml").code == 2


@pytest.mark.parametrize("seen", ["/dev/nvidia0 exists", "1 NVIDIA GPU(s) have no driver", ""])
@pytest.mark.parametrize(
    ("mode", "more", "closes"),
    [
        (Mode.GATE, {}, True),
        (Mode.CHECK, {}, True),
        (Mode.GATE, {"gpus": 0}, False),  # not queried
        (Mode.LIVE, {}, False),  # such as of a training on CPUs
    ],
)
def test_a_machine_with_gpus_whose_driver_did_not_load_is_closed(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, more: dict[str, Any], closes: bool, seen: str
) -> None:
    monkeypatch.setattr(check, "unusable_gpus", lambda _: seen)
    verdict = check.ask(lambda: Detection(absent="no NVIDIA driver here"), Question(mode, **more))
    assert isinstance(verdict, Verdict)
    closes = closes and bool(seen)
    assert verdict.exit_code == int(closes), verdict.findings
    lines = screen(verdict).splitlines()
    assert lines[-1].startswith("CLOSED, CRITICAL: 0 GPUs; driver" if closes else "OPEN")
    assert (f"          read   no NVIDIA driver here, but {seen}" in lines) == closes


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 3),
        ({"SLURM_JOB_ID": "3", "SLURM_GPUS_ON_NODE": "2"}, 3),
        ({"SLURM_JOB_ID": "3", "SLURM_JOB_GPUS": "0"}, 3),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-8f3a"}, 3),
        ({"GPUS": "2"}, 3),
        ({"NVIDIA_VISIBLE_DEVICES": "0", "GPUS": "0"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "DEVICE": "cpu"}, 0),
        ({"SLURM_JOB_ID": "3", "SLURM_GPUS_ON_NODE": "2", "TRAINBOX_DEVICE": "cpu"}, 0),
        ({"SLURM_JOB_ID": "3", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"SLURM_JOB_ID": "3", "SLURM_GPUS": "2"}, 0),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 0),
        ({}, 0),
    ],
)
def test_the_gate_is_closed_where_a_training_has_too_few_gpus(
    forked: Trainbox, library: Path, tmp_path: Path, env: dict[str, str], code: int
) -> None:
    absent = put(tmp_path, "h100", {"ret.init": 9})
    gate = health(forked, library, absent, "--gate", **env)
    assert gate.code == (1 if code else 0), gate.out
    if code:
        assert gate.out.splitlines()[-1] == (
            "CLOSED, CRITICAL: 0 GPUs; driver (node), count (node)"
        )
    planned = health(forked, library, absent, "digits", verb="plan", **env)
    assert planned.code == code, planned.err
    if "GPUS" not in env:
        assert health(forked, library, absent, "--live", **env).code == 0


def test_fewer_gpus_than_allocated_close_the_gate(
    forked: Trainbox, library: Path, tmp_path: Path
) -> None:
    config = put(tmp_path, "h100")
    job = {"SLURM_JOB_ID": "3"}
    for number, given, code in (("1", [], 0), ("9", [], 1), ("9", ["--gpus", "all"], 1)):
        gate = health(forked, library, config, "--gate", *given, **job, SLURM_GPUS_ON_NODE=number)
        assert gate.code == code, gate.out
        assert ("limit  SLURM_GPUS_ON_NODE=9 (you)" in gate.out) is bool(code)
    job["SLURM_GPUS_ON_NODE"] = "9"
    assert health(forked, library, config, "--gate", "--gpus", "1", **job).code == 0


def test_a_required_driver_closes_a_machine_without_gpus(
    forked: Trainbox, library: Path, tmp_path: Path
) -> None:
    """As the prolog of docs/guides/slurm.md does it, also where no sign of a GPU is left."""
    unloaded = put(tmp_path, "h100", {"ret.init": 9})
    ended = health(forked, library, unloaded, "--gate", "--require", "driver")
    last = ended.out.splitlines()[-1]
    assert (ended.code, last) == (1, "CLOSED, CRITICAL: 0 GPUs; driver (node)")
    assert "PASS" not in ended.out


def test_health_0_passes_the_gate_and_the_liveness_probe_without_the_driver(
    forked: Trainbox, library: Path, tmp_path: Path
) -> None:
    broken = put(tmp_path, "h100", {"gpu0.ret": 15, "hang.init": 1})
    for mode in ("--gate", "--live"):
        ended = health(forked, library, broken, mode, HEALTH="0", HEALTH_LIMITS="none.toml")
        assert ended.code == 0
        assert "read   not checked: HEALTH=0" in ended.out and "OPEN, INFO" in ended.out
    judged = health(forked, library, put(tmp_path, "h100", {"gpu0.ret": 15}), HEALTH="0")
    assert judged.code == 1, "`trainbox health` alone checks this machine"
    refused = health(forked, library, broken, "--no-health")
    assert (refused.code, "--no-health): drop them" in refused.err) == (2, True)


# A driver that hangs.


@pytest.mark.waits
@pytest.mark.parametrize(
    ("words", "env", "code", "waited_s"),
    [
        ("health --gate", {}, 1, 10),
        ("health --live", {"TRAINBOX_DRIVER_DEADLINE_S": "1"}, 1, 1),
        ("train --gpus 1", {"TRAINBOX_DRIVER_DEADLINE_S": "1"}, 3, 1),
    ],
)
def test_a_driver_that_hangs_is_given_up(
    forked: Trainbox, library: Path, tmp_path: Path, words: str, env: Any, code: int, waited_s: int
) -> None:
    config = put(tmp_path, "h100", {"hang.init": 1})
    verb, *arguments = words.split()
    ended = health(forked, library, config, *arguments, verb=verb, **env)
    answer = f"the NVIDIA driver does not answer: waited {waited_s} s"
    assert (ended.code, answer in ended.out + ended.err) == (code, True)
    wait_until_none(str(config))


@pytest.mark.waits
def test_a_reading_that_hangs_is_left_out(forked: Trainbox, library: Path, tmp_path: Path) -> None:
    faults = {"gpu1.hang.temperature": 1, "gpu1.ecc.volatile.uncorrected": 1}
    config = put(tmp_path, "h100", faults, count=2)
    ended = health(forked, library, config, "--gate", "--json", TRAINBOX_DRIVER_DEADLINE_S="10")
    verdict = json.loads(ended.out)
    assert {check: result_of(verdict, check) for check in ("driver", "ecc-uncorrected")} == {
        "driver": PASS,
        "ecc-uncorrected": CRITICAL,
    }
    assert {f["read"] for f in verdict["findings"] if f["check"] == "temperature"} == {
        "left out: an earlier call crashed or hung"
    }
    wait_until_none(str(config))


@pytest.mark.waits
def test_a_driver_whose_readings_all_hang_is_given_up(
    forked: Trainbox, library: Path, tmp_path: Path
) -> None:
    readings = ("field", "ecc", "remapped_rows", "temperature", "clocks_event_reasons", "nvlink")
    config = put(tmp_path, "h100", {f"gpu1.hang.{name}": 1 for name in readings}, count=2)
    ended = health(forked, library, config, "--gate", "--json", TRAINBOX_DRIVER_DEADLINE_S="0.5")
    assert ended.code == 1
    (driver,) = [f for f in json.loads(ended.out)["findings"] if f["check"] == "driver"]
    # Two readings are left out, and then the whole driver is to blame.
    assert driver["result"] == CRITICAL
    assert "does not answer" in driver["read"]
    wait_until_none(str(config))


@pytest.mark.waits
def test_probes_of_a_driver_that_hangs_do_not_pile_up(
    trainbox: Trainbox, library: Path, tmp_path: Path
) -> None:
    """While the process of an earlier probe holds the lock, a second probe sends no query."""
    config = put(tmp_path, "h100", {"hang.init": 1})
    first = trainbox.start("health", "--live", env=on_stub(library, config))
    wait_until(lambda: len(started_with(str(config))) == 2, first)
    second = trainbox.start("health", "--live", env=on_stub(library, config))
    # The second probe waits for the lock and has no process that queries the driver.
    wait_until(lambda: len(started_with(str(config))) == 3, first)
    ended = finish(second)
    assert ended.code == 1
    assert "does not answer: " in ended.out
    finish(first)
    wait_until_none(str(config))


# Liveness.


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"gpu1.ecc.volatile.uncorrected": 5}, 0),
        ({"gpu1.field.230": 3}, 0),
        ({"gpu1.ret": 999}, 0),
        ({"gpu1.field.230": 2}, 1),
        ({"gpu1.ret": 15}, 1),
        ({"ret.count": 999}, 1),
    ],
    ids=str,
)
def test_a_liveness_probe_passes_despite_a_warning(
    forked: Trainbox, library: Path, tmp_path: Path, keys: dict[str, object], code: int
) -> None:
    ended = health(forked, library, put(tmp_path, "h100", keys, count=2), "--live", "--gpus", "2")
    assert ended.code == code, ended.out


# The monitor.


class Monitor:
    """A running `trainbox health --monitor` that samples ten times a second."""

    def __init__(self, trainbox: Trainbox, library: Path, config: Path, *arguments: str) -> None:
        fast = ("--listen", "127.0.0.1:0", "--interval-s", "0.1", "--processes", "1")
        self.process = trainbox.start(
            "health", "--monitor", *fast, *arguments, env=on_stub(library, config)
        )
        self.address = re.search(r"http://\S+?:\d+", self.next_line("http://"))[0]  # type: ignore[index]

    def next_line(self, text: str) -> str:
        """Return the next line with `text`."""
        assert self.process.stdout
        for line in self.process.stdout:
            if text in line:
                return line
        pytest.fail(f"the monitor ended before it printed {text!r}")

    def get(self, path: str) -> tuple[int, str]:
        try:
            # plain HTTP to our own server
            with urllib.request.urlopen(f"{self.address}{path}", timeout=60) as answer:  # noqa: S310
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def wait_for(self, status: int) -> str:
        """Wait until /healthz answers with `status`; return the text."""
        deadline_s = time.monotonic() + 120
        while (answer := self.get("/healthz"))[0] != status or "no examination" in answer[1]:
            assert time.monotonic() < deadline_s, answer
            time.sleep(0.02)
        return answer[1]

    def metric(self, name: str) -> str:
        (line,) = (
            line for line in self.get("/metrics")[1].splitlines() if line.startswith(f"{name} ")
        )
        return line.rpartition(" ")[2]


@pytest.fixture
def monitor(trainbox: Trainbox, library: Path, tmp_path: Path) -> Iterator[Callable[..., Monitor]]:
    yield lambda keys, *arguments: Monitor(
        trainbox, library, put(tmp_path, "h100", keys, count=2), *arguments
    )


def check_metric(check: str, gpu: int) -> str:
    return f'trainbox_health_check{{check="{check}",{labels(gpu)}}}'


def labels(gpu: int) -> str:
    uuid = f"GPU-00000000-0000-0000-0000-00000000000{gpu}"
    return f'gpu="{gpu}",name="NVIDIA H100 80GB HBM3",uuid="{uuid}"'


def test_the_monitor_closes_and_opens(monitor: Callable[..., Monitor], tmp_path: Path) -> None:
    watching = monitor({})
    assert watching.wait_for(200) == "OPEN, PASS: 2 GPUs\n"
    assert watching.metric("trainbox_health_open") == "1.0"
    assert watching.metric(check_metric("ecc-uncorrected", 1)) == "0.0"
    assert watching.metric(check_metric("retired-pages", 1)) == "-1.0"
    assert watching.metric(f"trainbox_gpu_power_watts{{{labels(1)}}}") == "71.0"
    assert watching.metric(f"trainbox_gpu_sm_clock_hertz{{{labels(1)}}}") == "3.45e+08"
    put(tmp_path, "h100", {"gpu1.ecc.volatile.uncorrected": 3}, count=2)
    assert watching.wait_for(503) == "CLOSED, CRITICAL: 2 GPUs; ecc-uncorrected (GPU 1)\n"
    assert "3 uncorrected memory errors" in watching.next_line("GPU 1")
    assert watching.metric("trainbox_health_open") == "0.0"
    assert watching.metric(check_metric("ecc-uncorrected", 1)) == "4.0"
    put(tmp_path, "h100", {"gpu1.persistence_mode": 0, "gpu0.ret.ecc": 999}, count=2)
    assert (
        watching.wait_for(200)
        == "OPEN, UNKNOWN: 2 GPUs; ecc-uncorrected (GPU 0), persistence (GPU 1)\n"
    )
    assert watching.get("/")[0] == 404
    watching.process.send_signal(signal.SIGTERM)
    assert finish(watching.process).code == 0


def test_the_monitor_remembers_an_xid(monitor: Callable[..., Monitor], tmp_path: Path) -> None:
    watching = monitor({"gpu1.xid": 79})
    assert watching.wait_for(200) == "OPEN, PASS: 2 GPUs\n", "an older Xid must not count"
    seen = "79"
    expected = {31: "WARN", 7777: "WARN", 149: "WARN", 109: "CRITICAL", 79: "CRITICAL"}
    for xid, result in expected.items():
        seen += f",43,{xid}"  # 43 is INFO, which is not printed
        put(tmp_path, "h100", {"gpu1.xid": seen}, count=2)
        assert f"xid {result}: Xid {xid}:" in watching.next_line("Xid")
        if xid == 149:
            assert watching.wait_for(200) == "OPEN, WARN: 2 GPUs; xid (GPU 1)\n"
    put(tmp_path, "h100", count=2)
    assert watching.wait_for(503).startswith("CLOSED, CRITICAL: 2 GPUs; xid (GPU 1")
    assert watching.metric(f"trainbox_gpu_xids_total{{{labels(1)}}}") == "10.0"
    assert watching.metric(f"trainbox_gpu_last_xid{{{labels(1)}}}") == "79.0"


def test_the_monitor_judges_the_rate_of_a_counter(
    monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    key, count = "gpu1.nvlink3.crc_flit", 10**6
    watching = monitor({key: count})
    watching.wait_for(200)
    deadline_s = time.monotonic() + 120
    while watching.metric(check_metric("nvlink-crc", 1)) != "4.0":
        assert time.monotonic() < deadline_s
        count += 5000
        put(tmp_path, "h100", {key: count}, count=2)
    watching.wait_for(503)


def test_a_warning_stays_until_its_check_has_passed_for_a_minute() -> None:
    warned: Warned = {}
    at = {0: WARN, 5: PASS, 10: WARN, 60: PASS, 70: PASS, 75: WARN, 80: CRITICAL, 85: PASS}
    steadied = {}
    for now_s, result in at.items():
        found = Finding("memory", Result(result), f"at {now_s} s")
        (finding,) = steady([found], warned, now_s)
        steadied[now_s] = finding.read
    assert [now_s for now_s, read in steadied.items() if read != f"at {now_s} s"] == [5, 60]
    assert (steadied[5], steadied[60]) == ("at 0 s", "at 10 s")


def test_the_monitor_logs_a_warning_once(monitor: Callable[..., Monitor], tmp_path: Path) -> None:
    watching = monitor({"gpu1.temperature": 87})
    watching.next_line("temperature WARN: 87")
    watching.next_line("OPEN, WARN")
    put(tmp_path, "h100", {"gpu1.temperature": 88}, count=2)
    while "88" not in watching.get("/metrics")[1]:
        time.sleep(0.02)
    put(tmp_path, "h100", {"gpu1.temperature": 89}, count=2)
    assert "CRITICAL: 89" in watching.next_line("GPU 1")


def test_a_driver_that_hangs_and_recovers(monitor: Callable[..., Monitor], tmp_path: Path) -> None:
    watching = monitor({})
    watching.wait_for(200)
    config = put(tmp_path, "h100", {"hang": 1}, count=2)
    assert "driver (node)" in watching.wait_for(503)
    # Only the monitor and one process that asks the driver: the killed one needs time to end.
    wait_until(lambda: len(started_with(str(config))) == 2, watching.process)
    put(tmp_path, "h100", count=2)
    assert watching.wait_for(200) == "OPEN, PASS: 2 GPUs\n"


def test_the_monitor_waits_for_a_missing_gpu(
    monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    watching = monitor({}, "--gpus", "3")
    assert watching.wait_for(503) == "CLOSED, CRITICAL: 2 GPUs; count (node)\n"
    put(tmp_path, "h100", count=3)
    assert watching.wait_for(200) == "OPEN, PASS: 3 GPUs\n"


def test_no_limits_are_read_from_the_file_that_compose_mounts_by_default() -> None:
    assert read_limits(Path(os.devnull)) == Limits()


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("slowdown_samples = 11", "never be reached: set it to a number from 1 to 10"),
        ("slowdown_samples = 0", "always be reached: set it to a number from 1 to 10"),
        ("retired_pages = 65", "never be reached: set it to a number from 1 to 64"),
        ("remapped_rows = 513", "never be reached: set it to a number from 1 to 512"),
        ("nvlink_errors = 0", "always be reached: set it to a number from 1 to 1e+09"),
        ("deep_slowest_of_median = 80", "always be reached: set it to a number from 0 to 1"),
    ],
)
def test_a_limit_that_turns_its_rule_off_or_always_on_is_refused(
    tmp_path: Path, line: str, wrong: str
) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(line)
    with pytest.raises(WrongUse) as refused:
        read_limits(file)
    assert str(refused.value) == f"--health-limits {file}: {line} would {wrong}"
    for usual in ("slowdown_samples = 10", "retired_pages = 64", "deep_slowest_of_median = 0"):
        file.write_text(usual)
        read_limits(file)


@pytest.mark.parametrize(("minutes", "code"), [(1, 0), (-600, 1), (30, 1), (61, 1)])
def test_a_training_that_makes_steps_lives_with_a_driver_that_hangs(
    forked: Trainbox, library: Path, tmp_path: Path, minutes: float, code: int
) -> None:
    """A later heartbeat, here by 600 minutes, is of another boot."""
    alive = forked.folder / "alive"
    alive.write_text(f"{time.monotonic() - 60 * minutes:.0f}\n")
    os.utime(alive, (time.time() + 60 * 600,) * 2)  # somebody has set the clock since
    config = put(tmp_path, "h100", {"hang": 1}, count=2)
    more = {"TRAINBOX_HEARTBEAT": str(alive), "TRAINBOX_DRIVER_DEADLINE_S": "0.5"}
    ended = health(forked, library, config, "--live", **more)
    assert ended.code == code, ended.out
    assert ("the last step was" in ended.out) == (minutes in (1, 61))
