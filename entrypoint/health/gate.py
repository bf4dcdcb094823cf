"""Before a training and beside it: closed by a finding, or open with a watch."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from entrypoint.driver.process import Driver
from entrypoint.errors import HardwareUnfit
from entrypoint.health.check import Question, examine
from entrypoint.health.limits import read_limits
from entrypoint.health.rules import Asked
from entrypoint.health.screen import closing_line
from entrypoint.health.verdict import Mode
from entrypoint.health.watch import Watch
from entrypoint.launch.plan import LaunchPlan
from entrypoint.system.commands import command_of
from entrypoint.system.hints import command
from entrypoint.system.streams import say
from entrypoint.system.temporary import temporary_folder

_FINDINGS_TOLD = 3


@contextmanager
def watched(plan: LaunchPlan, driver: Driver, limits_file: Path | None) -> Iterator[Watch]:
    """Judge the plan's GPUs, say so in a line, and go on watching them.

    A sweep's trials that fail on a broken GPU are done again on another, so there nothing that is
    found ends it.

    Raises:
        HardwareUnfit: a finding closes the gate.
    """
    limits, overridden = read_limits(limits_file, "--health-limits")
    per_gpu = max(1, plan.nproc_per_node // len(plan.gpus))
    question = Question(
        Mode.GATE,
        Asked(plan.gpus, per_gpu=per_gpu),
        limits=limits,
        overridden=overridden,
        processes=plan.nproc_per_node,
        runs_dir=None,  # the trainer knows where it writes, and says what is wrong there
    )
    begin_s = time.monotonic()
    verdict = examine(driver, question)
    if closing := verdict.closing:
        told = "; ".join(finding.line for finding in closing[:_FINDINGS_TOLD])
        more = (
            f"; and {len(closing) - _FINDINGS_TOLD} more" if len(closing) > _FINDINGS_TOLD else ""
        )
        raise HardwareUnfit(
            f"the health gate is closed. {told}{more} (`{command('health')}` lists all "
            "findings; HEALTH=0 trains nevertheless)"
        )
    say(f"health     {closing_line(verdict)}, {time.monotonic() - begin_s:.2f} s", sys.stdout)
    known = {(finding.check, finding.gpu or ""): finding.result for finding in verdict.findings}
    with temporary_folder("health-") as folder:
        events = folder / "events.jsonl"
        yield Watch(
            driver, Driver(), plan.gpus, limits, events, known, ends_a_run=plan.strategy != "sweep"
        )
        if events.exists():
            # What the trainer could not take over any more, since it was killed or had crashed; it
            # alone writes to the run.
            subprocess.run(command_of("trainer.records.gpu_events", str(events)), check=False)
