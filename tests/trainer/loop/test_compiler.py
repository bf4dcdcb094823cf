"""A compiled model trains."""

import pytest

from tests.support.ranks import Ranks
from tests.support.tiny import TINY


@pytest.mark.slow
def test_a_compiled_model_trains_like_the_plain_one(ranks: Ranks) -> None:
    arguments = (TINY, "--max-steps", "5", "--log-steps", "1", "--device", "cpu", "--threads", "1")
    losses = []
    for run, more in (("plain", ()), ("compiled", ("--compile",))):
        ranks.train(1, *arguments, "--run", run, *more)
        losses.append([entry["loss"] for entry in ranks.entries(run, "train")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 5
