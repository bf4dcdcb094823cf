"""The usual cures of a file that is not TOML."""

import re

from trainbox.options import table
from trainbox.options.types import Number

_PLACE = re.compile(r" \(at line (\d+), column (\d+)\)$")
_HEADER = re.compile(r"^\s*\[([^\[\]]+)\]", re.MULTILINE)
_WORD = re.compile(r"[^\s,\]}#]*")
_NUMBER = re.compile(r"([+-]?)(\d*)\.(\d*)([eE][+-]?\d+)?")
_COMMA = re.compile(r"([+-]?\d+),(\d+(?:[eE][+-]?\d+)?)")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
_LISTS = ("sweep.grid.", "sweep.range.")  # how the names of keys begin whose values are lists
# The types of the keys, such as train.lr.
_TYPES = {
    f"{name}.{row.key}": type(row.type)
    for name, rows in (
        ("train", table.KEYS_OF_TRAIN),
        ("launch", table.LAUNCH),
        ("sweep", table.KEYS_OF_SWEEP),
    )
    for row in rows
}
_NOTHING = ("null", "none", "nil", "~")
_SWITCHES = {
    **dict.fromkeys(("true", "yes", "on"), "true"),
    **dict.fromkeys(("false", "no", "off"), "false"),
}


def cure_of(text: str, problem: str) -> str:
    """Return the cure for the place in `text` that tomllib names in `problem`, or ""."""
    if not (place := _PLACE.search(problem)):
        return ""
    number, column = int(place[1]), int(place[2])
    lines = text.splitlines()
    line = lines[number - 1]
    key, _, value = (part.strip() for part in line.partition("="))
    rest = line[column - 1 :].lstrip()
    headers = _HEADER.findall("\n".join(lines[:number]))
    if value.startswith("{") and (not rest or rest.startswith("#")):
        section = ".".join([*headers[-1:], key])
        return f"write {key} = {{...}} on one line, or its lines below [{section}]"
    if problem.startswith("Cannot "):
        header = _HEADER.match(line)
        return (
            f"write the lines of both [{header[1]}] below one of them"
            if header
            else f"remove one of the lines of {key}"
        )
    # tomllib names the start of a value, and for `1.` the place after the 1.
    is_value = problem.startswith("Invalid value")
    word = _WORD.match(rest if is_value else value)[0]  # type: ignore[index]
    if (digits := _NUMBER.fullmatch(word)) and bool(digits[2]) != bool(digits[3]):
        sign, whole, fraction, exponent = digits.groups("")
        return f"write {sign}{whole or 0}.{fraction or 0}{exponent}"
    if not is_value:
        return _of_commas(".".join([*headers[-1:], key]), value.partition("#")[0].strip())
    return _of_word(key, word) if word else ""


def _of_commas(key: str, value: str) -> str:
    """Return the cure of a value with commas: of a list, of thousands, or of a decimal comma."""
    if "," in value and key.startswith(_LISTS):
        return f"write [{value}]"
    decimal = _COMMA.fullmatch(value)
    # Without an option of this name, it is a field of the task, which may be any number.
    kind = _TYPES.get(key.replace("_", "-"), Number)
    if decimal and kind is type(None):
        return _of_word(key.rpartition(".")[2], value)
    point = f"{decimal[1]}.{decimal[2]} with a point" if decimal and kind is Number else ""
    if _THOUSANDS.fullmatch(value):
        whole = f"write {value.replace(',', '')} without commas"
        return f"{whole}, or {point}" if point else whole
    return f"write {point}" if point else ""


def _of_word(key: str, word: str) -> str:
    if word.lower() in _NOTHING:
        return f"leave out the line of {key}"
    if switch := _SWITCHES.get(word.lower()):
        return f"write {switch}"
    return f"write the text of {key} in quotes"
