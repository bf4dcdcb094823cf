"""Decide what manifests, messages and reports may show.

The value of an environment variable is shown only if its name is in `SHOWN_VARIABLES`. So a new
variable is hidden until its name is added. Other text, such as an argument or a message of torch,
has no names to list: there, secrets are recognized by their name, format or randomness.
"""

import itertools
import re
from collections.abc import Iterable

from trainbox.disclosure.variables import SHOWN_VARIABLES

NOT_SHOWN = "(set, not shown)"
LONGEST = 2400  # characters that a manifest or a report reads of a text
_CUT = "(not shown)"

# Common names of settings, such as keypoints, tokenizer, max_tokens and passes, are not secrets.
_WORDS = (
    r"KEY(?!POINT|WORD|FRAME)|TOKEN(?!S|IZ)|(?<!(?:MAX|NEW|NUM)[_-])TOKENS|SECRET|PASS(?!ES)"
    "|CRED|AUTH|PWD|_PW|_PIN|_TOK(?!EN)|LICENSE|HOOK|DSN|SIGNATURE"
)
_SECRET_NAME = re.compile(_WORDS, re.IGNORECASE)
# Matches api_key=abc, "token": "abc" and --password abc. The quantifiers are possessive, because
# backtracking would take minutes on a long value.
_PAIR = re.compile(
    rf"""(?<![\w.-])(?=[\w.-]*(?:{_WORDS}))([\w.-]++["']?\s*+[=:]\s*+|--[\w-]++\s++)("[^"]*"|'[^']*'|\S++)""",
    re.IGNORECASE,
)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*", re.ASCII)  # its value may be the next argument
_BEARER = re.compile(r"\b(bearer|basic|password|secret)\s+(?![=:])\S+", re.IGNORECASE)
# A part between spaces until its last @. In the rest, a search for logins would take minutes.
_WITH_LOGINS = re.compile(r"(?<!\S)\S*@")
_LOGIN = re.compile(  # user:password@
    r"(?<![\w+.-])([\w+.-]++://)\S*@|(?<![^\s/@:])[^\s/@:]++:[^\s@]++@", re.IGNORECASE
)
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:hf_|gh[oprsu]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|AIza|eyJ|npm_|pypi-|nvapi-|ya29\.|hvs\.|dckr_pat_)[\w.+/=-]{6,}"
    r"|sk-[\w-]{16,})"
)
# Public values that look random: a GPU's UUID, an image's digest, and the commit of this build.
_KNOWN = re.compile(
    r"((?:GPU-|MIG-){1,2}[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|sha256:[0-9a-f]{64}|\brevision [0-9a-f]{40}(?![0-9a-f]))"
)
_PART = re.compile(r"[\w+=-]{20,}", re.ASCII)
_PART_WITH_SLASHES = re.compile(r"[\w+/=-]{32,}", re.ASCII)
_HEX = re.compile(r"[0-9a-f-]{32,}", re.IGNORECASE)
# The share of characters that differ in kind (digit, upper or lower case) from the one before.
# It is 0.4 to 0.6 in random letters and digits, and below 0.2 in people's names.
_CHANGES = 0.25


def shown_variable(name: str, value: str) -> str:
    """Return the value of an environment variable as it may be shown.

    A value that may be shown can be a text with a secret, such as an endpoint with a login.
    """
    return without_secrets(value[:LONGEST]) if name in SHOWN_VARIABLES else NOT_SHOWN


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of the setting or option `name` must be hidden completely."""
    if _SECRET_NAME.search(name) or _TOKEN.search(value):
        return True
    return any(_without_random(part) != part for part in _KNOWN.split(value)[::2])


def without_secrets(text: str) -> str:
    """Return `text` with each secret replaced."""
    parts = _KNOWN.split(_without_marked(text))  # each second part is a public value
    parts[::2] = map(_without_random, parts[::2])
    return "".join(parts)


def arguments_without_secrets(arguments: Iterable[str], to_copy: bool = False) -> list[str]:
    """Return the arguments of a command with each secret replaced.

    An option and its value may be two arguments. In a command `to_copy`, a value stays that only
    looks random, because the path of a run does so as well.
    """
    shown: list[str] = []
    option = ""  # the argument before, if it is an option
    for argument in arguments:
        is_option = bool(_OPTION.fullmatch(argument))
        name, equals, _ = argument.partition("=")
        if _SECRET_NAME.search(option) and not is_option:
            shown.append(_CUT)
        elif equals and _OPTION.fullmatch(name) and _SECRET_NAME.search(name):
            shown.append(f"{name}={_CUT}")  # the value may have spaces
        else:
            shown.append(_without_marked(argument) if to_copy else without_secrets(argument))
        option = argument if is_option else ""
    return shown


def _without_marked(text: str) -> str:
    """Return `text` without the secrets that have a name or a known format."""
    text = _BEARER.sub(rf"\1 {_CUT}", text)
    text = _PAIR.sub(rf"\1{_CUT}", text)
    text = _WITH_LOGINS.sub(_without_logins, text)
    return _TOKEN.sub(_CUT, text)


def _without_logins(part: re.Match[str]) -> str:
    return _LOGIN.sub(lambda login: f"{login[1] or ''}{_CUT}@", part[0])


def _without_random(text: str) -> str:
    """Return `text` without the parts that look randomly generated."""
    for pattern in (_PART_WITH_SLASHES, _PART):
        text = pattern.sub(lambda part: _CUT if _looks_random(part[0]) else part[0], text)
    return text


def _looks_random(part: str) -> bool:
    if _HEX.fullmatch(part):
        return True
    kinds = [(letter.isdigit(), letter.isupper()) for letter in part if letter.isalnum()]
    changes = sum(one != other for one, other in itertools.pairwise(kinds))
    return len(kinds) >= 20 and (True, False) in kinds and changes >= _CHANGES * len(kinds)
