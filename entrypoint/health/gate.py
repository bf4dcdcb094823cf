"""Check the health of GPUs before a training, and watch them during the training."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from entrypoint.driver.process import Driver
from entrypoint.health.check import Question, examine
from entrypoint.health.limits import read_limits
from entrypoint.health.rules.gpus import Selection
from entrypoint.health.screen import closing_line
from entrypoint.health.verdict import Mode
from entrypoint.health.watch import Telemetry, Watch
from entrypoint.launch.plan import LaunchPlan
from entrypoint.system.commands import command_of
from trainbox.contract.errors import DeviceMissing
from trainbox.contract.hints import command
from trainbox.contract.streams import say
from trainbox.contract.temporary import temporary_folder

_FINDINGS_SHOWN = 3


@contextmanager
def watched(
    plan: LaunchPlan,
    driver: Driver,
    limits_file: Path | None,
    telemetry: Telemetry | None = None,
) -> Iterator[Watch]:
    """Examine the plan's GPUs, print the verdict, and yield a watch over them.

    With `telemetry`, the watch writes its events itself, and the verdict goes to standard error,
    because standard output belongs to the script.

    A finding never ends a sweep, which repeats a trial that failed on a broken GPU on another GPU.

    Raises:
        DeviceMissing: A finding closes the gate.
    """
    # Examine the GPUs once.
    limits, overridden = read_limits(limits_file)
    per_gpu = max(1, plan.nproc_per_node // len(plan.gpus))
    question = Question(
        Mode.GATE,
        selection=Selection(plan.gpus, per_gpu=per_gpu),
        limits=limits,
        overridden=overridden,
        processes=plan.nproc_per_node,
        runs_dir=None,  # the trainer checks the folder that it writes to
        one_node=plan.nnodes == 1,
    )
    begin_s = time.monotonic()
    verdict = examine(driver, question)
    if closing := verdict.closing:
        shown = [finding.line for finding in closing[:_FINDINGS_SHOWN]]
        if more := len(closing) - len(shown):
            shown.append(f"and {more} more")
        raise DeviceMissing(
            f"the health gate is closed. {'; '.join(shown)} (`{command('health')}` lists all "
            "findings; HEALTH=0 trains nevertheless)"
        )
    line = f"health     {closing_line(verdict)}, {time.monotonic() - begin_s:.2f} s"
    say(line, sys.stderr if telemetry else sys.stdout)
    # Watch the GPUs during the body.
    known = {(finding.check, finding.gpu or ""): finding.result for finding in verdict.findings}
    listener = Driver()
    with ExitStack() as stack:
        stack.callback(listener.close)  # a restarted script gets another one
        events = telemetry.metrics if telemetry else None
        if events is None:
            events = stack.enter_context(temporary_folder("health-")) / "events.jsonl"
        ends_a_run = plan.strategy != "sweep"
        yield Watch(driver, listener, plan.gpus, limits, events, known, ends_a_run, telemetry)
        if not telemetry and events.exists():
            # A killed or crashed trainer did not write these events to the run. Only code of the
            # trainer writes there, so it runs in a process of its own.
            subprocess.run(command_of("trainer.run.gpu_events", str(events)), check=False)
