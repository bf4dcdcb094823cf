"""The check of Markdown pages that `make lint` runs."""

import subprocess
from pathlib import Path

import pytest

from tests.support.markdown import defects

_ROOT = Path(__file__).parents[1]
_OTHER = (
    "# The `other` page, here\n\n## Same\n\n## Same\n\n```\n# no heading\n```\n<a id='set'></a>\n"
)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/other.md").write_text(_OTHER)
    (tmp_path / "picture one.png").touch()
    return tmp_path / "docs/page.md"


def test_a_sound_page_has_no_defect(page: Path, tmp_path: Path) -> None:
    page.write_text(
        "# Title\n\n[a](other.md) [b](other.md#the-other-page-here) [c](#title) "
        "[d](other.md#same-1)\n"
        "[e](other.md#set) [f](https://example.org/x.md#y) ![g](../picture%20one.png) "
        "[h](../docs)\n"
        "`[code](missing.md)` and `` `[code](missing.md) ``\n\n[i]: other.md\n\n"
        "````md\n```\n[fenced](missing.md)\n````\n\n~~~\n```\n~~~\n"
    )
    assert defects(page, tmp_path) == []


# fmt: off
_DEFECTS = [
    ("a\n\n```sh\nmake\n\n## b\n", 3, "code fence is never closed: add a line ```"),
    ("a\n[b](missing.md)", 2, "no such file (missing.md): correct the link"),
    ("[![b](missing.png)](other.md)", 1, "no such file (missing.png): correct the link"),
    ("[a link\nover two lines](missing.md)", 2, "no such file (missing.md): correct the link"),
    ("<img alt='b' src='missing.png'>", 1, "no such file (missing.png): correct the link"),
    ("[b]: missing.md", 1, "no such file (missing.md): correct the link"),
    ("[b](#missing)", 1, "no such heading (#missing): correct the anchor"),
    ("[b](other.md#no-heading)", 1, "no such heading (other.md#no-heading): correct the anchor"),
    ("[b](../../x.md)", 1, "link leaves the repository (../../x.md): link to the page's address"),
]
# fmt: on


@pytest.mark.parametrize(("text", "line", "defect"), _DEFECTS)
def test_a_defect_is_found_with_its_line(
    page: Path, tmp_path: Path, text: str, line: int, defect: str
) -> None:
    page.write_text(text)
    assert defects(page, tmp_path) == [f"{page}:{line}: {defect}"]


def test_lint_checks_every_page() -> None:
    lint = subprocess.run(
        ["make", "-n", "lint"], cwd=_ROOT, capture_output=True, text=True, check=True
    ).stdout
    (command,) = [line for line in lint.splitlines() if "tests.support.markdown" in line]
    tracked = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("this folder is not a git checkout")
    assert set(tracked.stdout.split()) <= set(command.split())
