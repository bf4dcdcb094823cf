"""How often the host waits for the GPU."""

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.rows import table

_STEPS = 40
# What each step needs to know on the host.
_ALLOWED = {"--skip-nonfinite": 1}


@pytest.mark.gpu(seconds=25, settles="gpu.md section 2: a step without a wait of the host")
def test_steps_do_not_wait_for_the_gpu(check: Check) -> None:
    check.needs("sklearn", "tensorboard", "safetensors", "tqdm")
    found = check.program("syncs", folder=str(check.folder))
    assert not errors(found)
    check.tables.append(
        (
            f"Waits of the host in {_STEPS} steps",
            table(
                ("Variant", "Waits", "Lines"),
                [
                    (name, sum(lines.values()), ", ".join(f"{k}: {v}" for k, v in lines.items()))
                    for name, lines in found.items()
                ],
            ),
        )
    )
    check.needs_gpu()
    # `vote`, logs and digests are outside of these steps, or are read without a wait.
    many = {
        name: lines
        for name, lines in found.items()
        if sum(lines.values()) > _STEPS * _ALLOWED.get(name, 0)
    }
    check.saw(f"{len(found) - len(many)} of {len(found)} variants")
    assert not many, f"steps wait here: {many}"
