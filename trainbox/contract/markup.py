"""Text of a user in a page."""

# They begin or end a tag, an entity, a value, a cell, code, a link or an emphasis.
_ENTITIES = str.maketrans({character: f"&#{ord(character)};" for character in "&<\"'|`[]*\\"})


def escaped(text: object) -> str:
    """Return `text` so that HTML and Markdown show it as it is, also in the cell of a table."""
    # A name of a file may have bytes that UTF-8 does not have.
    return str(text).encode(errors="backslashreplace").decode().translate(_ENTITIES)
