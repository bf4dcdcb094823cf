"""The speed of training steps. No figure is a limit: the table goes into benchmarks.md."""

from typing import Any

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.machine import no_compiler
from tests.gpu.profiles import profiled
from tests.gpu.rows import table

_MODELS = [(name, form) for name in ("Mlp", "RandomMnist") for form in ("fp32", "bf16")]
_RATE = {"learning_rate": 1e-6, "batch_size": 128}  # as in benchmarks/loop.py
# Steps alone, and trainings with what Trainbox records beside the steps.
_ALONE = {"eager": {"capture": "off"}, "captured": {"capture": "auto"}}
_RECORDS: dict[str, dict[str, Any]] = {
    "default": {},
    "--log-steps 1": {"log_steps": 1},
    "--digest-steps 1": {"digest_steps": 1},
    "--fast": {"deterministic": False},
}


def _names() -> list[str]:
    return [f"{name} {form}" for name, form in _MODELS]


@pytest.mark.gpu(step=6, seconds=90, long=True, settles="benchmarks.md: steps beside loops by hand")
def test_steps_per_second(check: Check) -> None:
    check.needs_training("torchvision")
    seconds = 5 if check.on_gpu else 0.1
    rows = [(*model, "eager") for model in _MODELS]
    if reason := no_compiler(check.device):
        check.saw(reason)
    else:
        rows += [(name, form, "compile") for name, form in _MODELS if form == "bf16"]
    cases = {
        f"{name} {form}, {kind}": {
            "task": f"benchmarks.loop:{name}",
            "precision": form,
            "steps_alone": True,
            **_RATE,
            **settings,
        }
        for name, form in _MODELS
        for kind, settings in _ALONE.items()
    }
    hand = check.program("by_hand", seconds=seconds, rows=rows)
    ours = check.program("speed", folder=str(check.folder), seconds=seconds, cases=cases)
    lines = []
    for model in _names():
        of_hand = [hand.get(f"{model} {kind}") for kind in ("eager", "compile")]
        best = max(rate for rate in of_hand if isinstance(rate, float))
        found = [ours[f"{model}, {kind}"] for kind in _ALONE]
        if not errors(dict(enumerate(found))):  # type: ignore[arg-type]
            rates = [part["steps_per_s"] for part in found]
            shown = [f"{rate:,.0f}" if isinstance(rate, float) else "-" for rate in of_hand]
            shown += [f"{rate:,.0f} ({rate / best:.2f})" for rate in rates]
            lines.append((model, *shown, found[-1]["eager"]))
            check.saw(f"{model}: {rates[0] / best:.2f} and {rates[1] / best:.2f} of by hand")
    head = ("Model", "By hand", "Compiled", "Eager", "Captured", "Not captured because")
    check.tables.append(("Steps per second, without records", table(head, lines)))
    assert not errors({**hand, **ours})


@pytest.mark.gpu(step=6, seconds=55, long=True, settles="benchmarks.md: the cost of records")
def test_trainings_with_records(check: Check) -> None:
    check.needs_training("torchvision")
    cases = {
        f"{name} {form}": {"task": f"benchmarks.loop:{name}", "precision": form, **_RATE}
        for name, form in _MODELS
    }
    cases |= {
        f"digits, {name}": {"task": "digits", "batch_size": 64, **settings}
        for name, settings in {**_RECORDS, "steps alone": {"steps_alone": True}}.items()
    }
    seconds = 3 if check.on_gpu else 0.1
    found = check.program("speed", folder=str(check.folder), seconds=seconds, cases=cases)
    lines = [
        (name, f"{part['steps_per_s']:,.0f}", part["eager"] or "captured")
        for name, part in found.items()
        if name not in errors(found)
    ]
    head = ("Training", "Steps per second", "Step")
    check.tables.append(("Steps per second, with records and validations", table(head, lines)))
    assert not errors(found)


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
