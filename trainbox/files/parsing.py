"""Parse numbers, JSON and TOML of people and other programs, with reasons of one line."""

import json
from collections.abc import Callable
from typing import Any

LARGEST = 2**63 - 1  # torch and Optuna have no larger whole number


def parse_whole(text: str) -> int:
    """Return the whole number in `text`.

    Raises:
        ValueError: the text is not a whole number.
        OverflowError: the number is beyond `LARGEST`.
    """
    number = int(text)
    if number > LARGEST:
        raise OverflowError(f"a whole number is more than {LARGEST}")
    if number < -LARGEST:
        raise OverflowError(f"a whole number is less than {-LARGEST}")
    return number


def parse_json(text: str | bytes, pairs: Callable[..., Any] | None = None) -> Any:
    """Return the value of JSON. `pairs` makes an object of a list of its names and values.

    Raises:
        ValueError: the text is not JSON. The text of the error is the reason.
    """
    return _parsed(json.loads, text, object_pairs_hook=pairs)


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in `text`.

    Raises:
        ValueError: the text is not JSON, or not an object.
    """
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of TOML.

    Raises:
        ValueError: the text is not TOML. The text of the error is the reason.
    """
    import tomllib  # few commands read TOML

    tables: dict[str, Any] = _parsed(tomllib.loads, text)
    return tables


def _parsed(parse: Callable[..., Any], text: str | bytes, **options: Any) -> Any:
    try:
        return parse(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None
