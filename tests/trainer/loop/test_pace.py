"""The steps of votes, log entries and digests, and that all ranks agree on them."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.here import Here
from trainer.loop.pace import Pace

CPU = torch.device("cpu")


class _Ranks:
    """Ranks whose steps take `steps_s`; a vote is answered at the next one, as by `World.vote`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps_s: float) -> None:
        self.now, self.steps_s = 0.0, steps_s
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self._votes: list[list[tuple[int, ...]]] = [[] for _ in steps_s]
        self.steps = [SimpleNamespace(step=0) for _ in steps_s]
        self.paces = [Pace(self._job(rank)) for rank in range(len(steps_s))]

    def _job(self, rank: int) -> Any:
        def vote(*wishes: int) -> list[int]:
            self._votes[rank].append(wishes)
            number = len(self._votes[rank]) - 2
            if number < 0:
                return [0] * len(wishes)
            return [max(column) for column in zip(*(v[number] for v in self._votes), strict=True)]

        return SimpleNamespace(
            config=SimpleNamespace(log_steps=None, digest_steps=None),
            world=SimpleNamespace(world_size=len(self.steps_s), device=CPU, vote=vote),
            state=SimpleNamespace(progress=self.steps[rank]),
            schedule=SimpleNamespace(steps_per_epoch=30),
            end_step=10_000,
        )

    def step(self, stop_on: int | None = None) -> list[tuple[bool, bool]]:
        """Train a step on each rank; the rank `stop_on` wishes to stop. Return the answers."""
        begin, answers = self.now, []
        for rank, (progress, pace) in enumerate(zip(self.steps, self.paces, strict=True)):
            progress.step += 1
            # The ranks wait for each other in the exchange, but one of them is late at its vote.
            self.now = begin + max(self.steps_s) + self.steps_s[rank] / 100
            if pace.vote_due(progress.step):
                answers.append(pace.vote(rank == stop_on, False))
        self.now = begin + max(self.steps_s)
        return answers


def test_ranks_vote_about_every_25_ms_at_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _Ranks(monkeypatch, 0.001, 0.004)
    votes = [step for step in range(1, 100) if len(ranks.step()) == 2]
    # The number of steps doubles at every second vote, up to 6 steps of 4 ms.
    assert votes[:8] == [1, 2, 4, 6, 10, 14, 20, 26]
    assert {after - before for before, after in itertools.pairwise(votes[7:])} <= {5, 6}


def test_a_stop_of_one_rank_is_answered_to_all_after_about_50_ms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = _Ranks(monkeypatch, 0.001, 0.004)
    for _ in range(60):
        assert (True, False) not in ranks.step()
    asked_at, answers = ranks.now, list[tuple[bool, bool]]()
    while (True, False) not in answers:
        answers = ranks.step(stop_on=1)
    assert answers == [(True, False)] * 2
    assert ranks.now - asked_at < 0.055


def test_a_stop_waits_for_at_most_20_steps_if_fast_steps_become_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fast_steps in range(500, 510):  # the stop comes at any step between two votes
        ranks = _Ranks(monkeypatch, 0.0001, 0.0001)
        for _ in range(fast_steps):
            ranks.step()
        ranks.steps_s, asked_at = (1.0, 1.0), ranks.now
        while (True, False) not in ranks.step(stop_on=1):
            pass
        assert ranks.now - asked_at <= 20


def test_a_single_process_votes_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _Ranks(monkeypatch, 0.001)
    assert [len(ranks.step()) for _ in range(30)] == [1] * 30


def test_ranks_use_the_longest_interval_that_one_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _Ranks(monkeypatch, 0.001, 0.001)
    ranks.paces[1].log.wish, ranks.paces[0].digests.wish = 2, 4
    for _ in range(20):
        ranks.step()
        assert len({(pace.log.factor, pace.digests.factor) for pace in ranks.paces}) == 1
    for pace in ranks.paces:
        assert [step for step in range(1, 301) if pace.log_due(step)] == [
            *(60, 100, 120, 180, 200, 240, 300)  # every 100 steps and every second epoch
        ]
        assert [step for step in range(1, 301) if pace.digests_due(step)] == [120, 240]
        assert pace.log_due(10_000) and pace.digests_due(10_000)


def test_a_rank_may_double_an_interval_that_another_rank_has_doubled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (pace,), now = _Ranks(monkeypatch, 0.001).paces, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pace.log.since_s, pace.log.factor = 0.0, 4
    for _ in range(16):
        with pace.measured(pace.log):
            now[0] += 0.001
    assert pace.log.wish == 8


def _factors(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    entry_s: float,
    digest_s: float = 0.0,
    fixed: bool = False,
    validation_s: float = 0.0,
) -> tuple[int, int]:
    """Return the factors after `count` times 5 ms of steps, and records of all kinds."""
    (pace,), now = _Ranks(monkeypatch, 0.001).paces, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pace.log.since_s = pace.digests.since_s = pace.validations.since_s = 0.0
    pace.log.fixed = fixed
    for number in range(count):
        now[0] += 0.005
        for interval, seconds in (
            (pace.validations, validation_s),
            (pace.log, entry_s),
            (pace.digests, digest_s),
        ):
            if seconds and number % interval.factor == 0:
                with pace.measured(interval):
                    now[0] += seconds
        pace.vote(False, False)
    return pace.log.factor, pace.digests.factor


@pytest.mark.parametrize(
    ("count", "entry_s", "digest_s", "factors"),
    [
        (15, 0.001, 0, (1, 1)),  # the first entries do not depend on time
        (16, 0.001, 0, (2, 1)),  # 17 % of the time
        (640, 0.001, 0, (4, 1)),  # 4.8 % of the time
        (640, 0.0002, 0, (1, 1)),  # 3.8 % of the time
        (640, 0.0002, 0.0002, (2, 2)),  # 7 %, then 5.6 %, then 3.8 % of the time
        (6400, 0.0001, 0.01, (1, 128)),  # only what takes most of the time becomes rarer
        (1, 0, 2, (1, 2)),  # slow entries are few
    ],
)
def test_entries_become_rare_while_all_together_take_too_much_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    entry_s: float,
    digest_s: float,
    factors: tuple[int, int],
) -> None:
    assert _factors(monkeypatch, count, entry_s, digest_s) == factors


@pytest.mark.parametrize(
    ("validation_s", "factors"),
    [
        (0.0, (1, 1)),  # entries take 3.8 % of the time
        (0.0001, (2, 1)),  # and validations 1.9 %
        (0.1, (1, 1)),  # entries of 0.2 % are within the last 1 %
    ],
)
def test_records_of_validations_count_but_never_become_rarer(
    monkeypatch: pytest.MonkeyPatch, validation_s: float, factors: tuple[int, int]
) -> None:
    assert _factors(monkeypatch, 640, 0.0002, validation_s=validation_s) == factors


def test_an_interval_that_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _factors(monkeypatch, 640, 0.01, fixed=True) == (1, 1)
    assert _factors(monkeypatch, 640, 0.01, 0.0001, fixed=True) == (1, 1)


def test_a_run_with_rarer_entries_has_the_same_bits_and_verifies(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train("all", epochs=8, threads=1)
    monkeypatch.setattr("trainer.loop.pace._WINDOW", 2)
    for limit in ("_MOST_SHARE", "_LEAST_SHARE"):
        monkeypatch.setattr(f"trainer.loop.pace.{limit}", 0.0)
    here.train("some", epochs=8, threads=1)
    steps = {
        run: [entry["step"] for entry in here.entries("train", run)] for run in ("all", "some")
    }
    assert steps["all"] == [6, 12, 18, 24, 30, 36, 42, 48]
    assert steps["some"] == [6, 12, 24, 36, 48]
    assert here.digest("some") == here.digest("all")
    out = here.succeeds("verify", "runs/all", "runs/some")
    assert "SAME BITS: runs/all and runs/some" in out
