"""The entries of a growing metrics.jsonl, each read once, whatever else the file contains."""

import os
from pathlib import Path

import pytest

from trainbox.files.entries import EntryReader, is_of_script, step_of


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def append(metrics: Path, text: str) -> None:
    with metrics.open("a") as file:
        file.write(text)


def test_only_new_and_complete_lines_are_read(metrics: Path) -> None:
    reader, later = EntryReader(metrics), EntryReader(metrics)
    assert list(reader.read()) == []
    append(metrics, '{"step": 1}\n{"step": 2, "lo')
    assert list(reader.read()) == [{"step": 1}]
    assert list(reader.read()) == []
    append(metrics, 'ss": 1}\n')
    assert list(reader.read()) == [{"step": 2, "loss": 1}]
    assert list(later.read()) == [{"step": 1}, {"step": 2, "loss": 1}]
    assert list(later.read()) == []


def test_lines_that_are_not_objects_are_skipped(metrics: Path) -> None:
    metrics.write_bytes(b"\n[1]\nnot JSON\n\xff\x00\n" + b"[" * 100_000 + b'\n{"step": 1}\n')
    assert list(EntryReader(metrics).read()) == [{"step": 1}]


def test_a_shorter_file_is_read_from_its_begin(metrics: Path) -> None:
    append(metrics, '{"step": 1}\n{"step": 2}\n')
    reader = EntryReader(metrics)
    assert len(list(reader.read())) == 2
    metrics.write_text('{"step": 9}\n')
    assert list(reader.read()) == [{"step": 9}]


def test_the_end_of_a_file_begins_with_a_whole_line(metrics: Path) -> None:
    last = '{"step": 3}\n'
    append(metrics, '{"step": 1}\n{"step": 2}\n' + last)
    assert list(EntryReader(metrics, last_bytes=len(last) + 5).read()) == [{"step": 3}]
    assert len(list(EntryReader(metrics, last_bytes=1000).read())) == 3
    assert list(EntryReader(metrics.parent / "none", last_bytes=9).read()) == []


def test_a_pipe_instead_of_the_file_has_no_entries(metrics: Path) -> None:
    os.mkfifo(metrics)
    assert list(EntryReader(metrics).read()) == []


def test_the_entries_of_trainbox_run_are_not_those_of_the_script() -> None:
    kinds = ["train", "validation", None, "health", "gpus"]
    assert [is_of_script({"kind": kind}) for kind in kinds] == [True, True, True, False, False]
    assert is_of_script({"step": 1})


def test_a_step_is_a_whole_number_that_each_program_can_store() -> None:
    steps = [0, -3, 2**53, 2**53 + 1, 1.0, True, "1", None]
    assert [step_of({"step": step}) for step in steps] == [0, -3, 2**53, *[None] * 5]
