"""The drill with real trainings, and with trainings whose bits differ."""

import itertools
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from entrypoint.cli import commands as cli
from tests.support.commands import Trainbox, finish
from trainbox.errors import Failure

pytestmark = pytest.mark.slow


def test_the_drill_prints_one_digest(trainbox: Trainbox) -> None:
    """Cover batch norm, dropout and augmentation in loader workers, on 1 to 4 processes.

    The trainings ignore a rendezvous in the environment, as a job of several machines has it.
    """
    words = ("drill", "digits_augmented", "--steps", "30", "--seed", "3", "--gpus", "0")
    process = trainbox.start(*words, env={"RDZV_ENDPOINT": "nobody.invalid:29400"})
    ended = finish(process)  # eleven starts
    assert ended.code == 0, ended.out + ended.err
    table = [line.split() for line in ended.out.splitlines() if line.endswith("same")]
    assert [" ".join(words[:2]) for words in table[:4]] == [
        f"{count} undisturbed" for count in (1, 2, 3, 4)
    ]
    assert [line.split("  ")[1] for line in ended.out.splitlines() if "killed after" in line] == [
        "1 -> 4 -> 3 -> 2",
        "4 -> 2 -> 1",
    ]
    assert len({tuple(words[-4:-1]) for words in table}) == 1
    assert "the same bits in all 6 trainings" in ended.out


def test_trainings_with_different_bits_give_exit_code_8(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = itertools.cycle([("undisturbed", "aa bb"), ("", "aa bb"), ("after step 9", "aa cc")])
    monkeypatch.setattr("entrypoint.drill.task.train", lambda *_: next(results))
    monkeypatch.setattr("sys.argv", ["trainbox", "drill", "digits", "--gpus", "0"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 8
    out, err = capsys.readouterr()
    rows = out.splitlines()[3:]
    assert rows[0] == "  1                  undisturbed                        aa bb  same"
    assert [line.split()[-1] for line in rows] == [
        "same",
        "same",
        "DIFFERENT",
        "same",
        "same",
        "DIFFERENT",
    ]
    assert (
        "trainbox: drill digits: 2 of 6 trainings differ in their bits; to find the first "
        "difference: trainbox verify " in err
    )
    assert re.search(r"case-2/run \(kept: \S+\)$", err.strip())


def test_the_last_line_of_a_failed_training_is_reported() -> None:
    ended = CliRunner().invoke(cli.cli, ["drill", "tests.support.tiny:Missing", "--gpus", "0"])
    assert isinstance(ended.exception, Failure)
    assert ended.exception.exit_code == 2
    assert "trainbox: task tests.support.tiny:Missing: te" in str(ended.exception)
    kept = Path(str(ended.exception).partition("kept: ")[2].rstrip(")"))
    assert (kept / "case-0" / "start-0.log").is_file()
