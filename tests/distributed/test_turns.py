"""Which ranks look at the data first, because they may download them."""

import os
from pathlib import Path
from typing import Any, Self

from tests.support.ranks import Ranks
from tests.support.tiny import Tiny


class Noted(Tiny):
    """Appends a line to the file `turns` at the begin and at the end of its look at the data."""

    def with_data(self, data_dir: Path) -> Self:
        self._note("begin")
        return super().with_data(data_dir)

    def validation_dataset(self, data_dir: Path) -> Any:
        self._note("end")
        return super().validation_dataset(data_dir)

    def _note(self, what: str) -> None:
        with Path("turns").open("a") as file:
            print(what, os.environ["RANK"], file=file)


def test_the_first_rank_of_each_machine_goes_before_its_others(ranks: Ranks) -> None:
    """Ranks 0 and 1 are on one machine, ranks 2 and 3 on another."""
    local = [{"LOCAL_RANK": str(rank % 2)} for rank in range(4)]
    command = ("train", f"{__file__}:Noted", "--max-steps", "1", "--batch-size", "4")
    ended = ranks(4, *command, "--device", "cpu", env_by_rank=local)
    assert ended.codes == [0] * 4, ended.errs
    turns = (ranks.folder / "turns").read_text().splitlines()
    assert turns[:4] == ["begin 0", "end 0", "begin 2", "end 2"]
    assert sorted(turns[4:]) == ["begin 1", "begin 3", "end 1", "end 3"]
