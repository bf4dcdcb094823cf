"""Check the project's English: `python -m tests.support.phrases [FILE ...]` prints each forbidden
phrase with a better one, and exits with 1 if it finds any.

Without files it checks all files of the repository, and the subjects of the commits that
origin/main does not have. It reads the prose of Markdown pages without their code; the comments,
strings and test names of Python files; and all other files line by line.

The list catches the dialect of the project's first pages. It does not catch bad writing.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.markdown import without_code

# A pattern, and what to write instead. A space in a pattern also matches a line break.
_PHRASES = {
    r"tells?|told": "logs, prints, reports",
    r"says|said": "logs, prints, reports, states",
    r"what (still )?holds|will not hold|holds (for|on|in|at|only)": "is guaranteed, applies to",
    r"stands (in|on|at|there|beside|still)": "is in, is listed in",
    r"lies (in|on|at|there|beside)": "is in",
    r"go(es|ing)? on|went on": "resumes, continues",
    r"anew": "again, restarts",
    r"ends? with (code )?\d+": "exits with code N",
    r"a person|foreseen": "manual action, unexpected",
    r"spoil(s|t|ed)?|mend(s|ed|ing)?": "corrupted, fixed",
    r"(has|have) not (the|an?|its|their|any|that|this|enough)": "does not have, differs from",
    r"(is|are|was|were) no(?! (longer|more|less)\b)|knows? no|there (is|are) none": (
        "is not, does not exist, no such"
    ),
    r"be it that|of its own accord|in vain|the like|but for|found out|need not": "plain words",
    r"as many (\w+ )?as": "the same number of",
    r"asked for": "requested",
    r"one that": "the noun",
    r"(its|their|the) places?|in (its )?place of": "position, path, index, instead of",
    r"words": "arguments",
    r"nor (do|does|is|are|was|has|have|can|will)": "a sentence with not",
    r"smaller parts|parts of (a|the) batch": "micro-batches",
}
# One expression, with a group for each pattern. `$(words ...)` is a function of make.
_EXPRESSION = re.compile(
    r"(?<![\w`-])(?<!\$\()(?:{})(?![\w-])".format(
        "|".join(f"(?P<p{number}>{pattern})" for number, pattern in enumerate(_PHRASES))
    ).replace(" ", r"\s+"),
    re.IGNORECASE,
)
_BETTER = {f"p{number}": better for number, better in enumerate(_PHRASES.values())}
_QUESTION = re.compile(r"^#{1,6} +(?:What|Who|Whose|Where|When|Which|Whether)\b.*", re.MULTILINE)
_PLAIN_SUFFIXES = {".sh", ".yml", ".yaml", ".toml", ".sbatch", ".def", ".service"}
_PLAIN_NAMES = {"Makefile", "Dockerfile", "run"}
_OWN_FILES = {"phrases.py", "test_phrases.py"}  # they list the phrases
_SUBJECT_CHARS = 65


def findings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the offset of each forbidden phrase in `text`, and a message with a better one."""
    for match in _EXPRESSION.finditer(text):
        better = _BETTER[str(match.lastgroup)]
        found = " ".join(match[0].split())
        yield match.start(), f"phrase {found!r} is not plain English: write {better}"


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of each piece of prose of a file."""
    if path.suffix == ".md":
        yield 1, without_code(path.read_text(encoding="utf-8"))
    elif path.suffix == ".py":
        yield from _python_prose(path.read_text(encoding="utf-8"))
    elif path.suffix in _PLAIN_SUFFIXES or path.name in _PLAIN_NAMES:
        yield 1, path.read_text(encoding="utf-8")


def _python_prose(text: str) -> Iterator[tuple[int, str]]:
    first, comment = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != first + len(comment):
                yield first, "\n".join(comment)
                comment = []
            first = token.start[0] - len(comment)
            comment.append(token.string.lstrip("# "))
    yield first, "\n".join(comment)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")


def file_findings(path: Path) -> list[str]:
    """Return `path:line: message` for each finding of a file."""
    found = {
        (line + text.count("\n", 0, start), message)
        for line, text in prose(path)
        for start, message in findings(text)
    }
    if path.suffix == ".md":
        text = without_code(path.read_text(encoding="utf-8"))
        for heading in _QUESTION.finditer(text):
            line = text.count("\n", 0, heading.start()) + 1
            found.add((line, f"heading {heading[0]!r} is a clause: name the thing or the task"))
    return [f"{path}:{line}: {message}" for line, message in sorted(found)]


def subject_findings(subjects: Iterable[str]) -> list[str]:
    """Return a message for each defect of the commits' subjects."""
    found = [
        f"commit {subject!r}: {message}" for subject in subjects for _, message in findings(subject)
    ]
    return found + [
        f"commit {subject!r} has {len(subject)} characters: use at most {_SUBJECT_CHARS}"
        for subject in subjects
        if len(subject) > _SUBJECT_CHARS
    ]


def _git(*arguments: str) -> list[str]:
    return subprocess.run(
        ["git", *arguments], check=True, capture_output=True, text=True
    ).stdout.splitlines()


def main(names: list[str]) -> int:
    """Print all findings and return the exit code."""
    try:
        files = map(Path, names or _git("ls-files"))
    except (FileNotFoundError, subprocess.CalledProcessError):
        print("phrases: not checked: this needs git and a git checkout", file=sys.stderr)
        return 0
    found = [
        message
        for path in files
        if path.name not in _OWN_FILES and path.is_file()
        for message in file_findings(path)
    ]
    if not names and _git("branch", "--remotes", "--list", "origin/main"):
        found += subject_findings(_git("log", "--no-merges", "--format=%s", "origin/main..HEAD"))
    sys.stdout.writelines(f"{message}\n" for message in found)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
