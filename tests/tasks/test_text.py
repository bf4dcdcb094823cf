"""The task `text`: the files and their parts, the windows, the model and trainings."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.here import Here
from tests.support.texts import FIELDS, write_texts
from trainbox.errors import StorageFailure, WrongUse
from trainer.tasks.language.corpus import TextFile, Windows, split_texts, standard_library
from trainer.tasks.language.gpt import Gpt
from trainer.tasks.reading.files import is_held_out
from trainer.tasks.text import Text

_TXT = (".txt",)
_SHORT: dict[str, Any] = {
    "task": "text",
    "max_steps": 4,
    "batch_size": 6,
    "workers": 0,
    "threads": 1,
    "fields": FIELDS,
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return the folder of 12 texts."""
    write_texts(tmp_path / "data/texts")
    return tmp_path / "data/texts"


# Trainings.


def test_a_run_reports_its_texts_and_metrics(here: Here, texts: Path) -> None:
    sizes = {path.stem: path.stat().st_size for path in texts.rglob("*.txt")}
    held = sizes.pop("06")
    out = here.train(**_SHORT)
    assert f"\ntext       texts, {sum(sizes.values()):,} bytes in 11 file(s)\n" in out
    assert f"\nvalidation {held:,} bytes in 1 file(s)\n" in out
    (entry,) = here.entries("validation")
    assert entry["bits_per_byte"] == pytest.approx(entry["loss"] / math.log(2))
    assert entry["perplexity"] == pytest.approx(math.exp(entry["loss"]))


@pytest.mark.slow
@pytest.mark.rare
def test_a_training_learns_to_spell(here: Here, texts: Path) -> None:
    """A model that knows only the frequency of each byte needs 3.6 bits."""
    write_texts(texts, 60)
    fields = FIELDS | {"width": 32, "dropout": 0.0}
    here.train(**_SHORT | {"max_steps": 400, "batch_size": 16, "fields": fields})
    assert here.entries("validation")[-1]["bits_per_byte"] < 1.8


# The files.


def test_the_name_of_a_file_decides_its_part_and_new_files_move_none(texts: Path) -> None:
    held_out = [is_held_out(f"rose/{number}.jpg", 0.2) for number in range(2000)]
    assert 0.18 < sum(held_out) / 2000 < 0.22
    train, held = split_texts(texts, _TXT, 0.2)
    assert [text.path.relative_to(texts).as_posix() for text in held] == ["a/06.txt"]
    write_texts(texts, 40)
    more_train, more_held = split_texts(texts, _TXT, 0.2)
    assert set(train) < set(more_train) and set(held) < set(more_held)
    paths = [text.path for text in more_train]
    assert paths == sorted(paths) and len(more_train) + len(more_held) == 40


def test_train_without_validation_is_split_and_validation_alone_is_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "val", 40)
    with pytest.raises(
        WrongUse, match="a folder val but no folder train: add train, or rename val"
    ):
        split_texts(tmp_path, _TXT, 0.2)
    (tmp_path / "val").rename(tmp_path / "train")
    train, held = split_texts(tmp_path, _TXT, 0.2)
    assert train and held and len(train) + len(held) == 40


def test_the_folder_test_has_the_texts_of_the_test(tmp_path: Path) -> None:
    for part, size in (("train", 90), ("val", 80), ("test", 70)):
        (tmp_path / part).mkdir()
        (tmp_path / part / "a.txt").write_bytes(b"x" * size)
    task = Text(folder=".", endings="txt", context=8)
    assert task.test_dataset(tmp_path).paths == [str(tmp_path / "test/a.txt")]
    with pytest.raises(WrongUse, match="^the standard library has no test data: set a folder of"):
        Text().test_dataset(tmp_path)


def test_without_a_folder_the_texts_are_modules_of_python(tmp_path: Path) -> None:
    paths = standard_library()
    folder = Path(os.__file__).parent
    assert {folder / "os.py", folder / "argparse.py"} <= set(paths)
    assert all(path.parent == folder for path in paths)
    task = Text(context=1000)
    train, held = task._windows(tmp_path)
    assert sorted(train.paths + held.paths) == sorted(map(str, paths))
    assert (train.shifted, held.shifted) == (True, False)
    assert bytes(held[0][0].numpy()) == Path(held.paths[0]).read_bytes()[:1001]


# The windows.


def _files(folder: Path, *contents: bytes) -> list[TextFile]:
    paths = [folder / f"{number}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return [TextFile(path, len(content)) for path, content in zip(paths, contents, strict=True)]


def _read(windows: Windows) -> list[bytes]:
    return [bytes(windows[k][0].numpy()) for k in range(len(windows))]


@pytest.mark.parametrize(
    ("contents", "context", "expected"),
    [
        ([b"abcdefg"], 3, [b"abcd", b"defg"]),
        ([b"abcdefgh"], 4, [b"abcde", b"efgh\0"]),
        ([b"ab", b"", b"cde"], 3, [b"ab\0\0", b"\0cde"]),
        ([b"ab", b"c", b"de"], 5, [b"ab\0c\0d"]),
        ([b"", b"abc"], 1, [b"\0a", b"ab", b"bc", b"c\0"]),
    ],
)
def test_windows_share_one_byte_and_cross_the_ends_of_files(
    tmp_path: Path, contents: list[bytes], context: int, expected: list[bytes]
) -> None:
    files = _files(tmp_path, *contents)
    assert _read(Windows(files, context, shifted=False, purpose="validation")) == expected
    with pytest.raises(IndexError):
        Windows(files, context, shifted=False, purpose="validation")[len(expected)]


def test_a_text_must_have_a_window(tmp_path: Path) -> None:
    files = _files(tmp_path, b"abc")
    assert _read(Windows(files, 3, shifted=True, purpose="training")) == [b"abc\0"]
    with pytest.raises(WrongUse, match=r"for training have 3 bytes, fewer than a "):
        Windows(files, 4, shifted=True, purpose="training")


def test_a_shifted_window_starts_up_to_a_context_later(tmp_path: Path) -> None:
    windows = Windows(_files(tmp_path, bytes(range(65, 85))), 6, shifted=True, purpose="training")
    torch.manual_seed(0)
    starts = [{int(windows[k][0][0]) - 65 for _ in range(100)} for k in range(3)]
    assert starts == [set(range(6)), set(range(6, 12)), {12, 13, 14}]  # the last ends with the text


@pytest.mark.parametrize("broken", [os.unlink, lambda path: os.truncate(path, 3)])
def test_a_text_that_changes_during_the_training_is_named(
    tmp_path: Path, broken: Callable[[Path], None]
) -> None:
    windows = Windows(_files(tmp_path, bytes(20)), 6, shifted=False, purpose="validation")
    broken(tmp_path / "0.txt")
    with pytest.raises(StorageFailure, match=r"0\.txt cannot be read \(.*\): restore the text as"):
        windows[1]


# The model.


def test_the_number_of_parameters_is_that_of_gpt_2() -> None:
    with torch.device("meta"):
        model = Gpt(layers=12, heads=12, width=768, context=1024, dropout=0.1)
    # As published, 124,439,808 parameters with 50,257 tokens.
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 - (50_257 - 256) * 768


def test_the_weights_start_as_those_of_gpt_2() -> None:
    weights = Gpt(layers=8, heads=2, width=64, context=64, dropout=0.0).state_dict()
    for name in ("embedding", "positions", "blocks.3.attention.input", "blocks.3.grow"):
        assert weights[f"{name}.weight"].std() == pytest.approx(0.02, rel=0.05)
    for name in ("attention.output", "shrink"):
        assert weights[f"blocks.3.{name}.weight"].std() == pytest.approx(0.005, rel=0.05)
    assert not weights["blocks.3.shrink.bias"].any()


def test_a_byte_sees_only_the_bytes_before_it() -> None:
    torch.manual_seed(0)
    model = Gpt(layers=2, heads=2, width=16, context=8, dropout=0.0)
    bytes_BT = torch.randint(256, (2, 8))
    other_BT = bytes_BT.clone()
    other_BT[:, 5] = (other_BT[:, 5] + 1) % 256
    differ_BT = (model(bytes_BT) - model(other_BT)).abs().amax(2) > 1e-6
    assert differ_BT.tolist() == [[False] * 5 + [True] * 3] * 2
    assert model(bytes_BT[:, :3]).shape == (2, 3, 256)


def test_only_a_training_drops_activations() -> None:
    torch.manual_seed(0)
    model = Gpt(layers=2, heads=2, width=16, context=8, dropout=0.5)
    without = Gpt(layers=2, heads=2, width=16, context=8, dropout=0.0)
    without.load_state_dict(model.state_dict())
    bytes_BT = torch.randint(256, (2, 8))
    assert not torch.equal(model(bytes_BT), without(bytes_BT))
    assert torch.equal(model.eval()(bytes_BT), without(bytes_BT))


def test_the_loss_of_a_model_without_weights_is_that_of_256_bytes() -> None:
    task = Text(layers=1, heads=1, width=4, context=5)
    model = task.build_model().requires_grad_(False)
    torch.nn.init.zeros_(model.embedding.weight)  # type: ignore[arg-type]
    batch = task.prepare((torch.arange(18, dtype=torch.uint8).view(3, 6),), training=False)
    assert [part.tolist()[0] for part in batch] == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]
    losses_B = task.losses(model, batch)["cross_entropy"]
    assert torch.allclose(losses_B, torch.full((3,), math.log(256)))
    metrics = task.metrics({"loss": losses_B.double().sum(), "examples": torch.tensor(3.0)})
    assert metrics == pytest.approx({"loss": math.log(256), "bits_per_byte": 8, "perplexity": 256})


# Errors.


def _each(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return a function that changes each text but the first."""
    return lambda folder: [change(path) for path in sorted(folder.rglob("*.txt"))[1:]]


def _a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("all texts in one file")


def _no_validation_text(folder: Path) -> None:
    folder.rename(folder.with_name("train"))
    (folder / "val").mkdir(parents=True)
    folder.with_name("train").rename(folder / "train")


# fmt: off
_BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (_a_file, "data/texts is a file: put text files into a folder, and name the folder with "),
    (lambda folder: [path.rename(path.with_suffix(".bin")) for path in folder.rglob("*.txt")],
     "data/texts has no text file (.txt, .md, .rst, .py): add one, or set other "),
    (_each(Path.unlink), "data/texts: none of its 1 text file(s) is for "),
    (_no_validation_text, "data/texts/val has no text file (.txt, .md, .rst, .py): add one"),
    (_each(lambda path: path.write_bytes(b"x")),
     "1 text file(s) for validation have 1 bytes, fewer than a window of context=16 and one more: "
     "add text, or lower --set context=N"),
    (lambda folder: (folder / "a/gone.txt").symlink_to("no.txt"),
     "data/texts/a/gone.txt cannot be read (No such file or directory): restore "),
]
# fmt: on


@pytest.mark.parametrize(("broken", "message"), _BROKEN)
def test_texts_that_cannot_be_used_are_one_line_and_exit_2(
    here: Here, texts: Path, broken: Callable[[Path], None], message: str
) -> None:
    broken(texts)
    words = [f"--set={name}={value}" for name, value in FIELDS.items()]
    err = here.refused("train", "text", *words, "--device=cpu", "--threads=1", "--run=r")
    assert err.startswith(f"trainbox: {message}"), err
