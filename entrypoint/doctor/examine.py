"""`trainbox doctor`: ask the driver, torch and the system, and make one page of it."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from entrypoint.doctor.redaction import hidden_words
from entrypoint.doctor.report import DriverSays, Examination, TorchSays, report
from entrypoint.doctor.surroundings import read_surroundings
from entrypoint.driver.gpus import visible_gpus
from entrypoint.driver.process import Driver, NoAnswer
from entrypoint.errors import LaunchError
from entrypoint.health.check import Question, about, broken_driver, examine
from entrypoint.health.verdict import Finding, Result, Verdict
from entrypoint.system.commands import command_of
from entrypoint.system.processes import die_with_parent

TORCH_DEADLINE_S = 30.0  # of its start and its look at the GPUs; usually two to five seconds
_ENDING_S = 1.0


def examined(
    question: Question,
    gpus: int | str | None,
    gpu_ids: str | None,
    torch_deadline_s: float = TORCH_DEADLINE_S,
    on_wait: Callable[[], None] = lambda: None,
) -> str:
    """The report on this machine; it comes whatever is broken.

    `on_wait` is called before torch is waited for.
    """
    begin_s = time.monotonic()
    asked = _start_torch()
    driver, verdict = _ask_driver(question, gpus, gpu_ids)
    data_dir = Path(os.environ.get("TRAINBOX_DATA_DIR") or "data")
    around, identity = read_surroundings(question.runs_dir or Path("runs"), data_dir, os.environ)
    on_wait()
    torch = _answer(asked, torch_deadline_s - (time.monotonic() - begin_s), torch_deadline_s)
    hidden = hidden_words(identity.homes, identity.users, identity.hosts)
    taken_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return report(Examination(taken_at, verdict, driver, torch, around, os.environ, hidden))


def _ask_driver(
    question: Question, gpus: int | str | None, gpu_ids: str | None
) -> tuple[DriverSays, Verdict]:
    try:
        driver = Driver()
        found = driver.detect()
    except NoAnswer as error:
        return DriverSays("gives no answer", there=True), broken_driver(question, str(error))
    words = found.absent or (
        "does not work: see the verdict" if found.broken else f"version {found.driver_version}"
    )
    seen = DriverSays(words, not found.absent, found.gpus, found.gpus)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        seen = dataclasses.replace(seen, visible=visible_gpus(found.gpus, chosen))
        decided = about(found, question, chosen, gpus, gpu_ids, None)
    except LaunchError as error:  # GPUs are named that there are not: no reason to tell nothing
        return seen, Verdict(
            question.mode, (Finding("count", Result.CRITICAL, str(error), source="you"),)
        )
    return seen, decided if isinstance(decided, Verdict) else examine(driver, decided)


def _start_torch() -> subprocess.Popen[str]:
    return subprocess.Popen(
        command_of("trainer.checks.torch_info"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # there are no threads here
        preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
    )


def _answer(asked: subprocess.Popen[str], within_s: float, deadline_s: float) -> TorchSays:
    try:
        out, err = asked.communicate(timeout=max(0.0, within_s))
    except subprocess.TimeoutExpired:
        asked.kill()
        # one that hangs in the driver does not even die
        with contextlib.suppress(subprocess.TimeoutExpired):
            asked.wait(_ENDING_S)
        return TorchSays(
            fault=f"gave no answer within {deadline_s:g} s: it waits for the driver, or "
            "for a slow disk"
        )
    last = (err.strip().splitlines() or ["it said nothing"])[-1]
    if asked.returncode < 0:
        return TorchSays(
            fault=f"died of signal {-asked.returncode} "
            f"({signal.strsignal(-asked.returncode)}): {last}"
        )
    try:
        return TorchSays(**json.loads(out.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        return TorchSays(fault=f"ended with {asked.returncode} and no answer: {last}")
