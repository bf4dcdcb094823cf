"""Messages about the folder of a run."""

from pathlib import Path

import pytest

from trainbox.contract.errors import WrongUse
from trainbox.contract.given import check_run


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("gan", "the folder does not exist: did you mean {}/gan-26842444 or {}/gan-big?"),
        ("gan-26842445", "the folder does not exist: did you mean {}/gan-26842444?"),
        ("zzz", "the folder does not exist: give the folder of a run, such as "),
        ("gan-big", "config.json is missing: give the folder of a run, such as "),
    ],
)
def test_a_folder_that_is_not_a_run_is_refused_with_the_near_one(
    tmp_path: Path, given: str, remedy: str
) -> None:
    for name in ("gan-26842444", "gan-big", "digits"):
        (tmp_path / name).mkdir()
    with pytest.raises(WrongUse) as refused:
        check_run("evaluate", tmp_path / given)
    start = f"evaluate {tmp_path / given}: {remedy.format(tmp_path, tmp_path)}"
    assert str(refused.value).startswith(start)
