"""`trainbox health` as a real process on the NVML stub: each rule red and green, each kind of GPU,
drivers that misbehave.
"""

import json
import os
import re
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from entrypoint.health.check import check_names
from entrypoint.health.xids import FATAL, NOTE, PROGRAM
from tests.support.commands import Ended, Trainbox, finish, wait_until
from tests.support.health_cases import (
    CASES,
    CRITICAL,
    NA,
    NEW_ENOUGH,
    PASS,
    PROFILES,
    UNKNOWN,
    WARN,
    Case,
    result_of,
    row,
    run_case,
)
from tests.support.nvml_stub.build import build_stub, stub_env, write_config

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("the NVML stub needs a C compiler: there is no cc on PATH")
    return build_stub(tmp_path_factory.mktemp("nvml"))


def put(folder: Path, profile: str, keys: dict[str, object] | None = None, **more: object) -> Path:
    return write_config(folder / "nvml.conf", profile, keys, **more)


def health(
    trainbox: Trainbox, library: Path, config: Path, *words: str, verb: str = "health", **env: str
) -> Ended:
    return trainbox(verb, *words, env=on_stub(library, config) | env)


def on_stub(library: Path, config: Path) -> dict[str, str]:
    """Its environment, and a place of its own for what probes leave there."""
    return stub_env(library.parent, config) | {"TMPDIR": str(config.parent)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule(case: Case, library: Path, tmp_path: Path) -> None:
    verdict, code = run_case(case, library.parent, tmp_path)
    assert (result_of(verdict, case.check), code) == (case.result, case.code), verdict["findings"]
    assert verdict["open"] == (code == 0)
    for finding in verdict["findings"]:
        if finding["check"] == case.check and finding["result"] in (WARN, UNKNOWN, CRITICAL):
            assert finding["read"], finding
            assert (finding["action"] and finding["advice"]) or "nothing to judge" in finding[
                "read"
            ], finding


def test_each_check_has_a_red_and_a_green_case() -> None:
    """Those that need several looks have theirs below."""
    several = {"xid", "pcie-replays", "nvlink-crc"}
    for check in set(check_names()) - several:
        results = {case.result for case in CASES if case.check == check}
        assert PASS in results and results & {WARN, CRITICAL}, check


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "health.md").read_text()
    missing = [line for case in CASES if (line := row(case, case.result, case.code)) not in page]
    assert missing == [], "python -m tests.support.health_cases makes it"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_healthy_machine_of_each_kind(library: Path, tmp_path: Path, profile: str) -> None:
    keys = NEW_ENOUGH if profile == "old-driver" else {}
    verdict, code = run_case(
        Case("", "", "", profile=profile, keys=keys, words=("--processes", "1")),
        library.parent,
        tmp_path,
    )
    results: dict[str, set[str]] = {}
    for finding in verdict["findings"]:
        results.setdefault(finding["result"], set()).add(finding["check"])
    assert code == 0
    assert results[NA] == PROFILES[profile]
    assert results.get(WARN, set()) == ({"persistence"} if profile == "geforce" else set())
    assert not results.keys() & {UNKNOWN, CRITICAL}


def test_an_old_driver_under_a_new_image_is_told(library: Path, tmp_path: Path) -> None:
    verdict, code = run_case(Case("", "", "", profile="old-driver"), library.parent, tmp_path)
    (finding,) = (f for f in verdict["findings"] if f["closes"])
    assert (code, finding["check"], finding["action"]) == (1, "cuda", "update_driver")
    assert re.fullmatch(
        r"this image is too new for this driver: driver 470.256.02 \(stub\) knows CUDA up "
        r"to 11.4, torch is built for 1\d\.\d+",
        finding["read"],
    )


def test_a_library_without_a_symbol_is_an_old_driver(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("the NVML stub needs a C compiler: there is no cc on PATH")
    absent = [
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetRemappedRows",
        "nvmlEventSetCreate",
        "nvmlDeviceGetMarginTemperature",
    ]
    old = build_stub(tmp_path / "old", without=absent)
    verdict, code = run_case(Case("", "", "", words=("--processes", "1")), old.parent, tmp_path)
    assert code == 0
    assert {
        c: result_of(verdict, c)
        for c in ("recovery-action", "row-remap", "temperature-margin", "ecc-uncorrected")
    } == {
        "recovery-action": NA,
        "row-remap": NA,
        "temperature-margin": NA,
        "ecc-uncorrected": PASS,
    }


# What people and programs see.


def test_the_screen(trainbox: Trainbox, library: Path, tmp_path: Path) -> None:
    config = put(
        tmp_path, "h100", {"gpu1.ecc.volatile.uncorrected": 2, "gpu0.persistence_mode": 0}, count=2
    )
    limits = tmp_path / "limits.toml"
    limits.write_text("disk_mib = 1\nmemory_mib_per_process = 1\n")
    ended = health(trainbox, library, config, "--gate", "--limits", str(limits), "--processes", "1")
    assert (ended.code, ended.err) == (1, "")
    lines = ended.out.splitlines()
    assert lines[0] == "NVIDIA driver 580.95.05 (stub)"
    assert (
        lines[1]
        == "This is the test stub of NVML and no driver: nothing here is about real hardware."
    )
    uuids = [f"GPU-00000000-0000-0000-0000-00000000000{gpu}" for gpu in (0, 1)]
    assert (
        lines[2]
        == f"GPU 0  WARN      NVIDIA H100 80GB HBM3, 81,559 MiB, 33 °C, 0 %, 71 W  {uuids[0]}"
    )
    assert (
        lines[3]
        == f"GPU 1  CRITICAL  NVIDIA H100 80GB HBM3, 81,559 MiB, 33 °C, 0 %, 71 W  {uuids[1]}"
    )
    assert lines[4].startswith("node   PASS      ")
    assert lines[6:10] == [
        f"CRITICAL  ecc-uncorrected on GPU 1, {uuids[1]}",
        "          read   2 uncorrected memory errors since the driver was loaded",
        "          limit  at most 0 (NVIDIA Health Validation)",
        "          do     reset_gpu: stop what runs on the GPU, then `nvidia-smi "
        "--gpu-reset -i 1` as root",
    ]
    assert lines[11].startswith("WARN      persistence on GPU 0")
    assert "not judged, since this hardware or driver has it not: retired-pages (GPU 0 1)" in lines
    assert (
        "limits overridden: disk_mib 1 (usually 2048), memory_mib_per_process 1 (usually 2048)"
        in lines
    )
    assert lines[-1] == "CLOSED, CRITICAL: 2 GPUs; ecc-uncorrected (GPU 1)"


def test_the_json_is_what_its_schema_says(library: Path, tmp_path: Path) -> None:
    schema = json.loads((ROOT / "docs" / "health.schema.json").read_text())
    for case in (
        Case("", "", ""),
        Case("", "", "", keys={"ret.init": 999}),
        Case("", "", "", limits="disk_mib = 1"),
    ):
        verdict, _ = run_case(case, library.parent, tmp_path)
        assert mismatches(verdict, schema) == []
    verdict["findings"][0]["result"] = "GOOD"
    del verdict["open"]
    assert mismatches(verdict, schema) == [
        "$: no open",
        "$.findings[0].result: GOOD is none of the enum",
    ]


def mismatches(value: Any, schema: dict[str, Any], place: str = "$") -> list[str]:
    """Where `value` is not what the schema says, for the few words of JSON Schema that ours
    uses.
    """
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "boolean": bool,
        "null": type(None),
        "number": float,
    }
    allowed = schema.get("type", [])
    names = [allowed] if isinstance(allowed, str) else allowed
    if names and not any(isinstance(value, kinds[name]) for name in names):
        return [f"{place}: {value!r} is no {allowed}"]
    found = (
        [f"{place}: {value} is none of the enum"]
        if "enum" in schema and value not in schema["enum"]
        else []
    )
    if "const" in schema and value != schema["const"]:
        found.append(f"{place}: {value} is not {schema['const']}")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        found += [f"{place}: no {name}" for name in schema.get("required", []) if name not in value]
        found += [
            f"{place}: {name} is unknown"
            for name in value
            if schema.get("additionalProperties") is False and name not in properties
        ]
        for name, part in value.items():
            found += mismatches(part, properties.get(name, {}), f"{place}.{name}")
    if isinstance(value, list):
        for number, item in enumerate(value):
            found += mismatches(item, schema.get("items", {}), f"{place}[{number}]")
    return found


@pytest.mark.parametrize(
    ("words", "limits", "text"),
    [
        (
            ["--require", "ecc"],
            "",
            "--require ecc: there is no check ecc; there are driver, count, handle",
        ),
        (
            ["--gate", "--require", "xid"],
            "",
            "--require xid: there is no check xid; there are driver, count, handle",
        ),
        (
            ["--live", "--require", "shm"],
            "",
            "--require shm: there is no check shm; there are driver, count, handle, "
            "recovery-action",
        ),
        (["--gpus", "two"], "", "'two' is neither a number of GPUs nor `all`"),
        (["--gpu-ids", "0,0"], "", "--gpu-ids=0,0 names GPU 0 twice"),
        (["--limits", "none.toml"], "", "--limits none.toml: No such file or directory"),
        (
            ["--limits", "limits.toml"],
            "rows = 3",
            "there is no limit rows; there are ecc_uncorrected, remapped_rows",
        ),
        (["--limits", "limits.toml"], "remapped_rows =", "--limits limits.toml: Invalid value"),
        (
            ["--limits", "limits.toml"],
            'remapped_rows = "3"',
            "remapped_rows is a number from 0 up (usually 512), not '3'",
        ),
        (
            ["--limits", "limits.toml"],
            'remap_pending = "PASS"',
            'remap_pending is "WARN" or "CRITICAL", not \'PASS\'',
        ),
        (["--monitor", "--listen", "9400"], "", "--listen 9400 is not HOST:PORT"),
        (
            ["--monitor", "--listen", "192.0.2.1:0"],
            "",
            "--listen 192.0.2.1:0: Cannot assign requested address",
        ),
    ],
)
def test_what_cannot_be_judged_is_exit_2(
    trainbox: Trainbox, library: Path, tmp_path: Path, words: list[str], limits: str, text: str
) -> None:
    (tmp_path / "limits.toml").write_text(limits)
    ended = health(trainbox, library, put(tmp_path, "h100"), *words)
    assert (ended.code, ended.out) == (2, "")
    assert text in ended.err and len(ended.err.splitlines()) == 1


# A driver that hangs.


def processes_of(config: Path) -> list[int]:
    """The processes that were started with this configuration of the stub, and live."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            state = (environ.parent / "stat").read_text().rpartition(")")[2].split()[0]
            if str(config).encode() in environ.read_bytes() and state != "Z":
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "words", [["health", "--gate"], ["health", "--live"], ["train", "--gpus", "1"]], ids=" ".join
)
def test_a_driver_that_hangs_is_given_up(
    trainbox: Trainbox, library: Path, tmp_path: Path, words: list[str]
) -> None:
    config = put(tmp_path, "h100", {"hang.init": 1})
    ended = health(trainbox, library, config, *words[1:], verb=words[0])
    told = ended.out if words[0] == "health" else ended.err
    assert "the NVIDIA driver does not answer: waited 10 s" in told
    assert ended.code == (1 if words[0] == "health" else 3)
    # a killed process takes its moment to die on a busy machine
    deadline_s = time.monotonic() + 120
    while processes_of(config):
        assert time.monotonic() < deadline_s, "the process that asked the driver lives on"
        time.sleep(0.05)


def test_probes_of_a_driver_that_hangs_do_not_pile_up(
    trainbox: Trainbox, library: Path, tmp_path: Path
) -> None:
    """The process of an earlier probe that cannot be ended, by one that is stopped and holds what
    it would hold.
    """
    config = put(tmp_path, "h100", {"hang.init": 1})
    first = trainbox.start("health", "--live", env=on_stub(library, config))
    wait_until(lambda: len(processes_of(config)) == 2, first)
    (asking,) = set(processes_of(config)) - {first.pid}
    second = trainbox.start("health", "--live", env=on_stub(library, config))
    # it waits, and asks the driver nothing
    wait_until(lambda: len(processes_of(config)) == 3, first)
    ended = finish(second)
    assert ended.code == 1
    assert "does not answer: " in ended.out
    finish(first)
    assert not Path(f"/proc/{asking}").exists()


# Liveness.


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({}, 0),
        ({"gpu1.ecc.volatile.uncorrected": 5}, 0),
        ({"gpu1.field.230": 3}, 0),
        ({"gpu1.ret.field": 999}, 0),
        ({"gpu1.ret": 999}, 0),
        ({"gpu1.field.230": 2}, 1),
        ({"gpu1.ret": 15}, 1),
        ({"ret.count": 999}, 1),
    ],
    ids=str,
)
def test_a_liveness_probe_ends_nothing_for_a_warning(
    trainbox: Trainbox, library: Path, tmp_path: Path, keys: dict[str, object], code: int
) -> None:
    ended = health(trainbox, library, put(tmp_path, "h100", keys, count=2), "--live", "--gpus", "2")
    assert ended.code == code, ended.out


# The monitor.


class Monitor:
    """`trainbox health --monitor`, looking ten times a second."""

    def __init__(self, trainbox: Trainbox, library: Path, config: Path, *words: str) -> None:
        fast = ("--listen", "127.0.0.1:0", "--interval-s", "0.1", "--processes", "1")
        self.process = trainbox.start(
            "health", "--monitor", *fast, *words, env=on_stub(library, config)
        )
        self.address = re.search(r"http://\S+?:\d+", self.said("http://"))[0]  # type: ignore[index]

    def said(self, text: str) -> str:
        """The next line with `text`."""
        assert self.process.stdout
        for line in self.process.stdout:
            if text in line:
                return line
        pytest.fail(f"it ended before it said {text!r}")

    def get(self, path: str) -> tuple[int, str]:
        try:
            # http, our own
            with urllib.request.urlopen(f"{self.address}{path}", timeout=60) as answer:  # noqa: S310
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def wait_for(self, status: int) -> str:
        """Until /healthz answers `status`; returns its text."""
        deadline_s = time.monotonic() + 120
        while (answer := self.get("/healthz"))[0] != status or "no look" in answer[1]:
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
    yield lambda keys, *words: Monitor(
        trainbox, library, put(tmp_path, "h100", keys, count=2), *words
    )


def check_metric(check: str, gpu: int) -> str:
    uuid = f"GPU-00000000-0000-0000-0000-00000000000{gpu}"
    return f'trainbox_health_check{{check="{check}",gpu="{gpu}",uuid="{uuid}"}}'


def test_the_monitor_closes_and_opens_with_what_it_sees(
    monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    watching = monitor({})
    assert watching.wait_for(200) == "OPEN, PASS: 2 GPUs\n"
    assert watching.metric("trainbox_health_open") == "1.0"
    assert watching.metric(check_metric("ecc-uncorrected", 1)) == "0.0"
    assert watching.metric(check_metric("retired-pages", 1)) == "-1.0"
    power = (
        'trainbox_gpu_power_watts{gpu="1",name="NVIDIA H100 80GB '
        'HBM3",uuid="GPU-00000000-0000-0000-0000-000000000001"}'
    )
    assert watching.metric(power) == "71.0"
    put(tmp_path, "h100", {"gpu1.ecc.volatile.uncorrected": 3}, count=2)
    assert watching.wait_for(503) == "CLOSED, CRITICAL: 2 GPUs; ecc-uncorrected (GPU 1)\n"
    assert "3 uncorrected memory errors" in watching.said("GPU 1")
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


def test_the_monitor_keeps_an_xid_in_mind(monitor: Callable[..., Monitor], tmp_path: Path) -> None:
    watching = monitor({"gpu1.xid": 79})
    assert watching.wait_for(200) == "OPEN, PASS: 2 GPUs\n", "what was before is no news"
    told: dict[int, str] = {}
    seen = "79"
    for xid in (*NOTE, *PROGRAM, 7777, *FATAL):
        seen += f",{xid}"
        put(tmp_path, "h100", {"gpu1.xid": seen}, count=2)
        if xid not in NOTE:
            told[xid] = watching.said(f"Xid {xid}:")
        if xid == 7777:
            assert watching.wait_for(200) == "OPEN, WARN: 2 GPUs; xid (GPU 1)\n"
    assert all("xid CRITICAL" in told[xid] for xid in FATAL)
    assert all("xid WARN" in told[xid] and "restart_app" in told[xid] for xid in PROGRAM)
    assert "xid WARN" in told[7777]
    put(tmp_path, "h100", count=2)
    assert watching.wait_for(503).startswith("CLOSED, CRITICAL: 2 GPUs; xid (GPU 1")


@pytest.mark.parametrize(
    ("check", "key", "step", "result", "status"),
    [
        ("nvlink-crc", "gpu1.nvlink3.crc_flit", 5, PASS, 200),
        ("nvlink-crc", "gpu1.nvlink3.crc_flit", 5000, CRITICAL, 503),
        ("pcie-replays", "gpu1.pcie.replays", 1, WARN, 200),
        ("nvlink-errors", "gpu1.nvlink3.replay", 1, CRITICAL, 503),
    ],
)
def test_rates_are_of_what_rises_while_it_looks(
    monitor: Callable[..., Monitor],
    tmp_path: Path,
    check: str,
    key: str,
    step: int,
    result: str,
    status: int,
) -> None:
    begin = 0 if check == "nvlink-errors" else 10**6
    watching = monitor({key: begin})
    watching.wait_for(200)
    level = {PASS: "0.0", WARN: "2.0", CRITICAL: "4.0"}[result]
    count, deadline_s = begin, time.monotonic() + 120
    while True:  # as the counter of a device rises, until the monitor has seen enough of it
        count += step
        put(tmp_path, "h100", {key: count}, count=2)
        age_s = float(watching.metric("trainbox_health_age_seconds"))
        if (
            count > begin + 4 * step
            and age_s < 0.1
            and watching.metric(check_metric(check, 1)) == level
        ):
            break
        assert time.monotonic() < deadline_s
    if status == 503:
        watching.wait_for(503)


def test_a_driver_that_hangs_and_comes_back(
    monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    watching = monitor({})
    watching.wait_for(200)
    config = put(tmp_path, "h100", {"hang": 1}, count=2)
    assert "driver (node)" in watching.wait_for(503)
    assert len(processes_of(config)) == 2, (
        "the monitor and the process that asks: it starts no other"
    )
    put(tmp_path, "h100", count=2)
    assert watching.wait_for(200) == "OPEN, PASS: 2 GPUs\n"


def test_the_monitor_ends_when_the_process_that_asks_has_died(
    monitor: Callable[..., Monitor], tmp_path: Path
) -> None:
    watching = monitor({})
    watching.wait_for(200)
    (asking,) = set(processes_of(tmp_path / "nvml.conf")) - {watching.process.pid}
    os.kill(asking, signal.SIGSEGV)
    assert "the monitor ends, to be started again" in watching.said("has died: ")
    assert finish(watching.process).code == 1


def test_a_missing_gpu_is_waited_for(monitor: Callable[..., Monitor], tmp_path: Path) -> None:
    watching = monitor({}, "--gpus", "3")
    assert watching.wait_for(503) == "CLOSED, CRITICAL: 2 GPUs; count (node)\n"
    put(tmp_path, "h100", count=3)
    assert watching.wait_for(200) == "OPEN, PASS: 3 GPUs\n"
