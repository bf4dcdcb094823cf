"""Text of a user in a page is shown as it is."""

import html

import pytest

from trainbox.contract.markup import escaped


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)>",
        'a" onload="b',
        "it's",
        "a|b",
        "`a`",
        "[a](b)",
        "*a*",
        "\\|",
        "&lt;",
    ],
)
def test_a_text_of_a_user_is_not_markup(text: str) -> None:
    assert html.unescape(escaped(text)) == text
    assert not set(escaped(text).replace("&#", "")) & set("&<\"'|`[]*\\")


def test_other_text_is_not_changed() -> None:
    assert escaped("tests.support.tiny:Tiny, 0.1 -> max_steps") == (
        "tests.support.tiny:Tiny, 0.1 -> max_steps"
    )
    assert escaped(b"\xff".decode(errors="surrogateescape")) == "&#92;udcff"
