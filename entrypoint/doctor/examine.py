"""`trainbox doctor`, which examines the driver, torch and the system for a report."""

import contextlib
import json
import os
import signal
import subprocess
import time
from datetime import UTC, datetime

from entrypoint.doctor.report import Examination, TorchAnswer, report
from entrypoint.doctor.surroundings import read_surroundings
from entrypoint.driver.gpus import Detection, Gpu
from entrypoint.driver.process import Driver, visible_to_cuda
from entrypoint.health.check import Question, ask, examine
from entrypoint.health.verdict import Finding, Result, Verdict
from trainbox.errors import Failure
from trainbox.processes.environment import user_environment
from trainbox.processes.process_tree import start_child
from trainbox.processes.programs import COLLECT_ENV, TORCH_INFO, Program, command_of
from trainbox.processes.streams import show_progress

# The wait for torch to start and to list the GPUs: usually 2 to 5 s, longer on a busy machine.
TORCH_DEADLINE_S = 120.0
_ENDING_S = 1.0


def examination_report(
    question: Question,
    torch_deadline_s: float = TORCH_DEADLINE_S,
) -> str:
    """Return the report on this machine. A broken driver or torch becomes part of the report."""
    begin_s = time.monotonic()
    asked, collecting = _start(TORCH_INFO), _start(COLLECT_ENV)
    driver, visible, verdict = _ask_driver(question)
    around, hidden = read_surroundings(os.environ)
    show_progress("waiting for torch ...")
    torch = _torch_answer(*_ended(asked, begin_s, torch_deadline_s))
    text, fault = _ended(collecting, begin_s, torch_deadline_s)
    show_progress()
    return report(
        Examination(
            taken_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            verdict=verdict,
            driver=driver,
            visible=visible,
            torch=torch,
            around=around,
            collected=text.splitlines() or [fault],
            env=user_environment(os.environ),
            hidden=hidden,
        )
    )


def _ask_driver(question: Question) -> tuple[Detection, tuple[Gpu, ...], Verdict]:
    """Return the driver's answer, the visible GPUs and the verdict."""
    driver = Driver()
    found = driver.detect()
    visible: tuple[Gpu, ...] = ()
    try:
        decided = ask(lambda: found, question)
        visible = visible_to_cuda(found) if found.gpus else ()
    except Failure as error:  # a wrong selection of GPUs must not stop the report
        finding = Finding("count", Result.CRITICAL, str(error), source="you")
        decided = Verdict(question.mode, (finding,))
    verdict = decided if isinstance(decided, Verdict) else examine(driver, decided)
    return found, visible, verdict


def _start(program: Program) -> subprocess.Popen[str]:
    return start_child(
        command_of(program),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _ended(process: subprocess.Popen[str], begin_s: float, deadline_s: float) -> tuple[str, str]:
    """Return the output of a process, and why it has none."""
    try:
        left_s = max(0.0, begin_s + deadline_s - time.monotonic())
        out, err = process.communicate(timeout=left_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that hangs in the driver cannot be killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
        return "", f"gave no answer within {deadline_s:g} s: check the driver and the disk"
    code, last = process.returncode, (err.strip().splitlines() or ["no output"])[-1]
    if code < 0:
        return "", f"was killed by signal {-code} ({signal.strsignal(-code)}): {last}"
    return out, f"exited with code {code} and no answer: {last}"


def _torch_answer(out: str, fault: str) -> TorchAnswer:
    try:
        return TorchAnswer(**json.loads(out.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        return TorchAnswer(fault=fault)
