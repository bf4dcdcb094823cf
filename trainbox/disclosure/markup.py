"""Text of a user in a page."""

import re

# They begin or end a tag, an entity, a value, a cell, code, a link or an emphasis.
_ENTITIES = str.maketrans({character: f"&#{ord(character)};" for character in "&<\"'|`[]*~\\"})
# Markdown has no emphasis inside of a word, so names such as max_steps stay readable.
_BESIDE_A_WORD = re.compile(r"(?<![^\W_])_|_(?![^\W_])")


def escaped(text: object) -> str:
    """Return `text` so that HTML and Markdown show it as it is, also in the cell of a table."""
    # A name of a file may have bytes that UTF-8 does not have.
    whole = str(text).encode(errors="backslashreplace").decode().translate(_ENTITIES)
    return _BESIDE_A_WORD.sub("&#95;", whole)


def escaped_line(text: object) -> str:
    """Return `text` as `escaped` does, in one line."""
    return escaped(" ".join(str(text).split()))


def cell(value: object) -> str:
    """Return a value for the cell of a table that is also read as plain text.

    What Markdown would take for markup becomes code, in which only `|` ends the cell.
    """
    text = " ".join(str(value).split())
    plain = escaped_line(text)
    return plain if plain == text or "|" in text else code(text)


def code(text: str) -> str:
    """Return `text` as code in a line of Markdown, which a terminal shows almost as it is."""
    line = " ".join(text.encode(errors="backslashreplace").decode().split())
    longest = max(map(len, re.findall("`+", line)), default=0)
    fence, space = "`" * (longest + 1), " " if line[:1] == "`" or line[-1:] == "`" else ""
    return f"{fence}{space}{line}{space}{fence}"
