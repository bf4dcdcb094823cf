"""Recognize secrets by their name, their format or their randomness.

A run's manifest and the free text of a report of `trainbox doctor` must hide the same secrets.
"""

import itertools
import re
from collections.abc import Iterable

NOT_SHOWN = "(set, not shown)"
_CUT = "(not shown)"

# Common names of settings, such as keypoints, tokenizer, max_tokens and passes, are not secrets.
_WORDS = (
    r"KEY(?!POINT|WORD|FRAME)|TOKEN(?!S|IZ)|(?<!(?:MAX|NEW|NUM)[_-])TOKENS|SECRET|PASS(?!ES)"
    "|CRED|AUTH|PWD|_PW|_PIN|_TOK(?!EN)|LICENSE|HOOK|DSN|SIGNATURE"
)
_SECRET_NAME = re.compile(rf"{_WORDS}|SLURM_\w*(?:USER|ACCOUNT)", re.IGNORECASE)
# Matches api_key=abc, "token": "abc" and --password abc. The quantifiers are possessive, because
# backtracking would take minutes on a long value.
_PAIR = re.compile(
    rf"""(?<![\w.-])(?=[\w.-]*(?:{_WORDS}))([\w.-]++["']?\s*+[=:]\s*+|--[\w-]++\s++)("[^"]*"|'[^']*'|\S++)""",
    re.IGNORECASE,
)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*", re.ASCII)  # its value may be the next argument
_BEARER = re.compile(r"\b(bearer|basic|password|secret)\s+(?![=:])\S+", re.IGNORECASE)
_LOGIN = re.compile(r"([a-z][\w+.-]*://)\S*@|[^\s/@:]+:[^\s@]+@", re.IGNORECASE)  # user:password@
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:hf_|gh[oprsu]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza|eyJ|npm_|pypi-|nvapi-|ya29\.|hvs\.|dckr_pat_)[\w.+/=-]{6,}"
    r"|sk-[\w-]{16,})"
)
# Public values that look random: a GPU's UUID, an image's digest, and the commit of this build.
_KNOWN = re.compile(
    r"(?:GPU-|MIG-){1,2}[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|sha256:[0-9a-f]{64}|\brevision [0-9a-f]{40}(?![0-9a-f])"
)
_PART = re.compile(r"[\w+=-]{20,}", re.ASCII)
_PART_WITH_SLASHES = re.compile(r"[\w+/=-]{32,}", re.ASCII)
_HEX = re.compile(r"[0-9a-f-]{32,}", re.IGNORECASE)
# The share of characters that differ in kind (digit, upper or lower case) from the one before.
# It is 0.4 to 0.6 in random letters and digits, and below 0.2 in people's names.
_CHANGES = 0.25


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of `name` must be hidden completely."""
    return bool(_SECRET_NAME.search(name) or _TOKEN.search(value) or _random_parts(value))


def without_secrets(text: str) -> str:
    """Return `text` with each secret replaced."""
    text = _without_marked(text)
    for part in _random_parts(text):
        text = text.replace(part, _CUT)
    return text


def arguments_without_secrets(arguments: Iterable[str], to_copy: bool = False) -> list[str]:
    """Return the arguments of a command with each secret replaced.

    An option and its value may be two arguments. In a command `to_copy`, a value stays that only
    looks random, because the path of a run does so as well.
    """
    shown: list[str] = []
    option = ""  # the argument before, if it is an option
    for argument in arguments:
        is_option = bool(_OPTION.fullmatch(argument))
        if _SECRET_NAME.search(option) and not is_option:
            shown.append(_CUT)
        else:
            shown.append(_without_marked(argument) if to_copy else without_secrets(argument))
        option = argument if is_option else ""
    return shown


def _without_marked(text: str) -> str:
    """Return `text` without the secrets that have a name or a known format."""
    text = _BEARER.sub(rf"\1 {_CUT}", text)
    text = _PAIR.sub(rf"\1{_CUT}", text)
    text = _LOGIN.sub(lambda match: f"{match[1] or ''}{_CUT}@", text)
    return _TOKEN.sub(_CUT, text)


def _random_parts(text: str) -> list[str]:
    """Return the parts that look randomly generated."""
    text = _KNOWN.sub(" ", text)
    return [
        part
        for pattern in (_PART_WITH_SLASHES, _PART)
        for part in pattern.findall(text)
        if _looks_random(part)
    ]


def _looks_random(part: str) -> bool:
    if _HEX.fullmatch(part):
        return True
    kinds = [(letter.isdigit(), letter.isupper()) for letter in part if letter.isalnum()]
    changes = sum(one != other for one, other in itertools.pairwise(kinds))
    return len(kinds) >= 20 and (True, False) in kinds and changes >= _CHANGES * len(kinds)
