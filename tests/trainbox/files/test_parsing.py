"""Numbers, JSON and TOML that people and other programs write."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from trainbox.files.parsing import parse_json, parse_object, parse_toml, parse_whole


def test_whole_numbers() -> None:
    assert [parse_whole(text) for text in ("7", "-3", str(2**63 - 1))] == [7, -3, 2**63 - 1]
    for text in ("", "1.5", "x", "-"):
        with pytest.raises(ValueError, match="invalid literal"):
            parse_whole(text)
    with pytest.raises(OverflowError, match="^a whole number is more than 9223372036854775807"):
        parse_whole(str(2**63))
    with pytest.raises(OverflowError, match="^a whole number is less than -92233720368547758"):
        parse_whole(str(-(2**63)))


@pytest.mark.parametrize(
    ("parse", "text", "reason"),
    [
        (parse_json, "[" * 100_000, "nested too deeply"),
        (parse_json, '{"a": ', "Expecting value: line 1 column 7 (char 6)"),
        (parse_object, "[]", "not a JSON object"),
        (parse_toml, f"a = {'[' * 100_000}", "nested too deeply"),
        (parse_toml, "a =", "Invalid value (at end of document)"),
    ],
)
def test_a_text_that_cannot_be_parsed_has_a_reason_of_one_line(
    parse: Callable[[str], Any], text: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        parse(text)
