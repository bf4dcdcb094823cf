"""Counts in attributes on two processes: a proof on one rank refuses the task on both."""

import pytest

from tests.support.ranks import Ranks

_COUNTING = "tests.support.counting:Counting"


@pytest.mark.parametrize("rank", ["-1", "1"])
def test_a_count_that_acts_later_is_refused_on_all_ranks(ranks: Ranks, rank: str) -> None:
    words = ("--set", "acts_after=9", "--set", f"only_rank={rank}", "--rehearsal")
    ended = ranks(2, "train", _COUNTING, *words)
    assert ended.codes == [2, 2]
    text = "changes the training: step 3 has other bits, first in the loss squared_error"
    assert text.partition(":")[0] in ended.errs[0]
    assert not list((ranks.folder / "runs").glob("*/checkpoints/*"))


def test_a_count_that_makes_a_step_fail_is_refused_on_all_ranks(ranks: Ranks) -> None:
    ended = ranks(2, "train", _COUNTING, "--set", "fails_after=9", "--rehearsal")
    assert ended.codes == [2, 2]
    assert "StepCounter.calls changes the training: step 3 raises KeyError" in ended.errs[0]


def test_a_count_on_one_rank_is_noted(ranks: Ranks) -> None:
    ended = ranks(2, "train", _COUNTING, "--set", "only_rank=1", "--rehearsal")
    assert ended.codes == [0, 0]
    assert "note       StepCounter.calls changed in a step" in ended.out
