"""Errors on the GPU that are mistakes of a task."""

import pytest

from tests.gpu.check import Check


@pytest.mark.gpu(step=4, seconds=8, settles="a label out of range on the GPU: exit code 2")
def test_a_label_out_of_range_exits_with_code_2(check: Check) -> None:
    check.needs_training()
    words = check.training("r", "tests.gpu.tasks:Mislabelled", "--max-steps", "20")
    ended = check.trainbox(*words, codes=range(256))
    check.saw(f"exit code {ended.code}: {ended.err.strip().splitlines()[-1:]}")
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err
