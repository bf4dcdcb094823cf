"""Errors on the GPU that are mistakes of a task."""

import pytest

from tests.gpu.check import Check


@pytest.mark.gpu(
    step=6, seconds=10, long=True, settles="a label out of range in a captured step: exit code 2"
)
def test_a_label_out_of_range_in_a_captured_step_exits_with_code_2(check: Check) -> None:
    check.needs_training()
    # One wrong label among 200 batches, which the rehearsal hardly reads.
    fields = ("--set", "examples=1600", "--set", "every=1600", "--capture", "auto")
    ended = check.trainbox(
        *check.training("r", "tests.gpu.tasks:Mislabelled", *fields), codes=range(256)
    )
    check.saw(f"exit code {ended.code}: {ended.err.strip().splitlines()[-1:]}")
    check.saw(next((row for row in ended.out.splitlines() if row.startswith("step ")), "no step"))
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err


@pytest.mark.gpu(step=4, seconds=8, settles="a label out of range on the GPU: exit code 2")
def test_a_label_out_of_range_exits_with_code_2(check: Check) -> None:
    check.needs_training()
    words = check.training("r", "tests.gpu.tasks:Mislabelled", "--max-steps", "20")
    ended = check.trainbox(*words, codes=range(256))
    check.saw(f"exit code {ended.code}: {ended.err.strip().splitlines()[-1:]}")
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err
