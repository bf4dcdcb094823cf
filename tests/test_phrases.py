from pathlib import Path

import pytest

from tests.support import phrases


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A loss is told.", "told"),
        ("It goes\n  on", "goes on"),
        ("There IS NO folder", "IS NO"),
        ("as many examples as", "as many examples as"),
    ],
)
def test_forbidden_phrase_is_found_with_its_line(tmp_path: Path, text: str, found: str) -> None:
    (page := tmp_path / "a.md").write_text(f"# Page\n\n{text}\n")
    [finding] = phrases.file_findings(page)
    assert finding.startswith(f"{page}:3: phrase {found!r} is not plain English: write ")


@pytest.mark.parametrize(
    "text",
    [
        "It is no longer there.",
        "swords",
        "a retold-story",
        "`it is told`",
        "```\nit is told\n```\n",
    ],
)
def test_plain_english_and_code_are_not_found(tmp_path: Path, text: str) -> None:
    (page := tmp_path / "a.md").write_text(text)
    assert phrases.file_findings(page) == []


def test_comments_strings_and_test_names_of_python_are_checked(tmp_path: Path) -> None:
    (file := tmp_path / "a.py").write_text(
        '"""It is told."""\n'
        "told = 1  # a name\n"
        "# It is\n# told.\n"
        'f"{told} goes on"\n'
        "def test_a_loss_is_told(): ...\n"
        "def loss_is_told(): ...\n"
    )
    lines = [finding.split(":")[1] for finding in phrases.file_findings(file)]
    assert lines == ["1", "4", "5", "6"]


def test_long_subjects_of_commits_are_found() -> None:
    assert phrases.subject_findings(["Add a test", "Tell it"]) == [
        "commit 'Tell it': phrase 'Tell' is not plain English: write logs, prints, reports"
    ]
    [finding] = phrases.subject_findings(["x" * 66])
    assert finding.endswith("has 66 characters: use at most 65")


def test_found_phrases_fail_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (page := tmp_path / "a.md").write_text("It is fine.\n")
    assert phrases.main([str(page)]) == 0
    page.write_text("It goes on.\n")
    assert phrases.main([str(page)]) == 1
    assert "a.md:1: phrase 'goes on'" in capsys.readouterr().out
