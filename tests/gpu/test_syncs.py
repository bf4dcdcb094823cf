"""How often the host waits for the GPU."""

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.rows import table

_STEPS = 40
# What each step needs to know on the host.
_ALLOWED = {"--skip-nonfinite": 1}
# Four processes at the same time.
_GROUPS = (
    ("default", "--clip-norm", "--precision fp32", "--precision fp16", "--skip-nonfinite"),
    ("2 shards", "loader workers", "data on the CPU", "validations", "ssvae"),
    ("images", "images, mixed", "text"),
    ("video", "har", "har lstm"),
)


@pytest.mark.gpu(step=1, seconds=18, settles="a step and a validation without a wait of the host")
def test_steps_do_not_wait_for_the_gpu(check: Check) -> None:
    check.needs_training("torchvision", "PIL")
    started = []
    for number, names in enumerate(_GROUPS):
        folder = check.folder / f"{number}"
        started.append(check.start_program("syncs", folder=str(folder), names=names))
    found = {name: v for process in started for name, v in check.results(process).items()}
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
