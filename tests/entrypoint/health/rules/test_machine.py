"""The findings of the pure rules on the driver and on several GPUs together."""

import pytest

from entrypoint.driver.gpus import Gpu
from entrypoint.health.rules.gpus import Selection
from entrypoint.health.rules.machine import judge_architectures, judge_uuids


def test_torch_without_known_architectures_is_not_judged() -> None:
    gpu = Gpu(0, "GPU-0", "V100", 32768, capability=(7, 0))
    (finding,) = judge_architectures((), Selection((gpu,)))
    assert (finding.result, finding.gpu, finding.uuid) == ("NA", "0", "GPU-0")


@pytest.mark.parametrize(
    ("uuids", "read"),
    [
        ("a", None),
        ("ab", "2 UUIDs"),
        ("aba", "the same UUID: GPU 0 2; CUDA would use one of them only"),
        ("abab", "the same UUID: GPU 0 2, GPU 1 3; CUDA would use one of them only"),
    ],
)
def test_equal_uuids_are_named_together(uuids: str, read: str | None) -> None:
    gpus = tuple(Gpu(index, f"GPU-{uuid}", "H100", 81559) for index, uuid in enumerate(uuids))
    findings = judge_uuids(Selection(gpus))
    assert [finding.read for finding in findings] == ([] if read is None else [read])
