"""Run `trainbox train` with the GPUs of the NVML stub, and compute on the CPU.

The command is `python watched.py BUDGET_S ARGUMENTS`. BUDGET_S is the time to save and stop. The
detection, the plan, the gate, the watch, torchrun and the trainer are the real ones.
"""

import dataclasses
import functools
import sys
from typing import Any

from entrypoint.cli import launching, planning
from entrypoint.cli.commands import main
from entrypoint.launch.plan import LaunchPlan
from entrypoint.launch.supervise import supervise
from trainbox.processes.environment import launch_facts

plan_launch = planning.plan_launch


def on_the_cpu(*words: Any) -> LaunchPlan:
    plan = plan_launch(*words)
    facts = dataclasses.replace(launch_facts(plan.env), device="cpu")
    return dataclasses.replace(plan, env=plan.env | facts.variable())


planning.plan_launch = on_the_cpu
launching.supervise = functools.partial(supervise, stop_budget_s=float(sys.argv.pop(1)))
main()
