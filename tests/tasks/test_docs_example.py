"""The tasks of the pages train as the pages state, and the reference has the docstrings."""

import contextlib
import importlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.support import task_reference
from tests.support.here import Here, board_of
from tests.support.ranks import Ranks

_GUIDES = Path(__file__).parents[2] / "docs/guides"
_REFERENCE = task_reference.PAGE


def _page() -> str:
    """Return the guide and the reference of tasks."""
    return (_GUIDES / "own-task.md").read_text() + _REFERENCE.read_text()


def _code(page: str, text: str) -> str:
    """Return the only block of Python on `page` that contains `text`."""
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = [block for block in blocks if text in block]
    return str(code)


def _write_task(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write my_tasks/`name`.py, which the next training in this process imports."""
    (folder / "my_tasks").mkdir(exist_ok=True)
    (folder / f"my_tasks/{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_the_example_trains_as_the_page_states(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    page = _page()
    code = _code(page, "class Gestures")
    assert len(code.splitlines()) <= 45
    (command,) = re.findall(
        r"^trainbox (train my_tasks/gestures\.py:Gestures --set width=64)", page, re.MULTILINE
    )
    _write_task(here.folder, "gestures", code, monkeypatch)
    out = here.succeeds(*command.split(), "--device", "cpu", "--run", "r")
    best = max(entry["accuracy"] for entry in here.entries("validation"))
    assert 0.9 < best <= 1
    assert "Gestures, " in out
    out = here.succeeds("tasks", "my_tasks/gestures.py:Gestures")
    assert "--set width=...  int, default 32" in out
    # The page then loads the best weights.
    script = _code(page, "load_file").replace("runs/gestures-9ce1", "runs/r")
    script = script.replace("from my_tasks.gestures", "from gestures")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(script, "use.py", "exec"), {})  # noqa: S102 - the page's own code
    names = printed.getvalue().split()
    assert len(names) == 5
    assert set(names) <= {"circle", "line", "zigzag"}


def test_the_command_for_a_new_file_trains_it(here: Here) -> None:
    out = here.succeeds("new", "my tasks/new_one.py")
    command = shlex.split(out.partition("to train it: trainbox ")[2])
    assert command == ["train", "my tasks/new_one.py:Gestures"]
    importlib.invalidate_caches()  # one process writes and imports it
    out = here.succeeds(*command, "--device", "cpu", "--max-steps", "1", "--run", "r")
    assert "Gestures, " in out


@pytest.mark.slow
@pytest.mark.rare
def test_the_example_with_a_loss_of_its_own_trains_as_the_page_states(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = _page()
    code = _code(page, "class Waves")
    (command,) = re.findall(r"^trainbox (train my_tasks/waves\.py:Waves)$", page, re.MULTILINE)
    _write_task(here.folder, "waves", code, monkeypatch)
    out = here.succeeds(*command.split(), "--device", "cpu", "--run", "r")
    entries = here.entries("validation")
    assert entries[-1]["rmse"] < 0.1
    assert all(abs(entry["rmse"] ** 2 - entry["loss"]) < 1e-6 for entry in entries)
    assert "best       loss " in out
    # The page adds a metric of the training, which does not change the weights.
    code_of_metric = code + _code(page, "class NearWaves")
    _write_task(here.folder, "waves", code_of_metric, monkeypatch)
    out = here.succeeds("train", "my_tasks/waves.py:NearWaves", "--device", "cpu", "--run", "near")
    assert here.digest("near") == here.digest("r")
    assert 0.9 < here.entries("train", "near")[-1]["near"] <= 1
    assert " (best); training near 0.9" in out
    # The page draws a picture in a thread.
    _write_task(here.folder, "waves", code + _code(page, "class DrawnWaves"), monkeypatch)
    words = ("--max-steps", "1", "--device", "cpu", "--run", "drawn")
    here.succeeds("train", "my_tasks/waves.py:DrawnWaves", *words)
    board = board_of(here.path("drawn"))
    (picture,) = board.Images("validation/heights")
    assert (picture.width, picture.height) == (400, 400)
    # The page shows the message for inputs of float64.
    assert code.count("manual_seed(seed))") == 1
    code = code.replace("manual_seed(seed))", "manual_seed(seed), dtype=torch.float64)")
    _write_task(here.folder, "waves", code, monkeypatch)
    err = here.refused(*command.split(), "--device", "cpu", "--run", "s")
    message, _, log = " ".join(err.split()).partition("; ")
    assert f"{message}; " in " ".join(page.split())
    assert log == "traceback in runs/s/logs/rank-0.log"


def test_the_weighted_examples_count_as_the_page_states(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = _page()
    code = _code(page, "class Waves") + _code(page, "class WeightedWaves")
    _write_task(here.folder, "waves", code, monkeypatch)
    # One step of the whole set, which does not change the weights of the model.
    words = ("--batch-size", "2048", "--max-steps", "1", "--lr", "1e-30", "--run", "r")
    here.succeeds("train", "my_tasks/waves.py:WeightedWaves", "--device", "cpu", *words)
    task = sys.modules["waves"].WeightedWaves()
    model = task.build_model()
    model.load_state_dict(here.weights())
    (train,), (validation,) = here.entries("train"), here.entries("validation")
    for entry, dataset in (
        (validation, task.validation_dataset(here.folder)),
        (train, task.train_dataset(here.folder)),
    ):
        inputs, heights, weights = dataset.tensors
        assert weights.max() > 1.2
        mean = (weights * (model(inputs) - heights) ** 2).sum() / weights.sum()
        assert entry["loss"] == pytest.approx(mean.item(), rel=1e-5)
    mean.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert train["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_the_two_optimizers_of_the_page_train_a_generator(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_task(here.folder, "around_three", _code(_page(), "class AroundThree"), monkeypatch)
    out = here.succeeds(
        "train", "my_tasks/around_three.py:AroundThree", "--device", "cpu", "--run", "r"
    )
    assert "optimizer  Adam + Adam, " in out
    distances = [entry["distance"] for entry in here.entries("validation")]
    assert distances[0] > 1
    assert min(distances) < 0.2


def test_the_schedules_of_the_page_lower_the_learning_rate(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = _page()
    parts = [_code(page, f"class {name}") for name in ("Waves", "SteppedWaves", "OneCycle")]
    _write_task(here.folder, "waves", "".join([*parts, _code(page, "class Patient")]), monkeypatch)
    words = ("--device", "cpu", "--batch-size", "2048", "--lr", "0.5", "--log-steps", "1")
    expected = {
        "SteppedWaves": {0: 1, 29: 1, 30: 0.1, 60: 0.01},
        "TwoDrops": {0: 1, 30: 0.2, 59: 0.2, 60: 0.04},
        "OneCycle": {0: 0.04, 20: 1, 69: 4e-6},
    }
    for name, factors in expected.items():
        task = f"my_tasks/waves.py:{name}"
        here.succeeds("train", task, *words, "--epochs", "70", "--run", name)
        rates = [entry["learning_rate"] / 0.5 for entry in here.entries("train", name)]
        assert {k: rates[k] for k in factors} == pytest.approx(factors, rel=0.01)
    here.succeeds("train", "my_tasks/waves.py:Patient", *words, "--epochs", "70", "--run", "p")
    assert here.entries("train", "p")[-1]["learning_rate"] < 0.5


def test_the_clips_of_a_recording_are_averaged_in_a_validation(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_task(here.folder, "clips", _code(_page(), "class Clips"), monkeypatch)
    words = ("--device", "cpu", "--workers", "0", "--run", "r")
    here.succeeds("train", "my_tasks/clips.py:Clips", *words)
    last = here.entries("validation")[-1]
    assert sum(map(sum, last["confusion"])) == 256  # recordings, not clips
    assert last["accuracy"] > 0.9
    # One clip alone is not enough.
    task = sys.modules["clips"].Clips()
    model = task.build_model()
    model.load_state_dict(here.weights())
    clips, labels = map(torch.stack, zip(*task.validation_dataset(None), strict=True))
    single = (model(clips[:, 0]).argmax(1) == labels).float().mean()
    assert float(single) < last["accuracy"]


def test_the_optimizer_of_the_page_draws_the_same_on_two_ranks_and_after_a_resume(
    ranks: Ranks,
) -> None:
    page = _page()
    code = _code(page, "class Waves") + _code(page, "class GuessedWaves")
    (ranks.folder / "my_tasks").mkdir()
    (ranks.folder / "my_tasks/guessed.py").write_text(code)
    words = ("my_tasks/guessed.py:GuessedWaves", "--shards", "2", "--max-steps", "12")
    one = ranks.train(1, *words, "--run", "one")
    two = ranks.train(2, *words, "--run", "r", "--checkpoint-steps", "5", "--keep", "9")
    for path in (ranks.folder / "runs/r/checkpoints").iterdir():
        if path.stem.startswith("step-") and path.stem > "step-00000005":
            path.unlink()
    resumed = ranks.train(1, *words, "--run", "r")
    assert "resume     from step 5" in resumed.out
    assert [two.digest, resumed.digest] == [one.digest] * 2


def test_a_picture_of_the_page_counts_the_whole_validation_set(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = _page()
    parts = [_code(page, f"class {name}") for name in ("Waves", "DrawnWaves", "CountedWaves")]
    _write_task(here.folder, "counted", "".join(parts), monkeypatch)
    words = ("--max-steps", "1", "--device", "cpu", "--run", "r")
    here.succeeds("train", "my_tasks/counted.py:CountedWaves", *words)
    (entry,) = here.entries("validation")
    assert sum(map(sum, entry["counts"])) == 2048
    (picture,) = board_of(here.path()).Images("validation/counts")
    assert (picture.width, picture.height) == (400, 400)


def test_both_data_sets_of_the_page_have_one_teacher(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = _page()
    head = _code(page, "class Waves").partition("class Waves")[0]
    _write_task(here.folder, "taught", head + _code(page, "class Taught"), monkeypatch)
    words = ("--device", "cpu", "--lr", "0.1", "--epochs", "20")
    weights = []
    for seed in ("1", "2"):
        here.succeeds("train", "my_tasks/taught.py:Taught", *words, "--seed", seed, "--run", seed)
        assert here.entries("validation", seed)[-1]["loss"] < 1e-3
        weights.append(here.weights(seed)["0.weight"])
    assert (weights[0] - weights[1]).abs().max() > 0.1


def test_sequences_of_different_length_are_classified(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = _page()
    (command,) = re.findall(r"^trainbox (train my_tasks/rising\.py:Rising)$", page, re.MULTILINE)
    _write_task(here.folder, "rising", _code(page, "class Rising"), monkeypatch)
    words = ("--device", "cpu", "--workers", "0", "--run", "r")
    here.succeeds(*command.split(), *words)
    assert here.entries("validation")[-1]["accuracy"] > 0.9
    here.command("export", "runs/r")
    assert (here.path() / "exports/best-pt2/model.pt2").exists()


def test_the_guide_is_short_and_the_reference_has_the_docstrings() -> None:
    assert len((_GUIDES / "own-task.md").read_text().splitlines()) <= 270
    assert task_reference.reference() in _REFERENCE.read_text(), (
        "write it again: python -P -m tests.support.task_reference"
    )


def test_the_padded_sequences_have_the_same_bits_on_one_to_three_processes_and_after_a_resume(
    ranks: Ranks,
) -> None:
    page = _page()
    (command,) = re.findall(
        r"^trainbox train (my_tasks/sequences\.py:Sequences)$", page, re.MULTILINE
    )
    (ranks.folder / "my_tasks").mkdir()
    (ranks.folder / "my_tasks/sequences.py").write_text(_code(page, "class Sequences"))
    words = (command, "--shards", "3", "--accumulation", "2", "--max-steps", "16", "--run", "r")
    runs = ranks.folder / "runs"
    alone = ranks.train(1, *words, "--workers", "1", "--checkpoint-steps", "8", "--keep", "9")
    loss = ranks.entries("r", "validation")[-1]["loss"]
    assert loss < 0.1
    # Resume the run from step 8 on two processes.
    for path in (runs / "r/checkpoints").iterdir():
        if path.stem.startswith("step-") and path.stem > "step-00000008":
            path.unlink()
    resumed = ranks.train(2, *words, "--workers", "0")
    assert "resume     from step 8" in resumed.out
    (runs / "r").rename(runs / "resumed")
    three = ranks.train(3, *words, "--workers", "0")
    assert [three.digest, resumed.digest] == [alone.digest] * 2
    for run in ("r", "resumed"):
        assert ranks.entries(run, "validation")[-1]["loss"] == loss


def test_the_task_of_the_moved_loop_trains(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (_GUIDES / "library.md").read_text()
    (command,) = re.findall(r"^trainbox (train my_tasks/curve\.py:Curve)$", page, re.MULTILINE)
    _write_task(here.folder, "curve", _code(page, "class Curve"), monkeypatch)
    here.succeeds(*command.split(), "--device", "cpu", "--run", "r")
    assert here.entries("validation")[-1]["loss"] < 0.05


def test_the_example_of_pictures_in_folders_trains_with_their_classes(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = _page()
    code = _code(page, "class Pictures")
    (command,) = re.findall(
        r"^trainbox (train my_tasks/pictures\.py:Pictures .*)$", page, re.MULTILINE
    )
    _write_task(here.folder, "pictures", code, monkeypatch)
    for part, count in (("train", 8), ("validation", 3)):
        for colour in ("red", "lime", "blue"):
            folder = here.folder / "data/flowers" / part / colour
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (12 + number, 10), colour).save(folder / f"{number}.png")
    settings = "--batch-size 8 --epochs 8 --lr 0.05 --workers 0"
    options = ("--set", "size=8", "--set", "width=4", *settings.split())
    out = here.succeeds(*command.split(), *options, "--device", "cpu", "--run", "r")
    assert "24 training and 9 validation examples" in out
    last = here.entries("validation")[-1]
    assert [sum(row) for row in last["confusion"]] == [3, 3, 3]
    assert last["accuracy"] == 1
    (here.folder / "data/flowers/validation/red").rename(
        here.folder / "data/flowers/validation/crimson"
    )
    err = here.refused(*command.split(), *options, "--device", "cpu", "--run", "s")
    assert "data/flowers/validation has other classes (['blue', 'crimson', 'lime'])" in err
    err = here.refused(
        *command.split(), *options, "--set", "folder=roses", "--device", "cpu", "--run", "t"
    )
    assert err.startswith("trainbox: task Pictures: with_data() raised FileNotFoundError: ")
    assert ": put the data there, or set its folder with --data-dir; " in err
