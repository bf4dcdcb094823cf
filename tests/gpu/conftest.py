"""Run the checks in order, skip them without a GPU, and write what they found."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.check import Check, environment, limit_s
from tests.gpu.machine import device, no_gpu
from tests.gpu.rows import Row, as_json, as_markdown, budget_lines, check_name, rank, topic_of
from tests.support.paths import ROOT

_TIME_S = float(os.environ.get("GPU_TIME_S", "500"))  # of all checks and the import of torch
_IMPORT_S = 300  # for the first import of torch, which reads some GB from the disk
_OUT = Path(os.environ.get("OUT") or ROOT / "build/gpu").resolve()
_CHECK = pytest.StashKey[Check]()
_rows: list[Row] = []
_machine: dict[str, Any] = {}
_began_s = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "only the checks of this step of the first hour"
    parser.addoption("--step", type=int, choices=range(1, 8), help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    step = config.getoption("--step")
    chosen = [item for item in items if _is_of(_mark(item), step)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = sorted(chosen, key=lambda i: (_mark(i)["step"], rank(topic_of(i.path.stem))))


def _is_of(mark: dict[str, Any], step: int | None) -> bool:
    """Return whether a check is of `step`, or of the whole suite, which has no long checks."""
    return mark["step"] == step if step else not mark.get("long")


def pytest_report_collectionfinish(items: Sequence[pytest.Item]) -> list[str]:
    return budget_lines(
        [(topic_of(item.path.stem), check_name(item.name), _budget_s(item)) for item in items]
    )


def _mark(item: pytest.Item) -> dict[str, Any]:
    mark = item.get_closest_marker("gpu")
    assert mark is not None, (
        f"{item.name} needs @pytest.mark.gpu(step=..., seconds=..., settles=...)"
    )
    return dict(mark.kwargs)


def _budget_s(item: pytest.Item) -> float:
    return float(_mark(item)["seconds"])


@pytest.fixture(scope="session")
def _examined() -> None:
    """Find out what this machine has, or skip all checks.

    torch is imported here for the first time, so the budgets of the checks are for a later import.
    """
    if device() == "cuda" and (reason := no_gpu()):
        _machine["GPU"] = reason
        pytest.skip(reason)
    found = subprocess.run(
        [sys.executable, "-P", "-m", "tests.gpu.programs.facts", device()],
        env=environment(device(), os.environ),
        capture_output=True,
        text=True,
        timeout=_IMPORT_S,
    )
    if found.returncode:
        _machine["GPU"] = "torch cannot use it"
        pytest.fail(f"torch cannot use the GPU: {found.stderr[-3000:]}", pytrace=False)
    _machine.update(json.loads(found.stdout.splitlines()[-1]))


@pytest.fixture
def check(request: pytest.FixtureRequest, tmp_path: Path, _examined: None) -> Iterator[Check]:
    left_s = _TIME_S - (time.monotonic() - _began_s)
    if left_s <= 0:
        pytest.skip(f"the {_TIME_S:.0f} s of the suite are used up: select it with PYTEST_ARGS")
    seconds = min(limit_s(_budget_s(request.node), device()), left_s)
    running = Check(device(), tmp_path, time.monotonic() + seconds)
    request.node.stash[_CHECK] = running
    yield running
    running.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report: pytest.TestReport = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        running = item.stash.get(_CHECK, None)
        _rows.append(
            Row(
                topic_of(item.path.stem),
                check_name(item.name),
                report.outcome,
                round(call.duration, 1),
                _budget_s(item),
                _mark(item)["settles"],
                tuple(running.seen) if running else (),
                _reason(call),
                tuple(running.tables) if running else (),
            )
        )
        _write(_name(item.config))
    return report


def _reason(call: "pytest.CallInfo[None]") -> str:
    """Return the message of a skip or of a failure, or an empty string."""
    if call.excinfo is None:
        return ""
    error = call.excinfo.value
    return str(getattr(error, "msg", None) or error or type(error).__name__)[:4000]


def _name(config: pytest.Config) -> str:
    step = config.getoption("--step")
    return f"step-{step}" if step else "gpu"


def _write(name: str) -> None:
    _OUT.mkdir(parents=True, exist_ok=True)
    (_OUT / f"{name}.json").write_text(json.dumps(as_json(_machine, _rows), indent=1) + "\n")
    (_OUT / f"{name}.md").write_text("\n".join(as_markdown(_machine, _rows)) + "\n")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.section("checks on a GPU")
    for line in as_markdown(_machine, _rows):
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"\nwritten: {_OUT / _name(config)}.json and .md")
