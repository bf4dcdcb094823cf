"""Checkpoints that are saved while the training continues."""

import pytest

from tests.gpu.check import Check


@pytest.mark.gpu(seconds=12, settles="a save during training is exact; its pause (benchmarks.md)")
def test_each_checkpoint_has_the_weights_of_its_step(check: Check) -> None:
    check.needs("tensorboard", "safetensors", "tqdm")
    found = check.program("saves", folder=str(check.folder), layers=25 if check.on_gpu else 1)
    steps = {name: same for name, same in found.items() if name.startswith("step ")}
    check.saw(f"{found['mib']} MiB: pauses of {found['pauses_ms']} ms, after waits of "
              f"{found['waits_ms']} ms for the save before")  # fmt: skip
    assert list(steps) == ["step 10", "step 20", "step 30", "step 40"]
    assert all(steps.values()), steps
