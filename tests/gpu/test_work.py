"""The speed of real work: pictures from files, and a language model.

No figure is a limit: the tables go into benchmarks.md.
"""

from typing import Any

import pytest

from tests.gpu.check import Check, errors
from tests.gpu.machine import no_compiler
from tests.gpu.profiles import profiled
from tests.gpu.rows import table

_FORMATS = ("contiguous", "channels_last")
_SHARED_MEMORY_MIB = 2048  # 16 workers with batches of 37 MiB


def _pictures(check: Check) -> tuple[dict[str, Any], int, int]:
    """Write pictures, and return the fields of the task, the batch size and the workers."""
    check.needs_training("torchvision", "PIL")
    from tests.support.pictures import make_pictures

    unique, copies, side = (16, 256, 400) if check.on_gpu else (8, 4, 40)
    folder = check.folder / "data" / "pictures"
    for path in make_pictures(folder, ("cross", "disc"), unique, seed=0, size=side):
        for number in range(copies):
            path.with_name(f"{path.stem}-{number}.jpg").hardlink_to(path)
    if not check.on_gpu:
        return {"folder": folder.name, "model": "shufflenet_v2_x0_5", "size": 32}, 8, 1
    check.needs_shared_memory(_SHARED_MEMORY_MIB)
    return {"folder": folder.name, "model": "resnet50", "size": 224}, 256, 16


def _text(check: Check) -> tuple[dict[str, Any], int]:
    """Return the fields of the task and the batch size."""
    if not check.on_gpu:
        return {"layers": 1, "heads": 2, "width": 16, "context": 16}, 4
    return {"layers": 12, "heads": 12, "width": 768, "context": 1024}, 32


@pytest.mark.gpu(step=6, seconds=75, settles="benchmarks.md: `text` beside a script by hand")
def test_bytes_per_second_of_a_language_model(check: Check) -> None:
    check.needs_training()
    fields, batch_size = _text(check)
    seconds = 4 if check.on_gpu else 0.1
    settings = {"task": "text", "fields": fields, "precision": "bf16", "batch_size": batch_size}
    cases = {
        "default": {**settings, "steps_alone": True},
        "--fast": {**settings, "steps_alone": True, "deterministic": False},
    }
    text = {**fields, "batch_size": batch_size}
    rows = [("Text", "bf16", "eager"), ("Text", "bf16", "profile")]
    hand = check.program("by_hand", seconds=seconds, rows=rows, text=text)
    ours = check.program("speed", folder=str(check.folder), seconds=seconds, cases=cases)
    step, plain = batch_size * fields["context"], hand["Text bf16 eager"]
    for name in cases:
        if name not in errors(ours):
            mine = ours[name]["steps_per_s"]
            check.saw(f"{name}: {step * mine:,.0f} bytes/s, {mine / plain:.2f} of by hand")
            check.saw(f"rehearsal of {name}: {ours[name]['rehearsal']}")
    kernels = hand["Text bf16 profile"]
    assert not errors({**ours, **hand})
    check.tables.append(("Kernels of text by hand", table(("Kernel", "ms of a step"), kernels)))
    profiled(check, "text", fields, "--precision", "bf16", "--batch-size", str(batch_size))


@pytest.mark.gpu(
    step=6, seconds=75, long=True, settles="benchmarks.md: `images` beside a script by hand"
)
def test_pictures_per_second(check: Check) -> None:
    fields, batch_size, workers = _pictures(check)
    seconds = 4 if check.on_gpu else 0.1
    settings = {
        "task": "images",
        "fields": fields,
        "precision": "bf16",
        "batch_size": batch_size,
        "workers": workers,
        "steps_alone": True,
    }
    cases = {name: {**settings, "memory_format": name} for name in _FORMATS}
    cases["channels_last --fast"] = {**cases["channels_last"], "deterministic": False}
    ours = check.program("speed", folder=str(check.folder), seconds=seconds, cases=cases)
    for name, found in ours.items():
        if name not in errors(ours):
            check.saw(f"rehearsal, {name}: {found['rehearsal']}")
    hand = check.program(
        "pictures_by_hand",
        folder=str(check.folder / "data" / "pictures"),
        seconds=seconds,
        model=fields["model"],
        size=fields["size"],
        batch_size=batch_size,
        workers=workers,
    )
    assert not errors(ours)
    lines = [(f"by hand, {name}", f"{rate:,.0f}", "") for name, rate in hand.items()]
    lines += [
        (f"Trainbox, {name}", f"{part['examples_per_s']:,.0f}", f"{part['data_share']:.0%}")
        for name, part in ours.items()
    ]
    head = ("Loop", "Pictures per second", "Waits for data")
    check.tables.append((f"{fields['model']}, bf16", table(head, lines)))


@pytest.mark.gpu(
    step=3, seconds=400, long=True, settles="benchmarks.md: workers, memory formats, --compile"
)
def test_the_bench_of_real_work(check: Check) -> None:
    fields, batch_size, workers = _pictures(check)
    sizes = ("--batch-size", f"{batch_size // 2},{batch_size}")
    for memory_format in _FORMATS:
        words = (*sizes, "--workers", f"{workers // 2},{workers}")
        _bench(check, "images", fields, *words, "--memory-format", memory_format)
    fields, batch_size = _text(check)
    size = ("--batch-size", str(batch_size))
    _bench(check, "text", fields, *size)
    _bench(check, "text", fields, *size, "--fast")
    if reason := no_compiler(check.device):
        check.saw(reason)
    else:
        _bench(check, "text", fields, *size, "--compile")
        text = {**fields, "batch_size": batch_size}
        rows = [("Text", "bf16", "compile")]
        hand = check.program("by_hand", seconds=3, rows=rows, text=text)
        assert not errors(hand)
        check.saw(
            f"text by hand, compiled: {batch_size * hand['Text bf16 compile']:,.0f} windows/s"
        )
    profiled(check, "text", fields, *size)


def _bench(check: Check, task: str, fields: dict[str, Any], *words: str) -> None:
    where = ("--gpus", "1") if check.on_gpu else ("--processes", "1", "--device", "cpu")
    pairs = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    measured = ("--rounds", "1", "--seconds", "6" if check.on_gpu else "0.3")
    data = ("--data-dir", str(check.folder / "data"), "--precision", "bf16")
    ended = check.trainbox("bench", task, *where, *pairs, *measured, *data, *words)
    title = " ".join(("`trainbox bench", task, *words)) + "`"
    check.tables.append((title, [x for x in ended.out.splitlines() if x.startswith("|")]))
