"""Text files are read and written as UTF-8, whatever the locale."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("entrypoint", "trainer", "trainbox")
# `open` of these is not Python's: it takes no encoding.
_OTHER_OPENS = ("os", "gzip", "av", "Image", "_tracker", "RunRecord")


def _without_encoding(path: Path) -> Iterator[int]:
    """The lines of calls that open a file as text in the locale's encoding."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        value = function.value if isinstance(function, ast.Attribute) else None
        owner = getattr(value, "attr", getattr(value, "id", ""))
        if name in ("read_text", "write_text") and owner in ("", "self", "folder"):
            continue  # a function of ours, or a method of RunFolder
        modes = [word.value for word in node.keywords if word.arg == "mode"] + node.args
        binary = any(
            isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" in mode.value
            for mode in modes
        )
        if (
            name in ("read_text", "write_text", "fdopen", "NamedTemporaryFile", "open")
            and not binary
            and owner not in _OTHER_OPENS
        ):
            yield node.lineno


def test_every_text_file_names_its_encoding() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 40
    assert [
        f"{path.relative_to(ROOT)}:{line}" for path in files for line in _without_encoding(path)
    ] == []
