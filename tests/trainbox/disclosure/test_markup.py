"""Text of a user in a page is shown as it is."""

import html

import markdown
import pytest

from trainbox.disclosure.markup import cell, code, escaped, escaped_line

_TEXTS = [
    "<img src=x onerror=alert(1)>",
    'a" onload="b',
    "it's",
    "a|b",
    "`a`",
    "``a",
    "a`b``c",
    "[a](b)",
    "*a*",
    "_a_ __b__ max_steps",
    "~~a~~",
    "\\|",
    "&lt;",
]


def _rendered(text: str) -> str:
    return markdown.markdown(text, extensions=["tables"])


@pytest.mark.parametrize("text", _TEXTS)
def test_a_page_shows_the_text(text: str) -> None:
    table = _rendered(f"| a | b |\n|---|---|\n| {escaped_line(text)} | c |")
    shown = table.partition("<td>")[2].partition("</td>")[0]
    assert "<" not in shown and html.unescape(shown) == text
    assert table.count("<td>") == 2
    other = _rendered(f"| a | b |\n|---|---|\n| {cell(text)} | c |")
    found = other.partition("<td>")[2].partition("</td>")[0]
    assert html.unescape(found.removeprefix("<code>").removesuffix("</code>")) == text
    assert other.count("<td>") == 2
    span = _rendered(f"- {code(text)}").partition("<code>")[2].partition("</code>")[0]
    assert "<" not in span and html.unescape(span) == text


def test_a_text_of_several_lines_is_one_line() -> None:
    assert (escaped_line("a\n\n# b\tc"), code("a\n\n# b")) == ("a # b c", "`a # b`")


@pytest.mark.parametrize("text", _TEXTS)
def test_a_text_of_a_user_is_not_markup(text: str) -> None:
    assert html.unescape(escaped(text)) == text
    assert not set(escaped(text).replace("&#", "")) & set("&<\"'|`[]*\\")


def test_other_text_is_not_changed() -> None:
    assert escaped("tests.support.tiny:Tiny, 0.1 -> max_steps") == (
        "tests.support.tiny:Tiny, 0.1 -> max_steps"
    )
    assert escaped(b"\xff".decode(errors="surrogateescape")) == "&#92;udcff"
