"""Steps that are captured as CUDA graphs: their bits, and what their speed depends on."""

import json

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.digests import differing, last
from tests.gpu.rows import table

_STEPS = 210  # shorter trainings are not captured


@pytest.mark.gpu(step=6, seconds=15, settles="captured steps: launches, hashes, disk, attention")
def test_what_this_machine_costs(check: Check) -> None:
    found = check.program("calibration", folder=str(check.folder))
    assert not errors(found)
    for name, value in found.items():
        if isinstance(value, float):
            check.saw(f"{name}: {value:.4g}")
        else:
            check.tables.append((f"Kernels of {name}", table(("Kernel", "ms"), value)))


@pytest.mark.gpu(
    step=6, seconds=105, long=True, settles="captured steps have the bits of eager steps"
)
def test_captured_steps_of_each_task_have_the_bits_of_eager_steps(check: Check) -> None:
    check.needs_training("torchvision")
    # All at the same time.
    started = {}
    for capture in ("auto", "off"):
        for precision in ("fp32", "bf16"):
            folder = check.folder / f"{capture}-{precision}"
            folder.mkdir()
            started[capture, precision] = check.start_program(
                "tasks_once",
                folder=str(folder),
                precisions=(precision,),
                steps=_STEPS if check.on_gpu else 5,
                capture=capture,
            )
    found = {key: check.results(process) for key, process in started.items()}
    captured, eager = (
        {n: v for (c, _), part in found.items() if c == capture for n, v in part.items()}
        for capture in ("auto", "off")
    )
    reasons = {n.removeprefix("eager "): v for n, v in captured.items() if n.startswith("eager ")}
    check.tables.append(
        ("Steps of each task", table(("Task", "Eager because"), list(reasons.items())))
    )
    check.saw(f"{sum(not reason for reason in reasons.values())} of {len(reasons)} are captured")
    assert not errors({**captured, **eager})
    different = differing([{name: part[name] for name in reasons} for part in (captured, eager)])
    assert not different, f"other bits in captured steps: {different}"
    check.needs_gpu()
    assert not all(reasons.values()), "no task is captured"


@pytest.mark.gpu(step=6, seconds=20, long=True, settles="a step that would replay wrongly is eager")
def test_steps_that_would_have_other_bits_are_eager(check: Check) -> None:
    check.needs_training()
    started = {}
    for kind in ("numpy", "rare", "read", "bound"):
        for capture in ("auto", "off"):
            words = ("tests.gpu.tasks:Hostile", "--set", f"kind={kind}", "--capture", capture)
            arguments = check.training(f"{kind}-{capture}", *words, "--threads", "1")
            started[kind, capture] = check.start_trainbox(*arguments)
    for process in started.values():
        check.finish(process)
    runs = check.folder / "runs"
    captured = []
    for kind in dict.fromkeys(kind for kind, _ in started):
        manifest = json.loads((runs / f"{kind}-auto" / "manifest.json").read_text())
        reason = manifest["rehearsal"]["eager"]
        captured += [] if reason else [kind]
        check.saw(f"{kind}: {reason or 'captured'}")
        assert last(runs / f"{kind}-auto") == last(runs / f"{kind}-off"), kind
    assert not captured
