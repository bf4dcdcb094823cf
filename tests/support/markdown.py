"""Check Markdown pages: `python -m tests.support.markdown PAGE ...` prints each defect and exits
with 1 if there is one.

Defects are a code fence that is never closed, a relative link or image whose file does not exist,
and an anchor without its heading. Links to other hosts are not followed.
"""

import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.*?)[ \t]*#*[ \t]*$", re.MULTILINE)
_CODE = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n\n).)*?(?<!`)\1(?!`)", re.DOTALL)
_LINKS = (
    re.compile(r"\]\(\s*<?([^\s)>]+)"),  # [text](target) and ![text](target)
    re.compile(r"^ {0,3}\[[^\]^]+\]:\s*<?([^\s>]+)", re.MULTILINE),  # [name]: target
    re.compile(r"<(?:img|a|source|video)\b[^>]*?\s(?:src|href)=[\"']([^\"']+)", re.IGNORECASE),
)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)


def defects(page: Path, root: Path) -> list[str]:
    """Return `page:line: defect` for each defect of `page`; its links must stay below the folder
    `root`.
    """
    text = page.read_text(encoding="utf-8")
    found = [
        (line, f"code fence is never closed: add a line {fence}") for line, fence in _split(text)[1]
    ]
    prose = without_code(text)
    links = [(link.start(1), link[1]) for pattern in _LINKS for link in pattern.finditer(prose)]
    broken = [(start, defect) for start, target in links if (defect := _broken(page, target, root))]
    found += [(prose.count("\n", 0, start) + 1, defect) for start, defect in broken]
    return [f"{page}:{line}: {defect}" for line, defect in sorted(found)]


def without_code(text: str) -> str:
    """Return a page's text with spaces for its code, so that lines and offsets are kept."""
    prose, _ = _split(text)
    return _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), prose)


def _split(text: str) -> tuple[str, list[tuple[int, str]]]:
    """Return the text with fenced lines blanked, and the line and characters of a fence that is
    left open.
    """
    prose: list[str] = []
    opened: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.fullmatch(line)
        outside = not opened
        if opened and fence and fence[1].startswith(opened[0][1]) and not fence[2].strip():
            opened = []
        elif outside and fence and "`" not in fence[2]:
            opened = [(number, fence[1])]
        prose.append(line if outside and not opened else "")
    return "\n".join(prose), opened


def _broken(page: Path, target: str, root: Path) -> str:
    """Return what is wrong with a link's target, or nothing."""
    if _ELSEWHERE.match(target):
        return ""
    name, _, anchor = unquote(target).partition("#")
    file = (page.parent / name).resolve() if name else page.resolve()
    if not file.is_relative_to(root.resolve()):
        return f"link leaves the repository ({target}): link to the page's address"
    if not file.exists():
        return f"no such file ({target}): correct the link"
    if anchor and file.suffix == ".md" and anchor not in _anchors(file):
        return f"no such heading ({target}): correct the anchor"
    return ""


@cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the page's headings, and anchors that the page sets
    itself.
    """
    prose, _ = _split(page.read_text(encoding="utf-8"))
    anchors, seen = set(re.findall(r"<a\s+(?:id|name)=[\"']([^\"']+)", prose)), Counter[str]()
    for heading in _HEADING.findall(prose):
        title = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def main(pages: list[str]) -> int:
    """Print the defects of all pages and return the exit code."""
    found = [defect for page in pages for defect in defects(Path(page), Path.cwd())]
    sys.stdout.writelines(f"{defect}\n" for defect in found)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
