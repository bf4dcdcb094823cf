"""What may be shown in public of an environment and of any text: pure.

Rather too little is shown than too much: a value that only looks like a secret costs a helper one question.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

NOT_SHOWN = "(set, not shown)"
_CUT = "(not shown)"
_LONGEST = 240  # characters shown of a value; an image's NVIDIA_REQUIRE_CUDA has a thousand
_LONGEST_READ = 10 * _LONGEST  # what comes after it is not even looked at

# What the launch, torch and the libraries below it read; nothing else of the environment is looked at.
_PREFIXES = (
    *("CUDA_", "NVIDIA_", "NCCL_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "OMP_", "MKL_", "GLOO_", "TP_SOCKET"),
    *("SLURM_JOB", "SLURM_STEP", "SLURM_NODE", "PET_", "TRAINBOX_"),
)
_NAMES = (
    *("GPUS", "GPU_IDS", "STRATEGY", "PROCESSES", "DEVICE", "NNODES", "NODE_RANK", "RDZV_ENDPOINT", "TASK", "SET"),
    *("HEALTH", "HEALTH_LIMITS", "PYTHONPATH", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "LD_PRELOAD", "HOME"),
)
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")

_SECRET_WORDS = "KEY|TOKEN|SECRET|PASS|CRED|AUTH|PWD|_PW|_PIN|LICENSE|HOOK|DSN|SIGNATURE"  # noqa: S105 - no password
_SECRET_NAME = re.compile(rf"{_SECRET_WORDS}|SLURM_\w*(?:USER|ACCOUNT)", re.IGNORECASE)
# api_key=abc, "token": "abc", --password abc. Possessive: what backtracks here takes minutes on a long value.
_PAIR = re.compile(
    rf"""(?<![\w.-])(?=[\w.-]*(?:{_SECRET_WORDS}))([\w.-]++["']?\s*+[=:]\s*+|--[\w-]++\s++)("[^"]*"|'[^']*'|\S++)""",
    re.IGNORECASE,
)
_OTHERS_HOME = re.compile(r"/(home|Users)/[^/\s:'\"]+")
_BEARER = re.compile(r"\b(bearer|basic|password|secret)\s+(?![=:])\S+", re.IGNORECASE)
_LOGIN = re.compile(r"([a-z][\w+.-]*://)\S*@|[^\s/@:]+:[^\s@]+@", re.IGNORECASE)  # user:password@
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:hf_|gh[oprsu]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza|eyJ|npm_|pypi-|nvapi-|ya29\.|hvs\.|dckr_pat_)[\w.+/=-]{6,}"
    r"|sk-[\w-]{16,})"
)
# Public names that look random: a GPU's, an image's digest, and the commit that trainbox was built from.
_KNOWN = re.compile(
    r"(?:GPU-|MIG-){1,2}[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|sha256:[0-9a-f]{64}|\brevision [0-9a-f]{40}(?![0-9a-f])"
)
_WORD = re.compile(r"[\w+=-]{20,}", re.ASCII)
_WORD_WITH_SLASHES = re.compile(r"[\w+/=-]{32,}", re.ASCII)
_HEX = re.compile(r"[0-9a-f-]{32,}", re.IGNORECASE)
_CHANGES = 0.25  # of kind from character to character: 0.4 to 0.6 in random letters and digits, under 0.2 in people's names

# Accounts and machines that are called so everywhere; to hide them would hide words of the report.
_NOBODY = ("root", "trainbox", "ubuntu", "debian", "nvidia", "user", "nobody", "jovyan", "localhost", "local", "localdomain")

Hidden = Sequence[tuple[str, str]]  # (what is in a text, what is shown for it), the longest first


def hidden_words(homes: Iterable[str], users: Iterable[str], hosts: Iterable[str]) -> Hidden:
    """What stands for a person or a machine: home folders become ~, names become [user], [host] and [domain].

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
    """`text` as one line: what looks like a secret cut out, the hidden words replaced, at most `longest` characters shown."""
    text = _BEARER.sub(rf"\1 {_CUT}", _printable(text))
    text = _PAIR.sub(rf"\1{_CUT}", text)
    text = _LOGIN.sub(lambda match: f"{match[1] or ''}{_CUT}@", text)
    text = _TOKEN.sub(_CUT, text)
    for word in _random_words(text):
        text = text.replace(word, _CUT)
    for word, shown in hidden:
        text = _pattern(word, shown).sub(shown, text)
    text = _OTHERS_HOME.sub(r"/\1/[user]", text)
    return text if len(text) <= longest else f"{text[:longest]} ..."


def shown_environment(env: Mapping[str, str], hidden: Hidden = ()) -> list[tuple[str, str]]:
    """The variables that matter, sorted, each with what may be shown of its value; of proxies only whether they are set."""
    rows = [
        (_printable(name), _shown(name, env[name], hidden))
        for name in sorted(env)
        if name in _NAMES or name.startswith(_PREFIXES)
    ]
    given = [f"{name} {'set' if env.get(name) or env.get(name.upper()) else 'unset'}" for name in _PROXIES]
    return [*rows, ("proxies", ", ".join(given))]


def _shown(name: str, value: str, hidden: Hidden) -> str:
    if _SECRET_NAME.search(name) or _TOKEN.search(value) or _random_words(value):
        return NOT_SHOWN
    return redacted(value, hidden) or "(set, empty)"


def _printable(text: str) -> str:
    line = " ".join(text.split())[:_LONGEST_READ]
    return "".join(character if character.isprintable() else "?" for character in line)


def _random_words(text: str) -> list[str]:
    """The words that a machine has drawn, as far as their look tells."""
    text = _KNOWN.sub(" ", text)
    return [word for pattern in (_WORD_WITH_SLASHES, _WORD) for word in pattern.findall(text) if _looks_random(word)]


def _looks_random(word: str) -> bool:
    if _HEX.fullmatch(word):
        return True
    kinds = [(letter.isdigit(), letter.isupper()) for letter in word if letter.isalnum()]
    changes = sum(one != other for one, other in itertools.pairwise(kinds))
    return len(kinds) >= 20 and (True, False) in kinds and changes >= _CHANGES * len(kinds)


def _pattern(word: str, shown: str) -> re.Pattern[str]:
    """Where the word is replaced: a folder's as a whole, a short name between other characters, a longer one anywhere."""
    if shown == "~":
        return re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])")
    if len(word) < 4:
        return re.compile(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", re.IGNORECASE)
    return re.compile(re.escape(word), re.IGNORECASE)
