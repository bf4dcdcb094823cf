"""Too little memory: what is cut has the bits of --accumulation, and other bits have a sign."""

import pytest

from tests.gpu.check import Check
from tests.gpu.digests import outcome
from tests.gpu.rows import table

_ROOMS_MIB = (512, 64, 16, 4, 0)  # for the workspace of a convolution
_ROOM_MIB = 560  # the whole batch of `Wide` needs about 1 GiB, and a part of 16 examples 250 MiB
_PRESSED_MIB = (1024, 256, 64, 0)


@pytest.mark.gpu(step=4, seconds=12, settles="G2, G3: cuDNN under pressure, its errors' texts")
def test_convolutions_without_memory_have_the_same_bits_or_a_sign(check: Check) -> None:
    check.needs("numpy")
    rooms = (None, *_ROOMS_MIB) if check.on_gpu else (None, 0)
    started = {room: check.start_program("convolutions", room_mib=room) for room in rooms}
    found = {room: check.results(process) for room, process in started.items()}
    whole = found.pop(None)
    outcomes = {
        f"{name}, {room} MiB": outcome(values, whole[name]["digest"])
        for room, cases in found.items()
        for name, values in cases.items()
    }
    check.tables.append(
        ("Convolutions with little memory", table(("Case", "Outcome"), list(outcomes.items())))
    )
    for sign in ("same bits", "other bits", "recognized"):
        check.saw(f"{sum(text.startswith(sign) for text in outcomes.values())} {sign}")
    wrong = {name: text for name, text in outcomes.items() if text[0].isupper()}
    assert not wrong
    assert outcomes


@pytest.mark.gpu(step=4, seconds=16, settles="batch-size.md: a cut batch, and pressure in mid-run")
def test_a_batch_that_does_not_fit_has_the_bits_of_accumulation(check: Check) -> None:
    check.needs_training()
    fields = {} if check.on_gpu else {"size": 8, "channels": 4}
    common = {"folder": str(check.folder), "fields": fields}
    # On the CPU, the task itself has too little room.
    small = common if check.on_gpu else {**common, "fields": {**fields, "room": 16}}
    started = {
        "cut": check.start_program("memory", run="cut", room_mib=_ROOM_MIB, **small),
        "whole": check.start_program("memory", run="whole", **common),
    }
    pressed = {
        room: check.start_program("memory", run=f"p{room}", room_mib=room, later=True, **common)
        for room in (_PRESSED_MIB if check.on_gpu else _PRESSED_MIB[:1])
    }
    cut, whole = (check.results(process) for process in started.values())
    check.saw(f"{_ROOM_MIB} MiB: --accumulation {cut['accumulation']}")
    assert cut["accumulation"] > 1, "the batch was not cut: choose less memory"
    assert cut["failed"] == 0
    parts = check.start_program("memory", run="given", accumulation=cut["accumulation"], **common)
    assert cut["digest"] == check.results(parts)["digest"]
    for room, process in pressed.items():
        values = check.results(process)
        same = values["digest"] == whole["digest"]
        outcome = values.get("stopped") or ("same bits" if same else "other bits")
        check.saw(f"{room} MiB after step 3: {outcome}, {values['failed']} failed allocations")
        assert same or values["failed"] or "stopped" in values, (room, values)
