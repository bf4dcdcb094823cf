"""The speed of training steps. No figure is a limit: the table goes into benchmarks.md."""

from typing import Any

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.machine import no_compiler
from tests.gpu.profiles import profiled
from tests.gpu.rows import table

_MODELS = [(name, form) for name in ("Mlp", "RandomMnist") for form in ("fp32", "bf16")]
_RATE = {"learning_rate": 1e-6, "batch_size": 128}  # those of benchmarks/loop.py
_RECORDS: dict[str, dict[str, Any]] = {
    "steps alone": {"steps_alone": True},
    "with records": {},
    "--log-steps 1": {"log_steps": 1},
    "--digest-steps 1": {"digest_steps": 1},
    "--fast": {"deterministic": False},
}
_KINDS = ("steps alone", "with records")
_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # for deterministic products


@pytest.mark.gpu(
    step=2, seconds=180, long=True, settles="benchmarks.md: loops by hand, cost of records"
)
def test_steps_per_second(check: Check) -> None:
    check.needs_training("torchvision")
    seconds = 5 if check.on_gpu else 0.3
    rows = [(*model, "eager") for model in _MODELS]
    if reason := no_compiler(check.device):
        check.saw(reason)
    else:
        rows += [(name, form, "compile") for name, form in _MODELS if form == "bf16"]
    cases = {
        f"{name} {form}, {kind}": {
            "task": f"benchmarks.loop:{name}",
            "precision": form,
            **_RATE,
            **_RECORDS[kind],
        }
        for name, form in _MODELS
        for kind in _KINDS
    }
    cases |= {name: {"task": "digits", "batch_size": 64, **s} for name, s in _RECORDS.items()}
    hand = check.program("by_hand", seconds=seconds, rows=rows)
    ours = check.program("speed", folder=str(check.folder), seconds=seconds, cases=cases)
    assert not errors({**hand, **ours})
    lines = []
    for model in (f"{name} {form}" for name, form in _MODELS):
        plain, compiled = hand[f"{model} eager"], hand.get(f"{model} compile")
        best = max(plain, compiled or 0)
        rates = [ours[f"{model}, {kind}"]["steps_per_s"] for kind in _KINDS]
        shown = f"{compiled:,.0f}" if compiled else "-"
        ratios = [f"{rate:,.0f} ({rate / best:.2f})" for rate in rates]
        lines.append((model, f"{plain:,.0f}", shown, *ratios))
        check.saw(f"{model}: {rates[0] / best:.2f} of the best loop by hand")
    head = ("Model", "By hand, fused", "By hand, compiled and fused", *_KINDS)
    check.tables.append(("Steps per second", table(head, lines)))
    digits = [(name, f"{ours[name]['steps_per_s']:,.0f}") for name in _RECORDS]
    check.tables.append(
        ("Steps per second of digits", table(("Options", "Steps per second"), digits))
    )


@pytest.mark.gpu(step=6, seconds=90, long=True, settles="a prototype: a step as a CUDA graph")
def test_a_captured_step_has_the_bits_of_eager_steps_under_two_seeds(check: Check) -> None:
    check.needs("sklearn", "torchvision")
    seconds = 3 if check.on_gpu else 0.1
    models = [*_MODELS, ("Digits", "fp32"), ("Digits", "bf16")]
    rows = [(*model, kind) for model in models for kind in ("eager", "graph")]
    found = check.results(check.start_program("by_hand", env=_CUBLAS, seconds=seconds, rows=rows))
    lines = []
    for model in (f"{name} {form}" for name, form in models):
        eager, graph = found[f"{model} eager"], found[f"{model} graph"]
        if not errors({"": eager, " ": graph}):
            rates = (f"{eager:,.0f}", f"{graph['steps_per_s']:,.0f}")
            lines.append((model, *rates, f"{graph['steps_per_s'] / eager:.2f}", graph["same_bits"]))
    head = ("Model", "Eager", "Graph", "Ratio", "Bits of eager, by seed")
    check.tables.append(("Steps per second of a captured step", table(head, lines)))
    assert not errors(found)
    assert all(line[-1] == [True, True] for line in lines), lines


@pytest.mark.gpu(step=1, seconds=12, settles="kernels of a step, and the idle time of the GPU")
def test_kernels_of_a_step(check: Check) -> None:
    check.needs_training()
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


@pytest.mark.gpu(step=1, seconds=8, settles="settings.md: the table of `--profile`")
def test_a_profile_counts_each_kernel_once(check: Check) -> None:
    check.needs_training()
    profiled(check, "digits", {}, "--batch-size", "16")
    check.needs_gpu()
