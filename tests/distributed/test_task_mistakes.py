"""A mistake in a task on several processes: all processes end, and the cause has exit code 2."""

import pytest

from tests.support.paths import SUPPORT
from tests.support.ranks import Ranks

_TASK = f"{SUPPORT / 'mistaken.py'}:Mistaken"
_CAUSES = {
    "rank 1": ("losses", "only here"),
    "metrics": ("metrics", "never"),
    "figures": ("figures", "no picture"),
}


@pytest.mark.parametrize(
    ("strategy", "mistake"),
    [
        *[("ddp", mistake) for mistake in [*_CAUSES, "sample"]],
        ("fsdp", "figures"),
        ("fsdp", "sample"),
    ],
)
def test_a_mistake_ends_all_processes_and_a_sample_is_not_judged_alone(
    ranks: Ranks, strategy: str, mistake: str
) -> None:
    run = f"{strategy}-{mistake}".replace(" ", "-")
    words = (
        "train",
        _TASK,
        "--set",
        f"mistake={mistake}",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--run",
        run,
    )
    ended = ranks(2, *words, "--rehearsal", strategy=strategy)
    if mistake == "sample":
        assert ended.codes == [0, 0], ended.errs
        assert "validated the whole set" in ended.out
        return
    method, text = _CAUSES[mistake]
    # A rank that waits for an ended rank exits with code 7, which the launcher does not report as
    # a cause.
    assert set(ended.codes) in ({2}, {2, 7}), ended.errs
    own = [err for code, err in zip(ended.codes, ended.errs, strict=True) if code == 2]
    assert len(set(own)) == 1
    assert f"task Mistaken: {method}() raised ValueError: {text} (" in own[0]
    assert own[0].endswith(f"fix the task; traceback in runs/{run}/logs/rank-*.log\n")
    assert not list((ranks.folder / "runs" / run / "checkpoints").glob("*.pt"))


def test_a_sample_that_figures_refuses_on_the_first_rank_is_followed_by_a_validation_of_all(
    ranks: Ranks,
) -> None:
    """Only the first rank draws figures.

    If it computed the whole set alone, the other rank would wait and time out.
    """
    words = (
        "train",
        _TASK,
        "--set",
        "mistake=sample for figures",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--run",
        "drawn",
    )
    ended = ranks(2, *words, "--fast", "--rehearsal")
    assert ended.codes == [0, 0], ended.errs
    assert "validated the whole set" in ended.out
    sizes = [(ranks.folder / f"validated-{rank}").read_text().split() for rank in range(2)]
    sample, shares = ["8", "2"], [["8", "8", "8", "8"], ["8", "8", "2"]]
    # The sample, then the whole set on all ranks, then the validation at the end.
    assert sizes == [sample + share + share for share in shares]
