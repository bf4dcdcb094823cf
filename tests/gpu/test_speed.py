"""The speed of training steps. No figure is a limit: the table goes into benchmarks.md."""

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.rows import table


@pytest.mark.gpu(seconds=40, settles="benchmarks.md: loop by hand, CUDA graphs, cost of records")
def test_steps_per_second(check: Check) -> None:
    check.needs("sklearn", "tensorboard", "safetensors", "tqdm")
    seconds = 1.5 if check.on_gpu else 0.3
    found = check.program("speed", folder=str(check.folder), seconds=seconds)
    failed = errors(found)
    lines = []
    for case in dict.fromkeys(" ".join(n.split()[:2]) for n in found if "digits" not in n):
        hand, ours = found[f"{case} by hand"], found[f"{case} Trainbox"]
        graph = found.get(f"{case} graph", {})
        if f"{case} by hand" in failed or f"{case} Trainbox" in failed:
            continue
        bits = {True: "same", False: "other"}.get(graph.get("same_bits"), "not measured")
        rate = graph.get("steps_per_s", 0.0)
        lines.append(
            (case, f"{hand:,.0f}", f"{ours:,.0f}", f"{ours / hand:.2f}", f"{rate:,.0f}", bits)
        )
        check.saw(f"{case}: {ours / hand:.2f} of the loop by hand")
    check.tables.append(
        (
            "Steps per second",
            table(("Model", "By hand", "Trainbox", "Ratio", "Graph", "Bits of the graph"), lines),
        )
    )
    digits = {n.removeprefix("digits "): v for n, v in found.items() if n.startswith("digits ")}
    check.tables.append(
        (
            "Steps per second of digits",
            table(
                ("Options", "Steps per second"),
                [(n, f"{v:,.0f}") for n, v in digits.items() if isinstance(v, float)],
            ),
        )
    )
    assert not failed


@pytest.mark.gpu(seconds=15, settles="gpu.md section 3: kernels of a step, and the GPU's idle time")
def test_kernels_of_a_step(check: Check) -> None:
    check.needs("sklearn", "tensorboard", "safetensors", "tqdm")
    cases = {
        "digits fp32": {"task": "digits", "precision": "fp32"},
        "digits bf16": {"task": "digits", "precision": "bf16"},
        "digits, 4 shards": {"task": "digits", "precision": "fp32", "shards": 4},
        "batch norm, 4 shards": {"task": "digits_augmented", "shards": 4, "workers": 2},
    }
    found = check.program("profiles", folder=str(check.folder), cases=cases)
    assert not errors(found)
    check.needs_gpu()
    for name, figures in found.items():
        check.saw(f"{name}: {figures['kernels_per_step']:.0f} kernels, "
                  f"{figures['busy_share']:.2f} of the time busy")  # fmt: skip
        assert figures["kernels_per_step"] > 5, (name, figures)


@pytest.mark.gpu(seconds=10, settles="the bits and the time of an update without torch's step")
def test_an_update_has_the_bits_of_torch(check: Check) -> None:
    sizes, turns = {"6 parameters": 6, "160 parameters": 160}, 15 if check.on_gpu else 2
    found = check.program("update", sizes=sizes, turns=turns)
    assert not errors(found)
    for name, figures in found.items():
        check.saw(f"{name}: {figures['ours']:.0f} µs, torch {figures['torch']:.0f} µs")
        assert figures["same_bits"], name
