"""A message names the ranks of a script that run long after another rank has exited."""

import os
import subprocess

from trainer.programs.ranks.early_exits import EarlyExits, running_ranks


def test_ranks_that_run_a_minute_after_another_one_are_named_once() -> None:
    exits = EarlyExits()
    looks = [
        *(({0, 1, 2}, 0.0), ({0, 2}, 1000.0), ({0, 2}, 1059.0), ({0, 2}, 1060.0)),
        *(({0, 2}, 1200.0), ({0}, 1300.0), ({0}, 1361.0), (set[int](), 1400.0)),
    ]
    ending = (
        "if they wait for each other, the wait ends after the timeout of init_process_group(); "
        "see End in docs/guides/own-script.md"
    )
    assert [exits.look(*look) for look in looks] == [
        *(None, None, None),
        f"rank 1 exited, and ranks 0, 2 still run: {ending}",
        *(None, None),
        f"ranks 1, 2 exited, and rank 0 still runs: {ending}",
        None,
    ]


def test_ranks_that_end_within_a_minute_are_not_named() -> None:
    exits = EarlyExits()
    looks = (({0, 1}, 0.0), ({1}, 10.0), (set[int](), 60.0), (set[int](), 100.0))
    assert [exits.look(*look) for look in looks] == [None] * 4


def test_the_minute_begins_again_when_all_ranks_run_again() -> None:
    """A look at /proc may miss a rank."""
    exits = EarlyExits()
    looks = (({0, 1}, 0.0), ({0}, 5.0), ({0, 1}, 10.0), ({0}, 7200.0), ({0}, 7259.0))
    assert [exits.look(*look) for look in looks] == [None] * 5
    assert exits.look({0}, 7260.0) is not None


def test_the_children_of_this_process_that_are_ranks_are_found() -> None:
    processes = [
        subprocess.Popen(["/bin/cat"], env=env, stdin=subprocess.PIPE)
        for env in (
            {"RANK": "3"},
            {"RANK": "11", "LOCAL_RANK": "1"},
            {"LOCAL_RANK": "2"},
            {"RANK": ""},
        )
    ]
    try:
        assert {3, 11} <= running_ranks()
        processes[0].communicate()
        assert running_ranks() == {11}
    finally:
        for process in processes:
            process.communicate()
    assert running_ranks() == set()
    assert "RANK" not in os.environ
