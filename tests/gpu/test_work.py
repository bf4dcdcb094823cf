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


@pytest.mark.gpu(
    step=2, seconds=100, long=True, settles="benchmarks.md: `images` beside a script by hand"
)
def test_pictures_per_second(check: Check) -> None:
    fields, batch_size, workers = _pictures(check)
    seconds = 3 if check.on_gpu else 0.3
    settings = {
        "task": "images",
        "fields": fields,
        "precision": "bf16",
        "batch_size": batch_size,
        "workers": workers,
        "steps_alone": True,
    }
    cases = {name: {**settings, "memory_format": name} for name in _FORMATS}
    ours = check.program("speed", folder=str(check.folder), seconds=seconds, cases=cases)
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
    lines = [
        (
            name,
            f"{hand[name]['one batch']:,.0f}",
            f"{hand[name]['from files']:,.0f}",
            f"{ours[name]['examples_per_s']:,.0f}",
            f"{ours[name]['data_share']:.0%}",
        )
        for name in _FORMATS
    ]
    head = ("Memory format", "By hand, one batch", "By hand", "Trainbox", "Waits for data")
    check.tables.append((f"Pictures per second of {fields['model']}, bf16", table(head, lines)))
    for name in _FORMATS:
        ratio = ours[name]["examples_per_s"] / hand[name]["from files"]
        check.saw(f"{name}: {ratio:.2f} of the script")


@pytest.mark.gpu(step=2, seconds=60, settles="benchmarks.md: `text` beside a script by hand")
def test_bytes_per_second_of_a_language_model(check: Check) -> None:
    check.needs_training()
    fields, batch_size = _text(check)
    seconds = 4 if check.on_gpu else 0.3
    settings = {"task": "text", "fields": fields, "precision": "bf16", "batch_size": batch_size}
    cases = {"Trainbox": {**settings, "steps_alone": True}}
    ours = check.program("speed", folder=str(check.folder), seconds=seconds, cases=cases)
    text = {**fields, "batch_size": batch_size}
    rows = [("Text", "bf16", "eager")]
    hand = check.program("by_hand", seconds=seconds, rows=rows, text=text)
    assert not errors({**ours, **hand})
    step = batch_size * fields["context"]
    mine, plain = ours["Trainbox"]["steps_per_s"], hand["Text bf16 eager"]
    check.saw(f"{step * mine:,.0f} bytes/s, by hand {step * plain:,.0f}: {mine / plain:.2f} of it")


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
