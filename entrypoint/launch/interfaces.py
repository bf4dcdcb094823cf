"""Refuse a network interface that this machine does not have, before gloo or NCCL fail with it."""

import socket
from collections.abc import Collection, Mapping

from trainbox.errors import WrongUse


def refuse_unknown_interface(env: Mapping[str, str], uses_nccl: bool) -> None:
    """Check the variables that name the interfaces of the ranks.

    Raises:
        WrongUse: gloo or NCCL would not find an interface.
    """
    finders = {"GLOO_SOCKET_IFNAME": _gloo_finds}
    if uses_nccl:
        finders["NCCL_SOCKET_IFNAME"] = _nccl_finds
    for name, finds in finders.items():
        found = [interface for _, interface in socket.if_nameindex()]
        if (given := env.get(name)) and not finds(given, found):
            raise WrongUse(
                f"{name}={given} is no interface of this machine: set one of {', '.join(found)}, "
                "or unset the variable"
            )


def _gloo_finds(given: str, found: Collection[str]) -> bool:
    """Return whether there is each of the names. gloo fails if one is missing."""
    return all(name in found for name in given.split(","))


def _nccl_finds(given: str, found: Collection[str]) -> bool:
    """Return whether NCCL finds one of the interfaces.

    It takes beginnings of names, whole names after `=`, and what it leaves out after `^`.
    """
    if given.startswith("^"):
        return True
    names = given.removeprefix("=").split(",")
    if given.startswith("="):
        return any(name in found for name in names)
    return any(interface.startswith(name) for name in names for interface in found)
