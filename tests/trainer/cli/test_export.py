"""`export`: the model of a run as a file that gives the same outputs without Trainbox."""

import contextlib
import csv
import dataclasses
import hashlib
import html
import importlib.util
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import markdown
import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.support.commands import clean_environment
from tests.support.here import Here, files_of
from tests.support.pictures import make_pictures
from tests.support.pictures import picture as drawn_picture
from trainer.cli import commands
from trainer.tasks.digits import Digits
from trainer.tasks.images import Images
from trainer.tasks.imaging import picture_task
from trainer.use import export_program
from trainer.use.export import ROUNDING, TOLERANCE, compared, difference
from trainer.use.export_program import FORMATS

_ONNX = all(importlib.util.find_spec(name) for name in FORMATS["onnx"].packages)
_DIGITS: dict[str, Any] = {"task": "digits", "max_steps": 30, "fields": {"width": 4}}


_EXPORT = ("export", "runs/r")


def test_the_table_of_options_has_each_format() -> None:
    """The table does not import them, as it must not load torch."""
    (to,) = (param for param in commands.cli.commands["export"].params if param.name == "to")
    assert isinstance(to.type, click.Choice) and [*to.type.choices] == list(FORMATS)


def _loaded(path: Path) -> torch.nn.Module:
    with path.open("rb") as file:
        module: torch.nn.Module = torch.export.load(file).module()
    return module


def _examples(count: int) -> Tensor:
    images_NCHW: Tensor = Digits().validation_dataset(Path()).tensors[0]
    return images_NCHW[:count]


@pytest.mark.slow
@pytest.mark.rare
def test_the_file_has_the_best_weights_or_the_last_and_takes_any_batch(here: Here) -> None:
    here.train(**_DIGITS | {"best_by": "max:loss", "max_steps": 44})  # the first is the best
    before = files_of(here.path(), without="exports")
    outputs = {}
    for which, step in (("best", 22), ("last", 44)):
        folder = Path(f"runs/r/exports/{which}-pt2")
        folder.mkdir(parents=True)
        (folder / "inputs.py").write_text("# of another model")
        out = here.succeeds(*_EXPORT, "--checkpoint", which)
        assert not (folder / "inputs.py").exists()
        digest = re.search(rf"^runs/r: {which} checkpoint, step {step}, weights (\w+)\n", out)
        largest = re.search(r"largest difference (\S+) \(tolerance 0.0001 of the largest out", out)
        assert digest and largest and float(largest[1]) < 1e-5
        assert "\nuint8 (batch, 1, 8, 8) -> float32 (batch, 10)\n" in out
        assert "equals the model on 16 validation examples and on 1: " in out
        assert out.endswith(f"\nwritten to {folder}/model.pt2 and {folder}/model.md\n")
        # The model of the task with these weights, in evaluation mode.
        model = Digits(width=4).build_model().eval()
        model.load_state_dict(here.state(step)["model"])
        loaded = _loaded(folder / "model.pt2")
        for count in (1, 7, 360):
            expected = model(_examples(count).float() / 16)
            torch.testing.assert_close(loaded(_examples(count)), expected)
        outputs[which] = loaded(_examples(7))
        card = (folder / "model.md").read_text()
        assert f"| weights_sha256 | {digest[1]}" in card and "| licence | not set (" in card
    assert not torch.equal(outputs["best"], outputs["last"])
    assert files_of(here.path(), without="exports") == before


def test_a_run_with_another_precision_and_memory_format_is_exported_in_float32(here: Here) -> None:
    here.train(**_DIGITS | {"max_steps": 2}, precision="bf16", memory_format="channels_last")
    for name in ("config.json", "manifest.json"):  # a precision that only GPUs have
        path = here.path() / name
        path.write_text(path.read_text().replace('"precision": "bf16"', '"precision": "fp16"'))
    out = here.succeeds(*_EXPORT)
    assert "\nuint8 (batch, 1, 8, 8) -> float32 (batch, 10)\n" in out
    model = Digits(width=4).build_model().eval()
    model.load_state_dict(here.state(2)["model"])
    loaded = _loaded(here.path() / "exports/best-pt2/model.pt2")
    torch.testing.assert_close(loaded(_examples(7)), model(_examples(7).float() / 16))


def _pictures_of_each_kind(folder: Path) -> list[Path]:
    """Write a picture with transparency, palette, CMYK, 16 bits and EXIF, and a large JPEG."""
    folder.mkdir()
    picture = drawn_picture(0, "new", 400)
    clear = picture.convert("RGBA")
    clear.putalpha(picture.convert("L").point(lambda value: 255 if value > 90 else 0))
    clear.save(folder / "alpha.png")
    picture.convert("CMYK").save(folder / "cmyk.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.resize((300, 200)).save(folder / "exif.jpg", exif=exif)
    picture.save(folder / "large.jpg")
    picture.convert("P").save(folder / "palette.gif", transparency=3)
    values = numpy.asarray(picture.convert("L")).astype(numpy.uint16) * 257
    Image.fromarray(values).save(folder / "sixteen.png")
    return sorted(path.relative_to(folder.parent) for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.rare
def test_the_file_of_images_has_the_predictions_of_evaluate(here: Here) -> None:
    make_pictures(here.folder / "data/shapes", ("cross", "disc"), 12, seed=0)
    fields = {"folder": "shapes", "model": "squeezenet1_1", "size": 32, "ema": 0.5}
    here.train(task="images", max_steps=2, batch_size=8, workers=0, threads=1, fields=fields)
    picture_task._colours.cache_clear()  # as in the process of `trainbox export`
    out = here.succeeds(*_EXPORT, "--out", "exported")
    assert "\nuint8 (batch, 32, 32, 3) -> float32 (batch, 2)\n" in out
    here.succeeds("evaluate", "runs/r", "--device", "cpu", "--predictions", "p.csv")
    rows = list(csv.DictReader(io.StringIO(Path("p.csv").read_text())))
    # The pictures as bytes: the file contains the normalization.
    dataset = Images(**fields, classes="cross/disc").validation_dataset(Path("data"))
    pictures_BHWC = torch.stack([dataset[index][0] for index in range(len(rows))])
    probabilities_BK = _loaded(Path("exported/model.pt2"))(pictures_BHWC).softmax(1)
    for row, (cross, disc) in zip(rows, probabilities_BK.tolist(), strict=True):
        assert [float(row["probability_cross"]), float(row["probability_disc"])] == pytest.approx(
            [cross, disc], abs=1e-6
        )
    # The program of the page reads pictures of each kind as `predict` does.
    new = _pictures_of_each_kind(here.folder / "new")
    code, out, _ = here.command("predict", "runs/r", "--device", "cpu", "new")
    assert code == 0
    predicted = {row["file"]: row for row in csv.DictReader(io.StringIO(out))}
    page = (Path(__file__).parents[3] / "docs/guides/trained-model.md").read_text()
    (program,) = (block for block in _blocks(page) if "rose.jpg" in block)
    assert [str(path) for path in new] == sorted(predicted)
    ended = subprocess.run(
        [sys.executable, "-c", program.replace("rose.jpg", f"../{new[0]}")],
        cwd="exported",
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    shares = [[float(number) for number in re.findall(r"[\d.]+e?-?\d*", ended.stdout)[:2]]]
    load = runpy.run_path("exported/inputs.py")["load"]
    pictures_BHWC = torch.stack([load(path) for path in new[1:]])
    shares += _loaded(Path("exported/model.pt2"))(pictures_BHWC).softmax(1).tolist()
    rows = [predicted[str(path)] for path in new]
    wanted = [[float(row[f"probability_{name}"]) for name in ("cross", "disc")] for row in rows]
    assert shares == [pytest.approx(pair, abs=1e-3) for pair in wanted], ended
    assert "trainer" not in Path("exported/inputs.py").read_text()
    card = Path("exported/model.md").read_text()
    assert "`load(path)` in `inputs.py` reads a file as an input. Read a picture file as" in card
    assert "- the columns of the output are logits of the classes: 0: cross, 1: disc\n" in card


def _blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def _lines(card: str) -> str:
    (block,) = _blocks(card)
    assert len(block.splitlines()) <= 5
    return block


def test_the_card_names_the_origin_and_hides_secrets(here: Here) -> None:
    here.train(task="tests.support.tiny:Texts", max_steps=2, fields={"api_key": "hunter2|x"})
    here.succeeds(*_EXPORT, "--licence", "CC-BY-4.0")
    folder = here.path() / "exports/best-pt2"
    card = (folder / "model.md").read_text()
    (validation,) = here.entries("validation")
    digest = hashlib.sha256((folder / "model.pt2").read_bytes()).hexdigest()
    for row in (
        "| task | tests.support.tiny:Texts |",
        "| run | r |",
        "| checkpoint | best |",
        "| step | 2 |",
        "| licence | CC-BY-4.0 |",
        f"| file_sha256 | {digest} |",
        "| data.validation | ",
        f"| packages.torch | {torch.__version__.partition('+')[0]}",
        f"| loss | {validation['loss']} |",
        "| task.api_key | (set, not shown) |",
        "| max_steps | 2 |",
    ):
        assert row in card, row
    assert "hunter2" not in card


def test_the_card_of_the_best_step_has_the_metrics_of_the_verified_checkpoint(here: Here) -> None:
    here.train(best_by="max:loss")  # the loss falls, so the first validation is the best
    losses = [entry["loss"] for entry in here.entries("validation")]
    metrics = here.path() / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace(repr(losses[0]), "0.0"))
    for which, loss in (("best", losses[0]), ("last", losses[-1])):
        here.succeeds(*_EXPORT, "--checkpoint", which)
        card = (here.path() / f"exports/{which}-pt2/model.md").read_text()
        assert f"| loss | {loss} |" in card


def test_the_card_has_the_metrics_of_the_test_for_these_weights(here: Here) -> None:
    (here.folder / "data").mkdir()
    (here.folder / "data/shift").write_text("0")
    here.train(task="tests.support.tiny:Split", max_steps=6)
    here.succeeds("evaluate", "runs/r", "--data", "test", "--device", "cpu")
    here.succeeds(*_EXPORT)
    card = (here.path() / "exports/best-pt2/model.md").read_text()
    _, _, section = card.partition("## Metrics of the test on 10 examples, with 95% intervals\n")
    assert re.match(r"\n\| Name \| Value \|\n\|---\|---\|\n\| loss \| [\d.]+ \([\d.]+ to ", section)
    here.edit("evaluations/best-test/evaluation.json", weights_sha256="0" * 64)
    here.succeeds(*_EXPORT)
    assert "of the test" not in (here.path() / "exports/best-pt2/model.md").read_text()


def test_the_card_shows_the_texts_of_a_user_as_they_are(here: Here) -> None:
    bad = "<img src=x onerror=alert(1)>|`[a](b)"
    Path("mine.py").write_text(
        textwrap.dedent(f"""
        from dataclasses import dataclass
        from trainer.tasks.digits import Digits
        @dataclass(frozen=True)
        class Mine(Digits):
            class_names = ({bad!r}, *"123456789")
            note: str = ""
        """)
    )
    here.train(**_DIGITS | {"task": "mine.py:Mine", "fields": {"width": 4, "note": bad}})
    here.succeeds(*_EXPORT, "--licence", bad)
    card = (here.path() / "exports/best-pt2/model.md").read_text()
    assert "<img" not in card
    for before, after in (("classes: 0: ", ", 1: 1, "), ("licence | ", " |"), ("note | ", " |")):
        assert bad in html.unescape(card.partition(before)[2].partition(after)[0])
    (row,) = (line for line in card.splitlines() if line.startswith("| task.note "))
    assert row.count("|") == 3
    page = markdown.markdown(card, extensions=["tables", "fenced_code"])
    assert "<img" not in page
    assert f"<td>{bad}</td>" in html.unescape(page)


@pytest.mark.slow
def test_the_lines_of_the_card_run_without_trainbox(here: Here) -> None:
    here.train(**_DIGITS | {"max_steps": 2})
    here.succeeds(*_EXPORT)
    folder = here.path() / "exports/best-pt2"
    program = _lines((folder / "model.md").read_text())
    check = "from importlib.util import find_spec; assert not find_spec('trainer'), 'on the path'\n"
    # With -S, the editable installation of Trainbox is not on the path.
    ended = subprocess.run(
        [sys.executable, "-S", "-c", f"{program}{check}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    model = Digits(width=4).build_model().eval()
    model.load_state_dict(here.state(2)["model"])
    assert ended.stdout == f"{model(torch.zeros(8, 1, 8, 8)).detach()}\n"


@pytest.mark.skipif(not _ONNX, reason="the packages for ONNX are not installed")
def test_the_onnx_file_takes_any_batch(here: Here) -> None:
    import onnxruntime

    here.train(**_DIGITS)
    here.succeeds(*_EXPORT, "--to", "onnx")
    folder = here.path() / "exports/best-onnx"
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    (given,) = session.get_inputs()
    assert (given.name, given.shape) == ("inputs", ["batch", 1, 8, 8])
    here.succeeds(*_EXPORT)
    loaded = _loaded(here.path() / "exports/best-pt2/model.pt2")
    for count in (1, 7):
        (found,) = session.run(None, {"inputs": _examples(count).numpy()})
        torch.testing.assert_close(torch.from_numpy(found), loaded(_examples(count)).detach())
    with contextlib.chdir(folder):
        exec(_lines(Path("model.md").read_text()))  # noqa: S102


# Failures.


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train(max_steps=2)
    monkeypatch.setattr(
        export_program, "find_spec", lambda name: None if name == "onnxscript" else name
    )
    err = here.refused(*_EXPORT, "--to", "onnx", silent=True)
    assert "--to onnx needs packages that are not installed (onnxscript): " in err
    assert "`pip install onnx onnxscript onnxruntime`\n" in err
    assert not (here.path() / "exports").exists()


@pytest.mark.parametrize("change", ["values", "count", "random"])
def test_a_file_with_other_outputs_exits_with_8_and_is_removed(
    here: Here, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    task = "tests.support.tiny:Tiny"
    if change == "random":
        Path("noisy.py").write_text(
            textwrap.dedent("""
            import torch
            from tests.support.tiny import Tiny
            class Noisy(Tiny):
                def prepare(self, batch, training):
                    return batch[0] + torch.rand_like(batch[0]), batch[1]
            """)
        )
        task = "noisy.py:Noisy"
    here.train(task=task, max_steps=2)
    load = FORMATS["pt2"].load

    def broken(path: Path) -> Any:
        def run(inputs: Mapping[str, Tensor]) -> list[Tensor]:
            found = load(path)(inputs)
            if change == "count":
                return [*found, *found]
            # One example is right, so only the other batch size shows the error.
            return [value * (1.001 if len(value) == 1 else 1) for value in found]

        return run

    if change != "random":
        monkeypatch.setitem(
            FORMATS,
            "pt2",
            dataclasses.replace(FORMATS["pt2"], load=broken),
        )
    err = here.refused(*_EXPORT, code=8)
    assert "DIFFERENT OUTPUTS: runs/r: on " in err and "no file was written" in err
    assert [path.name for path in (here.path() / "exports/best-pt2").iterdir()] == ["export.log"]


def test_a_model_that_torch_cannot_write_as_onnx_exits_with_2(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        warnings.warn("this function will be removed", FutureWarning, stacklevel=1)
        raise torch.onnx.OnnxExporterError("step 3/3. Next steps:") from ValueError("no pinv\nmore")

    here.train(max_steps=2)
    monkeypatch.setattr(export_program, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.onnx, "export", refuse)
    err = here.refused(*_EXPORT, "--to", "onnx")
    assert err == "trainbox: torch cannot write the model as ONNX (no pinv): use --to pt2\n"
    folder = here.path() / "exports/best-onnx"
    assert [path.name for path in folder.iterdir()] == ["export.log"]
    assert "step 3/3" in (folder / "export.log").read_text()


def test_a_signal_stops_the_export_and_leaves_no_file(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train(max_steps=2)

    def load(path: Path) -> Any:
        assert path.name == "model.pt2.tmp"
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setitem(FORMATS, "pt2", dataclasses.replace(FORMATS["pt2"], load=load))
    err = here.refused(*_EXPORT, code=128 + signal.SIGUSR1)
    assert "stopped by SIGUSR1 before the end of the export: start the same command" in err
    assert [path.name for path in (here.path() / "exports/best-pt2").iterdir()] == ["export.log"]


def test_a_changed_task_is_refused_unless_accepted(here: Here) -> None:
    here.train(max_steps=2)
    sources = here.json("manifest.json")["sources"] | {"tests.support.tiny": "an earlier digest"}
    here.edit("manifest.json", sources=sources)
    err = here.refused(*_EXPORT)
    assert "the task of runs/r was changed since the run's start (sources.tests.support" in err
    assert "or accept the new ones with --anyway" in err
    out = here.succeeds(*_EXPORT, "--anyway")
    line = "sources.tests.support.tiny: an earlier digest -> "
    assert f"\nchanged since the run's start: {line}" in out
    card = (here.path() / "exports/best-pt2/model.md").read_text()
    assert f"| changed | {line}" in card


@pytest.mark.parametrize(
    ("found", "wanted", "apart", "allowed"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0, 4 * TOLERANCE),
        ([torch.inf, torch.nan, 2.0], [torch.inf, torch.nan, 2.0], 0, 2 * TOLERANCE),
        ([torch.inf], [-torch.inf], torch.inf, ROUNDING),
        ([1.0], [torch.nan], torch.inf, ROUNDING),
        ([0.0, 0.002], [0.0, 0.001], 0.001, ROUNDING),
        ([0.0], [0.1], 0.1, 0.1 * TOLERANCE),
        ([3], [4], 1, 0),
        ([1], [1.0], torch.inf, 0),
        ([1.0], [1.0, 1.0], torch.inf, 0),
    ],
)
def test_the_difference_of_two_outputs(
    found: list[Any], wanted: list[Any], apart: float, allowed: float
) -> None:
    assert difference(torch.tensor(found), torch.tensor(wanted)) == pytest.approx((apart, allowed))


def test_the_largest_difference_of_all_outputs_is_reported() -> None:
    wanted = [torch.tensor([1.0, 1.00005]), torch.tensor([1.00002])]
    largest = compared([torch.ones(2), torch.ones(1)], wanted, "the run")
    assert largest == pytest.approx(5e-5, rel=1e-2)
