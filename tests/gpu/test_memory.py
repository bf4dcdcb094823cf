"""Too little memory: what is cut has the bits of --accumulation, and other bits have a sign."""

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.rows import table

_ROOM_MIB = 560  # the whole batch of `Wide` needs about 1 GiB, and a part of 16 examples 250 MiB


@pytest.mark.gpu(seconds=15, settles="G2, G3: cuDNN under pressure, the texts of its errors")
def test_convolutions_without_memory_have_the_same_bits_or_a_sign(check: Check) -> None:
    found = check.program("convolutions")
    check.tables.append(
        ("Convolutions with little memory", table(("Case", "Outcome"), list(found.items())))
    )
    outcomes = [text for name, text in found.items() if "no limit" not in name]
    for sign in ("same bits", "other bits", "recognized"):
        check.saw(f"{sum(text.startswith(sign) for text in outcomes)} {sign}")
    assert not [n for n, text in found.items() if text.startswith("NOT RECOGNIZED")]
    assert not [n for n, text in found.items() if text.startswith("OTHER BITS")]


@pytest.mark.gpu(seconds=30, settles="batch-size.md: a cut batch, and pressure in mid-run (G2, G3)")
def test_a_batch_that_does_not_fit_has_the_bits_of_accumulation(check: Check) -> None:
    check.needs("tensorboard", "safetensors", "tqdm")
    found = check.program("memory", folder=str(check.folder), room_mib=_ROOM_MIB)
    cut = found["cut"]
    check.saw(f"{_ROOM_MIB} MiB: --accumulation {cut['accumulation']}")
    assert cut["accumulation"] > 1, "the batch was not cut: choose less memory"
    assert cut["digest"] == found["given"]
    assert cut["failed"] == 0
    for name, values in found.items():
        if name.startswith("pressed"):
            same = values["digest"] == found["whole"]
            check.saw(
                f"{name}: {values.get('stopped') or ('same bits' if same else 'other bits')}"
                f", {values['failed']} failed allocations recorded"
            )
            assert "unexpected" not in values, values
            assert same or values["failed"] or "stopped" in values, (name, values)
    assert not errors(found)
