"""The number formats, and the same bits from the same command (R1)."""

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.digests import differing

_FP32_ERROR, _TF32_ERROR = 2e-5, 5e-5  # float32 is below the first, TF32 above the second


@pytest.mark.gpu(
    step=1, seconds=6, settles="--precision fp32 and tf32 are what they are called (G7)"
)
def test_fp32_is_exact_and_tf32_is_not(check: Check) -> None:
    found = check.program("arithmetic")
    for name, value in found.items():
        check.saw(f"{name} {value:.1e}" if isinstance(value, float) else f"{name} {value}")
    assert not errors(found)
    assert found["fp32 switches"]["matmul.allow_tf32"] is False
    assert found["tf32 switches"]["matmul.allow_tf32"] is True
    for operation in ("product", "convolution", "lstm"):
        assert found[f"fp32 {operation}"] < _FP32_ERROR
    check.needs_gpu()
    if found["capability"] < [8, 0]:
        pytest.skip("GPUs before Ampere do not have TF32")
    for operation in ("product", "convolution", "lstm"):
        assert found[f"tf32 {operation}"] > _TF32_ERROR, operation


@pytest.mark.gpu(
    step=2, seconds=32, settles="R1: each task in each precision, twice; no RNN in fp16 (G6)"
)
def test_each_task_has_the_same_bits_in_two_processes(check: Check) -> None:
    check.needs_training("torchvision")
    precisions = ("fp32", "tf32", "bf16", "fp16") if check.on_gpu else ("fp32", "bf16")
    # All precisions and repeats at the same time.
    started = []
    for number, precision in enumerate([*precisions, *precisions]):
        folder = check.folder / f"{number}"
        folder.mkdir()
        arguments = {"folder": str(folder), "precisions": (precision,)}
        started.append(check.start_program("tasks_once", **arguments))
    found = [check.results(process) for process in started]
    half = len(precisions)
    one, other = (
        {n: v for part in p for n, v in part.items()} for p in (found[:half], found[half:])
    )
    trained = [name for name in one if not name.startswith("rnn ")]
    failed = errors(one)
    for name, text in failed.items():
        check.saw(f"{name}: {text[:120]}")
    different = [name for name in differing([one, other]) if name not in failed]
    check.saw(
        f"{len(trained) - len(failed)} of {len(trained)} trainings, "
        f"{len(different)} with other bits"
    )
    in_fp16 = [
        n
        for n, types in one.items()
        if n.startswith("rnn ") and "bf16" in n and "torch.float16" in types
    ]
    assert not different, f"other bits in the second process: {different}"
    assert not failed, f"{failed}"
    assert not in_fp16, f"these RNNs compute in fp16: {in_fp16}"
