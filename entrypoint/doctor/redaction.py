"""Decide what a public report may show of an environment and of a text. Pure.

If in doubt, the value is hidden: a wrongly hidden value costs a helper only one question.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from entrypoint.doctor.secret_rule import NOT_SHOWN, is_secret, without_secrets

_LONGEST = 240  # characters shown of a value; an image's NVIDIA_REQUIRE_CUDA has a thousand
_LONGEST_READ = 10 * _LONGEST  # the rest of a longer text is ignored

# The variables that the launch, torch and its libraries read. All others are ignored.
_PREFIXES = (
    *(
        "CUDA_",
        "NVIDIA_",
        "NCCL_",
        "TORCH_",
        "TORCHINDUCTOR_",
        "PYTORCH_",
        "OMP_",
        "MKL_",
        "GLOO_",
        "TP_SOCKET",
    ),
    *("SLURM_JOB", "SLURM_STEP", "SLURM_NODE", "PET_", "TRAINBOX_"),
)
_NAMES = (
    *(
        "GPUS",
        "GPU_IDS",
        "STRATEGY",
        "PROCESSES",
        "DEVICE",
        "NNODES",
        "NODE_RANK",
        "RDZV_ENDPOINT",
        "TASK",
        "SET",
    ),
    *(
        "HEALTH",
        "HEALTH_LIMITS",
        "PYTHONPATH",
        "PYTHONHASHSEED",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "HOME",
    ),
)
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")

_OTHERS_HOME = re.compile(r"/(home|Users)/[^/\s:'\"]+")

# Common names of accounts and machines. To hide them would hide words of the report.
_NOBODY = (
    "root",
    "trainbox",
    "ubuntu",
    "debian",
    "nvidia",
    "user",
    "nobody",
    "jovyan",
    "localhost",
    "local",
    "localdomain",
)

Hidden = Sequence[tuple[str, str]]  # (text to hide, its replacement), the longest text first


def hidden_words(homes: Iterable[str], users: Iterable[str], hosts: Iterable[str]) -> Hidden:
    """Return the words that identify a user or a machine, with their replacements.

    Home folders become ~, names become [user], [host] and [domain]. A home at the root, such as
    /tmp in an image, identifies nobody and is not hidden.
    """
    words = {home.rstrip("/"): "~" for home in homes if home.rstrip("/").count("/") > 1}
    for host in hosts:
        label, _, domain = host.partition(".")
        words |= {host: "[host]", label: "[host]", domain: "[domain]"}
    words |= dict.fromkeys(users, "[user]")
    kept = ((word, shown) for word, shown in words.items() if word and word.lower() not in _NOBODY)
    return sorted(kept, key=lambda pair: -len(pair[0]))


def redacted(text: str, hidden: Hidden = (), longest: int = _LONGEST) -> str:
    """Return `text` as one short line without secrets and hidden words.

    If more than `longest` characters remain, the line is cut and ends with `...`.
    """
    text = without_secrets(_printable(text))
    for word, shown in hidden:
        text = _pattern(word, shown).sub(shown, text)
    text = _OTHERS_HOME.sub(r"/\1/[user]", text)
    return text if len(text) <= longest else f"{text[:longest]} ..."


def shown_setting(name: str, value: str) -> str:
    """Return the value of a setting as its user may see it, or an empty text for a secret.

    The user's home is not hidden.
    """
    if is_secret(name, value):
        return ""
    text = without_secrets(_printable(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def shown_environment(env: Mapping[str, str], hidden: Hidden = ()) -> list[tuple[str, str]]:
    """Return the variables that matter, sorted by name, with their redacted values.

    Of proxies, only whether they are set is returned.
    """
    rows = [
        (_printable(name), _shown(name, env[name], hidden))
        for name in sorted(env)
        if name in _NAMES or name.startswith(_PREFIXES)
    ]
    given = [
        f"{name} {'set' if env.get(name) or env.get(name.upper()) else 'unset'}"
        for name in _PROXIES
    ]
    return [*rows, ("proxies", ", ".join(given))]


def _shown(name: str, value: str, hidden: Hidden) -> str:
    """Return the redacted value of a variable."""
    if is_secret(name, value):
        return NOT_SHOWN
    return redacted(value, hidden) or "(set, empty)"


def _printable(text: str) -> str:
    """Return the beginning of `text` as one line of printable characters."""
    line = " ".join(text.split())[:_LONGEST_READ]
    return "".join(character if character.isprintable() else "?" for character in line)


def _pattern(word: str, shown: str) -> re.Pattern[str]:
    """Return the pattern that finds `word`.

    A folder matches only as a whole path. A name of fewer than four characters matches only between
    other characters than letters and digits. A longer name matches anywhere.
    """
    if shown == "~":
        return re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])")
    if len(word) < 4:
        return re.compile(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", re.IGNORECASE)
    return re.compile(re.escape(word), re.IGNORECASE)
