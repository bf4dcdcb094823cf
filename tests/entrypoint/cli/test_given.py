"""Messages about the folder of a run and the files that a command is given."""

import os
from pathlib import Path

import pytest

from entrypoint.cli.stored import check_files, check_run
from trainbox.errors import WrongUse


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("gan", "the folder does not exist: did you mean {}/gan-26842444 or {}/gan-big?"),
        ("gan-26842445", "the folder does not exist: did you mean {}/gan-26842444?"),
        (
            "sweep",
            "config.json cannot be read (No such file or directory): give the folder of a run, "
            "such as {}/sweep/trial-0",
        ),
        ("zzz", "the folder does not exist: give the folder of a run, such as "),
        ("digits", "config.json cannot be read (not a regular file): give the folder of a run, "),
        (
            "gan-big",
            "config.json cannot be read (No such file or directory): give the folder of a run, ",
        ),
    ],
)
def test_a_folder_that_is_not_a_run_is_refused_with_the_near_one(
    tmp_path: Path, given: str, remedy: str
) -> None:
    for name in ("gan-26842444", "gan-big", "digits"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "digits/config.json")
    (tmp_path / "sweep/trial-0").mkdir(parents=True)
    (tmp_path / "sweep/trial-0/config.json").touch()
    with pytest.raises(WrongUse) as refused:
        check_run("evaluate", tmp_path / given)
    start = f"evaluate {tmp_path / given}: {remedy.format(tmp_path, tmp_path)}"
    assert str(refused.value).startswith(start)


@pytest.mark.parametrize("given", ["digits", "digits-7d2c1a9"])
def test_the_bare_name_of_a_run_is_found_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    (tmp_path / "runs/digits-7d2c").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongUse, match=r"not exist: did you mean runs/digits-7d2c\?$"):
        check_run("evaluate", Path(given))


def test_a_fifo_is_refused_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    check_files([tmp_path])
    with pytest.raises(WrongUse, match="fifo is not a file or folder: name files, or folders of"):
        check_files([tmp_path / "fifo"])
