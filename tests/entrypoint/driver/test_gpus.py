"""CUDA_VISIBLE_DEVICES and --gpu-ids: the selected GPUs, or the refusal."""

import pytest

from entrypoint.driver.gpus import Gpu, labels, select, visible_gpus
from trainbox.errors import Failure

# FOUR has two GPUs whose UUIDs have the same beginning. SLICES are MIG slices. MIXED has a GPU and
# slices of another GPU.
FOUR = tuple(
    Gpu(index, f"GPU-{uuid}", "H100", 81559)
    for index, uuid in enumerate(["8f3a11", "8f3b22", "c0ffee", "d00d1e"])
)
SLICES = tuple(
    Gpu(index, f"MIG-{index}{mig}e5", "H100 MIG 1g.10gb", 9984, mig, f"GPU-{index}")
    for index in (0, 1)
    for mig in (0, 1)
)
MIXED = (FOUR[0], SLICES[2], SLICES[3])
_WRITE = "write indices or UUIDs"


# CUDA_VISIBLE_DEVICES, GPUs of the host -> labels of the visible GPUs.
VISIBLE = [
    (None, FOUR, "0 1 2 3"),
    (None, (), "none"),
    ("", FOUR, "none"),
    ("-1", FOUR, "none"),
    ("NoDevFiles", FOUR, "none"),
    ("void", FOUR, "none"),
    (" 0 , 1 ", FOUR, "0 1"),
    ("GPU-8f3b,GPU-8f3a", FOUR, "1 0"),
    ("GPU-d00d1e,0", FOUR, "3 0"),
    (None, SLICES, "0:0 0:1 1:0 1:1"),
    ("MIG-10e5", SLICES, "1:0"),
    ("0:1", SLICES, "0:1"),
    ("1:1,0", MIXED, "1:1 0"),
]

_NO_GPUS = [(value, FOUR) for value in ["0 1", "0-3", "all", "8f3a11", "1.0", "\u0661", "0\n1"]]
_NO_GPUS += [(value, SLICES) for value in ["0:", "0:1:2"]]
# CUDA_VISIBLE_DEVICES, GPUs of the host -> exit code, text after `CUDA_VISIBLE_DEVICES=value`.
# fmt: off
REFUSED = [
    ("2,GPU-c0ffee", FOUR, 2, " names GPU 2 twice: name each GPU once"),
    ("0,,1", FOUR, 2, f": entry 2 is empty: {_WRITE} with single commas, as in 0,2"),
    ("0,-1", FOUR, 2, f": '-1' is not a GPU: {_WRITE} separated by commas, as in 0,2 or GPU-8f3a"),
    *((value, gpus, 2,
       f": '{value}' is not a GPU: {_WRITE} separated by commas, as in 0,2 or GPU-8f3a")
      for value, gpus in _NO_GPUS),
    ("GPU-8f3", FOUR, 2, ": GPU-8f3 matches 2 GPUs (0 1): write more of the UUID"),
    ("0", SLICES, 2, ": GPU 0 is divided into MIG slices (0:0 0:1): name one slice, as in 0:0"),
    ("9", FOUR, 3, ": GPU 9 was not found: choose from the GPUs found (0 1 2 3)"),
    ("00", FOUR, 3, ": GPU 00 was not found: choose from the GPUs found (0 1 2 3)"),
    ("0:7", SLICES, 3, ": GPU 0:7 was not found: choose from the GPUs found (0:0 0:1 1:0 1:1)"),
    ("GPU-beef", FOUR, 3, ": GPU GPU-beef was not found: choose from the GPUs found (0 1 2 3)"),
    ("MIG-GPU-0/7/0", SLICES, 3,
     ": GPU MIG-GPU-0/7/0 was not found: choose from the GPUs found (0:0 0:1 1:0 1:1)"),
]
# fmt: on


@pytest.mark.parametrize(("value", "gpus", "expected"), VISIBLE)
def test_the_gpus_that_a_value_selects(
    value: str | None, gpus: tuple[Gpu, ...], expected: str
) -> None:
    assert labels(visible_gpus(gpus, value)) == expected


@pytest.mark.parametrize(("value", "gpus", "code", "rest"), REFUSED)
def test_a_refused_value_and_its_message(
    value: str, gpus: tuple[Gpu, ...], code: int, rest: str
) -> None:
    with pytest.raises(Failure) as refused:
        visible_gpus(gpus, value)
    assert (refused.value.exit_code, str(refused.value)) == (
        code,
        f"CUDA_VISIBLE_DEVICES={value}{rest}",
    )


def test_indices_are_those_of_the_host() -> None:
    assert labels(select(visible_gpus(FOUR, "3,1"), "3", "--gpu-ids")) == "3"
