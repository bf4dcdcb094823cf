"""What may be shown in public of an environment and of any text: pure.

Rather too little is shown than too much: a value that only looks like a secret costs a helper one
question.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from entrypoint.doctor.secret_rule import NOT_SHOWN, is_secret, without_secrets

_LONGEST = 240  # characters shown of a value; an image's NVIDIA_REQUIRE_CUDA has a thousand
_LONGEST_READ = 10 * _LONGEST  # what comes after it is not even looked at

# What the launch, torch and the libraries below it read; nothing else of the environment is looked
# at.
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

# Accounts and machines that are called so everywhere; to hide them would hide words of the report.
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

Hidden = Sequence[tuple[str, str]]  # (what is in a text, what is shown for it), the longest first


def hidden_words(homes: Iterable[str], users: Iterable[str], hosts: Iterable[str]) -> Hidden:
    """What stands for a person or a machine: home folders become ~, names become [user], [host] and
    [domain].

    A home at the root, such as an image's /tmp, names nobody and stays.
    """
    words = {home.rstrip("/"): "~" for home in homes if home.rstrip("/").count("/") > 1}
    for host in hosts:
        label, _, domain = host.partition(".")
        words |= {host: "[host]", label: "[host]", domain: "[domain]"}
    words |= dict.fromkeys(users, "[user]")
    kept = ((word, shown) for word, shown in words.items() if word and word.lower() not in _NOBODY)
    return sorted(kept, key=lambda pair: -len(pair[0]))


def redacted(text: str, hidden: Hidden = (), longest: int = _LONGEST) -> str:
    """`text` as one line: what looks like a secret cut out, the hidden words replaced, at most
    `longest` characters shown.
    """
    text = without_secrets(_printable(text))
    for word, shown in hidden:
        text = _pattern(word, shown).sub(shown, text)
    text = _OTHERS_HOME.sub(r"/\1/[user]", text)
    return text if len(text) <= longest else f"{text[:longest]} ..."


def shown_setting(name: str, value: str) -> str:
    """What may be shown of a setting's value to the user who made it, whose home is no secret;
    nothing of a secret.
    """
    if is_secret(name, value):
        return ""
    text = without_secrets(_printable(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def shown_environment(env: Mapping[str, str], hidden: Hidden = ()) -> list[tuple[str, str]]:
    """The variables that matter, sorted, each with what may be shown of its value; of proxies only
    whether they are set.
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
    if is_secret(name, value):
        return NOT_SHOWN
    return redacted(value, hidden) or "(set, empty)"


def _printable(text: str) -> str:
    line = " ".join(text.split())[:_LONGEST_READ]
    return "".join(character if character.isprintable() else "?" for character in line)


def _pattern(word: str, shown: str) -> re.Pattern[str]:
    """Where the word is replaced: a folder's as a whole, a short name between other characters, a
    longer one anywhere.
    """
    if shown == "~":
        return re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])")
    if len(word) < 4:
        return re.compile(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", re.IGNORECASE)
    return re.compile(re.escape(word), re.IGNORECASE)
