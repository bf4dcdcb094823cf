"""What the trainer needs of the launch plan, in one variable of its environment."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from trainbox.contract.internal import Internal


@dataclass(frozen=True)
class LaunchFacts:
    """What the launch plan has decided. The defaults are for a trainer without a plan.

    Attributes:
        reason: the plan in one line.
        settings: where the settings come from that are not on the command line, to be shown.
        config_file: the `name` and the `sha256` of the experiment's file.
        cpus: the number of CPUs of a training on this machine, or 0 if it is not known.
        slots: the name and the CUDA_VISIBLE_DEVICES of each slot of a sweep.
        trials_per_gpu: the number of trials that share the GPU of this one.
    """

    device: str = "auto"
    strategy: str = "single"
    reason: str = ""
    settings: str = ""
    config_file: Mapping[str, str] | None = None
    cpus: int = 0
    slots: tuple[tuple[str, str], ...] = ()
    trials_per_gpu: int = 1

    def variable(self) -> dict[str, str]:
        """Return the variable for the environment of the trainer."""
        decided = {
            name: value for name, value in vars(self).items() if value != getattr(LaunchFacts, name)
        }
        return {Internal.LAUNCH: json.dumps(decided)}


def launch_facts(env: Mapping[str, str]) -> LaunchFacts:
    """Return what the launch plan has decided for a process with the environment `env`."""
    return LaunchFacts(**json.loads(env.get(Internal.LAUNCH, "{}")))
