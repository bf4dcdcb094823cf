"""The TRAINBOX_ names in the environment: a misspelt one is refused, as a misspelt option is."""

import difflib
import re
from collections.abc import Collection, Iterable

from trainer.errors import WrongUse
from trainer.system.hints import command

PREFIX = "TRAINBOX_"
# Not settings: what the launcher, the image, make and a deployment hand on.
HANDED_ON = frozenset(
    PREFIX + name
    for name in (
        *(
            "BUILD_INFO",
            "COMMAND",
            "CPUS",
            "DRIVER_DEADLINE_S",
            "FINISHED",
            "HEALTH_EVENTS",
            "HEARTBEAT",
            "IMAGE_DIGEST",
            "MESSAGES",
            "REASON",
        ),
        *("SETTINGS", "SLOTS", "STORE", "STRATEGY"),
    )
)
# Read without the prefix, by the launcher.
LAUNCH_NAMES = (
    *(
        "DEVICE",
        "GPUS",
        "GPU_IDS",
        "HEALTH",
        "HEALTH_LIMITS",
        "NNODES",
        "NODE_RANK",
        "PROCESSES",
        "RDZV_ENDPOINT",
        "RDZV_ID",
    ),
    *("RDZV_TIMEOUT_S", "STRATEGY", "TASK"),
)
# Kubernetes sets these for each Service, here of one called trainbox or trainbox-...
_OF_A_SERVICE = re.compile(
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$"
)


def check_names(names: Iterable[str], settings: Collection[str]) -> None:
    """Refuse a TRAINBOX_ name that is neither one of `settings` nor handed on.

    Raises:
        WrongUse: names the first one, and the nearest setting.
    """
    for name in sorted(names):
        if (
            name.startswith(PREFIX)
            and name not in settings
            and name not in HANDED_ON
            and not _OF_A_SERVICE.search(name)
        ):
            raise WrongUse(f"{name} is not a setting: {_remedy(name, settings)}")


def _remedy(name: str, settings: Collection[str]) -> str:
    if name.removeprefix(PREFIX) in LAUNCH_NAMES:
        return f"its name is {name.removeprefix(PREFIX)}"
    # Without the prefix, which would make all of them alike.
    known = {setting.removeprefix(PREFIX): setting for setting in settings}
    near = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), sorted(known), n=1)
    return (
        f"did you mean {known[near[0]]}?"
        if near
        else f"unset it; `{command('train', '--help')}` lists the settings"
    )
