"""Decide what a public report may show of an environment and of a text. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence

from trainbox.disclosure.secret_rule import LONGEST, NOT_SHOWN, without_secrets
from trainbox.disclosure.variables import SHOWN_VARIABLES
from trainbox.processes.streams import printable

_LONGEST = 240  # characters shown of a value; an image's NVIDIA_REQUIRE_CUDA has a thousand
# Other variables that may explain a problem. Only their names are shown.
_NAMED = re.compile(
    "(?:CUDA|NVIDIA|NCCL|TORCH|TORCHINDUCTOR|PYTORCH|OMP|MKL|GLOO|PET|TRAINBOX)_.*|TP_SOCKET.*"
    "|SLURM_(?:JOB|STEP|NODE).*|RDZV_ID|SET|(?i:https?_proxy|no_proxy)",
    re.DOTALL,
)

# Variables with the address of another machine, and sometimes a port.
_ENDPOINTS = ("RDZV_ENDPOINT", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR", "MASTER_ADDR")
_HOST = re.compile(r"(?:.*//)?(?:.*@)?([\w.-]+)(?::\d+)?/?")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")

_OTHERS_HOME = re.compile(r"/(home|Users)/[^/\s:'\"]+")

# Common names of accounts and machines. If they were hidden, much of the report would be hidden.
_NOBODY = re.compile(
    "root|trainbox|ubuntu|debian|nvidia|user|nobody|jovyan|localhost|local|localdomain", re.I
)

Hidden = Sequence[tuple[str, str]]  # (text to hide, its replacement), the longest text first


def private_names(homes: Iterable[str], users: Iterable[str], hosts: Iterable[str]) -> Hidden:
    """Return the names that identify a user or a machine, with their replacements.

    Home folders become ~, names become [user], [host] and [domain]. A home at the root, such as
    /tmp in an image, identifies nobody and is not hidden.
    """
    names = {home.rstrip("/"): "~" for home in homes if home.rstrip("/").count("/") > 1}
    for host in hosts:
        label, _, domain = host.partition(".")
        names |= {host: "[host]", label: "[host]", domain: "[domain]"}
    names |= dict.fromkeys(users, "[user]")
    kept = [pair for pair in names.items() if pair[0] and not _NOBODY.fullmatch(pair[0])]
    return sorted(kept, key=lambda pair: -len(pair[0]))


def other_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of other machines in the environment. An address is not a name."""
    found = (match[1] for name in _ENDPOINTS if (match := _HOST.fullmatch(env.get(name, ""))))
    return tuple(host for host in found if not host.replace(".", "").isdigit())


def redacted(text: str, hidden: Hidden = (), longest: int = _LONGEST) -> str:
    """Return `text` as one short line without secrets and private names.

    If more than `longest` characters remain, the line is cut and ends with `...`.
    """
    # A list of allowed values is not possible for free text: a message of torch or the driver may
    # quote a command line, an address with a login or a path with a user's name. Here, secrets must
    # be recognized by their form. If in doubt, the text is hidden.
    text = without_secrets(printable(" ".join(text.split())[:LONGEST]))
    for name, shown in hidden:
        text = _pattern(name, shown).sub(shown, text)
    text = _OTHERS_HOME.sub(r"/\1/[user]", text)
    return text if len(text) <= longest else f"{text[:longest]} ..."


def shown_environment(env: Mapping[str, str], hidden: Hidden = ()) -> list[tuple[str, str]]:
    """Return the variables that may explain a problem, sorted by name.

    A value that may be shown is redacted as other text is: an endpoint can have a login, and a path
    a user's name. The name of a variable is not private, unless it is not a name but a text.
    """
    return [
        (
            name if _PLAIN_NAME.fullmatch(name) else redacted(name, hidden),
            NOT_SHOWN
            if name not in SHOWN_VARIABLES
            else redacted(env[name], hidden) or "(set, empty)",
        )
        for name in sorted(env)
        if name in SHOWN_VARIABLES or _NAMED.fullmatch(name)
    ]


def _pattern(name: str, shown: str) -> re.Pattern[str]:
    """Return the pattern that finds `name`.

    A folder matches only as a whole path. A name of fewer than four characters matches only between
    other characters than letters and digits. A longer name matches anywhere.
    """
    if shown == "~":
        return re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    if len(name) < 4:
        return re.compile(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", re.IGNORECASE)
    return re.compile(re.escape(name), re.IGNORECASE)
