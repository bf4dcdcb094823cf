"""Entries that are left out of a comparison, and paths that differ in each training."""

import numpy as np
import pytest

from trainbox.errors import WrongUse
from trainer.programs.outputs.contents import (
    Entry,
    Key,
    digest,
    entry_of_array,
    entry_of_value,
    without,
    without_folders,
)
from trainer.programs.outputs.differences import first_difference


def _entries(folder: str, time_s: float = 1.0) -> dict[Key, Entry]:
    return {
        ("time_s",): entry_of_value(time_s),
        ("run", "out"): entry_of_value(f"{folder}/run/model.pt"),
        ("files", "/".join((folder, "work", "a"))): entry_of_array(
            np.array([f"{folder}/run", "b"])
        ),
        ("model", "w"): entry_of_value(3.0),
    }


@pytest.mark.parametrize(
    ("ignored", "left"),
    [
        ([], {"time_s", "run", "files", "model"}),
        (["time_s"], {"run", "files", "model"}),
        (["*_s", "out"], {"files", "model"}),
        (["run.out", "files*"], {"time_s", "model"}),
    ],
)
def test_entries_are_left_out_by_a_part_of_the_key_or_all_of_it(
    ignored: list[str], left: set[str]
) -> None:
    assert {key[0] for key in without(_entries("/a"), ignored)} == left


def test_a_pattern_that_leaves_out_nothing_or_everything_is_refused() -> None:
    with pytest.raises(WrongUse, match="--ignore tme matches no entry: use a name such as time_s"):
        without(_entries("/a"), ["time_s", "tme"])
    with pytest.raises(WrongUse, match="no finite numbers are left without --ignore time_s, w"):
        without(_entries("/a"), ["time_s", "w"])


def test_the_paths_of_a_training_do_not_differ() -> None:
    one, other = (
        without_folders(_entries(folder), [f"{folder}/run", f"{folder}/work"])
        for folder in ("/tmp/d/case-0", "/tmp/d/case-10")
    )
    assert digest(one) == digest(other)
    assert first_difference(one, other) is None
    assert ("files", "{run}/a") in one
    assert first_difference(one, without_folders(_entries("/tmp/e"), ["/tmp/d"])) is not None
