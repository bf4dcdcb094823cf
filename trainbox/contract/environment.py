"""Refuse unknown TRAINBOX_ variables in the environment, as unknown options are refused."""

import re
from collections.abc import Collection, Iterable

from trainbox.contract.errors import WrongUse
from trainbox.contract.hints import command, nearest
from trainbox.contract.internal import Internal
from trainbox.contract.options import PREFIX
from trainbox.contract.variables import LAUNCH_NAMES

# Variables that Trainbox, the image, make, deployments and users set. They are not settings.
NOT_SETTINGS = frozenset(Internal) | {
    PREFIX + name
    for name in ("BUILD_INFO", "COMMAND", "DRIVER_DEADLINE_S", "HEARTBEAT", "IMAGE_DIGEST")
}
# Kubernetes sets these variables for a Service with the name trainbox or trainbox-...
_OF_A_SERVICE = re.compile(
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$"
)


def check_names(names: Iterable[str], settings: Collection[str]) -> None:
    """Check that each TRAINBOX_ name is one of `settings` or in NOT_SETTINGS.

    Raises:
        WrongUse: a name is unknown. The message suggests the nearest setting.
    """
    for name in unknown_names(names, settings):
        raise WrongUse(f"{name} is not a setting: {_remedy(name, settings)}")


def unknown_names(names: Iterable[str], settings: Collection[str]) -> list[str]:
    """Return the TRAINBOX_ names that are neither in `settings` nor in NOT_SETTINGS, sorted."""
    return sorted(
        name
        for name in names
        if name.startswith(PREFIX)
        and name not in settings
        and name not in NOT_SETTINGS
        and not _OF_A_SERVICE.search(name)
    )


def _remedy(name: str, settings: Collection[str]) -> str:
    if name.removeprefix(PREFIX) in LAUNCH_NAMES:
        return f"use {name.removeprefix(PREFIX)}"
    # Compare without the prefix, which would make all names similar.
    known = sorted(setting.removeprefix(PREFIX) for setting in settings)
    unset = f"unset it; `{command('train', '--help')}` lists the settings"
    return nearest(name.removeprefix(PREFIX).upper(), known, unset, prefix=PREFIX)
