"""The groups of Xids, by NVIDIA's catalogue."""

import re
from pathlib import Path

import pytest

from entrypoint.driver.gpus import Gpu, Sample, Unread
from entrypoint.health import xids
from entrypoint.health.limits import Limits
from entrypoint.health.rules.gpus import Selection, judge_gpus
from entrypoint.health.xids import xid_result

ROOT = Path(__file__).parents[3]
GROUPS = (xids.RESET, xids.REBOOT, xids.LINK, xids.PROGRAM, xids.INSPECT, xids.NOTE)


@pytest.mark.parametrize(
    ("xid", "result", "action"),
    [
        (48, "CRITICAL", "reset_gpu"),
        (79, "CRITICAL", "reboot"),
        (31, "WARN", "restart_app"),
        (54, "WARN", "inspect"),
        (43, "INFO", ""),
        (7777, "WARN", "inspect"),
    ],
)
def test_the_result_of_an_xid(xid: int, result: str, action: str) -> None:
    found, _, advised = xid_result(xid)
    assert (found, advised) == (result, action)


def test_an_xid_is_in_one_group() -> None:
    numbers = [xid for group in GROUPS for xid in group]
    assert len(numbers) == len(set(numbers))


def test_an_error_of_nvlink_5_is_a_warning_unless_a_link_is_known_to_be_down() -> None:
    assert xid_result(149, links_down=True)[::2] == ("CRITICAL", "reset_gpu")
    readings = {"handle": 0, "events": 0, "nvlink_active": Unread(999, "Unknown Error")}
    sample = Sample(0.0, {"GPU-0": readings}, xids=(("GPU-0", 149),))
    gpu = Gpu(0, "GPU-0", "B200", 183359)
    _, finding = judge_gpus([sample], Selection((gpu,)), (), Limits())
    assert (finding.check, finding.result, finding.action) == ("xid", "WARN", "inspect")


def test_the_page_lists_each_xid() -> None:
    page = (ROOT / "docs/guides/health.md").read_text()
    rows = re.findall(r"^\| ([0-9][0-9 to]*) \| ([A-Z][A-Za-z ]*) \| ", page, re.MULTILINE)
    listed = {
        xid: result
        for numbers, result in rows
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", numbers)
        for xid in range(int(first), int(last or first) + 1)
    }
    results = {xid: str(xid_result(xid)[0]) for group in GROUPS for xid in group}
    assert listed == results | dict.fromkeys(xids.LINK, "CRITICAL or WARN")
