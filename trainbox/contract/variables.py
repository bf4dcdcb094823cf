"""The environment variables that set up a launch, as both packages know them."""

from collections.abc import Mapping

# Whether and how GPUs are checked.
HEALTH_NAMES = frozenset(("HEALTH", "HEALTH_LIMITS"))
# The launcher's settings, which have no prefix.
LAUNCH_NAMES = HEALTH_NAMES | {
    *("DEVICE", "GPUS", "GPU_IDS", "NNODES", "NODE_RANK", "PROCESSES", "STRATEGY", "TASK"),
    *("RDZV_ENDPOINT", "RDZV_ID", "RDZV_TIMEOUT_S"),
}
_OF_SCHEDULER = "SLURM_"
# The port of the store that a sweep offers to the script of a trial.
TRIAL_PORT = "TRAINBOX_TRIAL_PORT"


def without_launch(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a launch inside of this one, which has its own options.

    The nodes and tasks of a SLURM job are those of the outer launch.
    """
    return {
        name: value
        for name, value in env.items()
        if name not in LAUNCH_NAMES and not name.startswith(_OF_SCHEDULER)
    }
