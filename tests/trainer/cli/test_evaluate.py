"""`evaluate`: the figures of a stored run again, on its own data and on other data."""

import csv
import io
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.here import Here, files_of
from tests.support.ranks import Ranks
from tests.support.tiny import Predicting, Split, StepCounter, Tiny
from trainbox.order import derive_seed
from trainer.records.run_folder import RunFolder
from trainer.records.run_record import RunRecord
from trainer.tasks.digits import Digits
from trainer.use.evaluate import write_results
from trainer.use.per_example import bootstrap_intervals

SPLIT = "tests.support.tiny:Split"

# Its figures depend on the seed of each batch of a validation.
_NOISY = """
import torch
from trainer.tasks.digits import Digits

class Noisy(Digits):
    def prepare(self, batch, training):
        images, labels = super().prepare(batch, training)
        return images + torch.rand(images.shape), labels
"""


def _evaluation(folder: Path, run: str = "r", name: str = "best-validation") -> dict[str, Any]:
    path = folder / "runs" / run / "evaluations" / name / "evaluation.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _recorded(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a validation's entry in metrics.jsonl."""
    common = ("kind", "step", "epoch", "time_unix_s")
    return {name: value for name, value in entry.items() if name not in common}


_EVALUATE = ("evaluate", "runs/r", "--device", "cpu")


def test_any_number_of_processes_has_the_figures_of_the_training(ranks: Ranks) -> None:
    (ranks.folder / "noisy.py").write_text(textwrap.dedent(_NOISY))
    task = ("noisy.py:Noisy", "--device", "cpu", "--threads", "1", "--max-steps", "3", "--run", "r")
    ranks.train(2, *task, "--batch-size", "70", "--set", "width=4")
    (recorded,) = ranks.entries("r", "validation")
    before = files_of(ranks.folder / "runs/r", without="evaluations")
    for processes in (1, 3):
        words = ("--device", "cpu", "--predictions", f"out-{processes}.csv")
        ended = ranks(processes, "evaluate", "runs/r", *words)
        assert (ended.codes, ended.errs) == ([0] * processes, [""] * processes)
        assert ended.out.splitlines()[1:] == [
            "validation: 360 examples, with 95% intervals from 1,000 resamples of them",
            *(
                f"  {name:8}  {recorded[name]:.6g}  [{low:.4g}, {high:.4g}]"
                for name, (low, high) in _evaluation(ranks.folder)["intervals"].items()
            ),
            "  equal to the training's validation at step 3",
            f"  written to runs/r/evaluations/best-validation and out-{processes}.csv",
        ]
        assert ended.outs[1:] == [""] * (processes - 1)
        found = _evaluation(ranks.folder)
        assert found["figures"] == _recorded(recorded)
        assert (found["world_size"], found["step"], found["examples"]) == (processes, 3, 360)
    assert files_of(ranks.folder / "runs/r", without="evaluations") == before
    pictures = (ranks.folder / "runs/r/evaluations/best-validation").glob("*.png")
    assert sorted(path.name for path in pictures) == ["confusion_matrix.png", "examples.png"]
    text = (ranks.folder / "out-1.csv").read_text()
    assert (ranks.folder / "out-3.csv").read_text() == text
    rows = list(csv.DictReader(io.StringIO(text)))
    truth = Digits().validation_dataset(Path()).tensors[1].tolist()
    assert [(row["id"], row["truth"]) for row in rows] == [
        (str(i), str(label)) for i, label in enumerate(truth)
    ]
    right = sum(row["truth"] == row["prediction"] for row in rows)
    assert right / 360 == found["figures"]["accuracy"]


def test_the_best_and_the_last_checkpoint_are_evaluated_while_the_run_trains(here: Here) -> None:
    here.train(best_by="max:loss")  # the loss falls, so the first validation is the best
    steps = [entry["step"] for entry in here.entries("validation")]
    assert steps == [6, 12, 18]
    training = RunFolder(here.path(), writes=True)  # it has the lease, as a training does
    before = files_of(here.path(), without="evaluations")
    for which, step in (("best", 6), ("last", 18)):
        out = here.succeeds(*_EVALUATE, "--checkpoint", which)
        found = _evaluation(here.folder, name=f"{which}-validation")
        digest = next(
            json.loads(line)["model"]
            for line in (here.path() / "digests.jsonl").read_text().splitlines()
            if json.loads(line)["step"] == step
        )
        assert out.startswith(f"runs/r: {which} checkpoint, step {step}, weights {digest[:16]}\n")
        assert f"equal to the training's validation at step {step}\n" in out
        assert found["weights_sha256"] == digest
        recorded = here.entries("validation")[steps.index(step)]
        assert found["figures"] == _recorded(recorded)
    assert files_of(here.path(), without="evaluations") == before
    training.close()


def test_a_damaged_line_of_the_metrics_is_named(here: Here) -> None:
    """`verify` refuses the file. The validation of the step is compared nevertheless."""
    here.train(max_steps=12)
    path = here.path() / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0][:20] + "\n", *lines[1:]]))
    out = here.succeeds(*_EVALUATE, "--checkpoint", "last")
    text = (
        "equal to the training's validation at step 12; line 1 of runs/r/metrics.jsonl is damaged ("
    )
    assert text in out
    here.train("s", max_steps=12)
    out = here.succeeds("compare", "runs/r", "runs/s")
    assert "\ncurves     line 1 of runs/r/metrics.jsonl is damaged (" in out


def test_a_step_that_the_training_did_not_validate_is_not_compared(here: Here) -> None:
    here.stopped(8)
    out = here.succeeds(*_EVALUATE, "--checkpoint", "last")
    assert "not compared: metrics.jsonl has no validation at step 8\n" in out
    assert _evaluation(here.folder, name="last-validation")["training"]["equal"] is None
    here.stopped(2, "s")
    err = here.refused("evaluate", "runs/s", "--device", "cpu")
    assert "runs/s has no best checkpoint: it was not validated yet, or only with NaN" in err
    here.succeeds("evaluate", "runs/s", "--device", "cpu", "--checkpoint", "last")


def test_other_figures_than_those_of_the_training_exit_with_8(here: Here) -> None:
    here.train()
    metrics = here.path() / "metrics.jsonl"
    last = here.entries("validation")[-1]["loss"]
    metrics.write_text(metrics.read_text().replace(repr(last), repr(math.nextafter(last, 1e9))))
    code, out, err = here.command(*_EVALUATE)
    assert code == 8
    now = math.nextafter(last, 1e9)
    line = f"different from the training's validation at step 18: loss ({now!r} -> {last!r})"
    assert line in err and line in out
    found = _evaluation(here.folder)
    assert (found["training"]["equal"], found["figures"]["loss"]) == (False, last)
    # A change that may change bits explains the difference.
    here.edit("manifest.json", packages=here.json("manifest.json")["packages"] | {"torch": "1.0"})
    out = here.succeeds(*_EVALUATE)
    assert "changed since the run's start: packages.torch: 1.0 -> " in out
    assert "; changed: packages.torch: 1.0 -> " in out


def test_a_run_with_fast_may_have_other_figures(here: Here) -> None:
    here.train(deterministic=False)
    metrics = here.path() / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": ', '"loss": 9'))
    out = here.succeeds(*_EVALUATE)
    assert "different from the training's validation" in out and "; the run has --fast\n" in out


def test_other_data_and_test_data_are_not_compared(here: Here) -> None:
    for folder, shift in (("data", "0"), ("other", "100")):
        (here.folder / folder).mkdir()
        (here.folder / folder / "shift").write_text(shift)
    here.train(task=SPLIT)
    code, out, _ = here.command(*_EVALUATE)
    assert code == 0 and "equal to the training's validation at step 18" in out
    out = here.succeeds(*_EVALUATE, "--data-dir", "other", "--out", "results/other")
    assert "changed since the run's start: data.validation: " in out
    assert "not compared: the validation data differ from the training's\n" in out
    other = json.loads((here.folder / "results/other/evaluation.json").read_text())
    figures = _evaluation(here.folder)["figures"]
    assert other["figures"]["loss"] > 50 * figures["loss"]
    # Each dataset is built with the same random numbers.
    out = here.succeeds(*_EVALUATE, "--data", "test")
    assert "test: 10 examples, " in out
    assert "not compared: the training did not read the test data\n" in out
    torch.manual_seed(derive_seed(0, "data"))
    inputs_N4, targets_N = Split().test_dataset(Path("data")).tensors
    model = StepCounter().eval()
    found = _evaluation(here.folder, name="best-test")
    model.load_state_dict(here.state(found["step"])["model"])
    loss = float((model(inputs_N4).detach() - targets_N).square().mean())
    assert found["figures"]["loss"] == pytest.approx(loss, rel=1e-6)


def test_a_task_that_is_not_here_is_named_with_its_run(here: Here) -> None:
    text = "from tests.support.tiny import Tiny\nclass Old(Tiny): ...\n"
    file = here.folder / "renamed_tasks" / "moving_task.py"
    file.parent.mkdir()
    file.write_text(text)
    here.train(task="renamed_tasks/moving_task.py:Old", max_steps=2)
    file.rename("elsewhere.py")
    assert here.refused(*_EVALUATE).endswith(
        f"is a run of the task renamed_tasks/moving_task.py:Old, and the current folder "
        f"({here.folder}) has no such file: start the command in the folder that has "
        "renamed_tasks/moving_task.py\n"
    )
    file.write_text(text.replace("Old", "Newer"))  # of another size, for the cache of Python
    sys.modules.pop("moving_task")
    cure = "if the class has another name now, write Old = NEW_NAME below it, and add --anyway\n"
    assert here.refused(*_EVALUATE).endswith(f"moving_task.py does not define Old: {cure}")
    file.write_text(f"{text.replace('Old', 'New')}Old = New\n")
    sys.modules.pop("moving_task")
    assert "equal to the training's validation" in here.succeeds(*_EVALUATE, "--anyway")


def test_a_task_without_test_dataset_is_refused(here: Here) -> None:
    here.train(max_steps=2)
    err = here.refused(*_EVALUATE, "--data", "test")
    assert "task Tiny has no method test_dataset(): define it, or use --data validation" in err


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (shutil.rmtree, 2, "evaluate runs/r: the folder does not exist: "),
        (lambda run: (run / "manifest.json").unlink(), 2, "manifest.json cannot be read ("),
        (
            lambda run: (run / "evaluations").write_text(""),
            4,
            "cannot write runs/r/evaluations/best-validation: Not a directory (a file is where a "
            "folder is needed): remove that file, or set another folder with --out FOLDER",
        ),
    ],
)
def test_a_run_that_cannot_be_evaluated_is_one_line(
    here: Here, change: Any, code: int, message: str
) -> None:
    here.train(max_steps=2)
    change(here.path())
    err = here.refused(*_EVALUATE, code=code, silent=True)
    assert message in err
    assert not list(here.path().glob("checkpoints/*.damaged"))


def test_a_checkpoint_that_the_training_removes_is_an_error_of_one_line(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train(max_steps=12)
    find = RunRecord.find

    def find_and_remove(record: RunRecord, which: str) -> Any:
        found = find(record, which)
        (here.path() / "checkpoints/step-00000012.pt").unlink()
        return found

    monkeypatch.setattr(RunRecord, "find", find_and_remove)
    err = here.refused(*_EVALUATE, "--checkpoint", "last", code=4, silent=True)
    assert "step-00000012.pt was removed by the training of runs/r: start the same command" in err


def test_a_signal_stops_the_evaluation(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.train(max_steps=2)
    monkeypatch.setattr("trainer.system.signals.StopRequest.__bool__", lambda _stop: True)
    err = here.refused(*_EVALUATE, code=143)
    assert "before the end of the evaluation: start the same command again" in err
    assert not (here.path() / "evaluations/best-validation/evaluation.json").exists()


# Predictions and intervals.


def test_a_task_defines_its_own_predictions_and_ids(here: Here) -> None:
    here.train(task="tests.support.tiny:Predicting")
    here.succeeds(*_EVALUATE, "--predictions", "p.csv")
    header, *rows = Path("p.csv").read_text().splitlines()
    assert header == "id,target,output,inputs_0,inputs_1,inputs_2,inputs_3,large"
    examples = Tiny().validation_dataset(Path())
    assert [row.split(",")[0] for row in rows] == [f"example {i}" for i in range(20)]
    assert [float(row.split(",")[1]) for row in rows] == pytest.approx(
        examples.tensors[1].tolist(), rel=1e-8
    )
    assert [float(row.split(",")[5]) for row in rows] == pytest.approx(
        examples.tensors[0][:, 2].tolist(), rel=1e-8
    )
    assert {row.split(",")[-1] for row in rows} == {"0", "1"}


# fmt: off
_TASKS = [
    ("Tiny", "task Tiny has no method predictions(): define it to return {name: tensor (B,)}"),
    ("ScalarPrediction", "predictions() returned 'mean' as Tensor of shape (): return a tensor "
     "of shape (8,) or (8, K)"),
    ("FewIds", "the dataset has 20 examples but 3 ids: make `ids` a sequence"),
]
# fmt: on


@pytest.mark.parametrize(("task", "message"), _TASKS)
def test_predictions_that_cannot_be_written_exit_with_2(
    here: Here, task: str, message: str
) -> None:
    here.train(task=f"tests.support.tiny:{task}", max_steps=2)
    err = here.refused(*_EVALUATE, "--predictions", "p.csv")
    assert message in err
    assert not Path("p.csv").exists()


def test_a_wrong_path_of_predictions_is_refused_before_the_evaluation(here: Here) -> None:
    here.train(task="tests.support.tiny:Predicting", max_steps=2)
    Path("folder").mkdir()
    Path("folder/file").write_text("")
    os.mkfifo("folder/pipe")
    for path in ("folder", "folder/file/p.csv", "folder/pipe", "/proc/p.csv"):
        err = here.refused(*_EVALUATE, "--predictions", path, code=4, silent=True)
        assert f"cannot write {path.removesuffix('/p.csv')}" in err
        assert "with --predictions FILE" in err
    assert Path("folder/pipe").is_fifo()
    assert not (here.path() / "evaluations/best-validation/evaluation.json").exists()


@pytest.mark.parametrize("task", ["Tiny", "FigureCount"])
def test_intervals_are_of_means_over_resampled_examples(here: Here, task: str) -> None:
    here.train(task=f"tests.support.tiny:{task}")
    out = here.succeeds(*_EVALUATE)
    assert "20 examples, with 95% intervals from 1,000 resamples of them\n" in out
    found = _evaluation(here.folder)
    model = StepCounter()
    model.load_state_dict(here.state(found["step"])["model"])
    inputs_N4, targets_N = Tiny().validation_dataset(Path()).tensors
    losses_N = (model.eval()(inputs_N4).detach() - targets_N).double() ** 2
    generator = torch.Generator().manual_seed(1)
    means = losses_N[torch.randint(20, (20000, 20), generator=generator)].mean(1)
    expected = [float(means.quantile(share)) for share in (0.025, 0.975)]
    width = expected[1] - expected[0]
    assert found["intervals"]["loss"] == pytest.approx(expected, abs=0.03 * width)
    first = found["intervals"]
    here.command(*_EVALUATE)
    assert _evaluation(here.folder)["intervals"] == first
    code, out, _ = here.command(*_EVALUATE, "--no-intervals")
    assert "validation: 20 examples\n" in out
    assert _evaluation(here.folder)["intervals"] == {}


class _PerPositive(Tiny):
    def metrics(self, totals: Mapping[str, torch.Tensor]) -> dict[str, float]:
        positive = float(totals["positive"])
        return {
            "loss": float(totals["loss"] / totals["examples"]),
            "per_positive": 1 / positive if positive else math.nan,
        }


def test_a_metric_that_is_not_finite_in_a_resample_has_no_interval() -> None:
    statistics = {"loss": torch.tensor([1.0, 3.0]), "positive": torch.tensor([0, 1])}
    assert bootstrap_intervals(_PerPositive(), statistics, 0) == {"loss": [1.0, 3.0]}


def test_the_seed_decides_the_resamples() -> None:
    statistics = {"value": torch.arange(50.0).square()}
    zero, one, again = (bootstrap_intervals(Tiny(), statistics, seed) for seed in (0, 1, 1))
    assert zero != one == again


def test_a_picture_with_a_slash_in_its_name_is_in_the_folder(tmp_path: Path) -> None:
    write_results(tmp_path, {}, {"examples/wrong": torch.zeros(3, 4, 5, dtype=torch.uint8)})
    assert (tmp_path / "examples-wrong.png").is_file()


def test_too_many_numbers_have_no_intervals_and_no_predictions(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train(task="tests.support.tiny:Predicting", max_steps=2)
    monkeypatch.setattr("trainer.use.per_example.MOST_NUMBERS", 19)
    out = here.succeeds(*_EVALUATE)
    assert "no intervals: the statistics of each example cannot be collected\n" in out
    with patch.object(Predicting, "losses", autospec=True, side_effect=Predicting.losses) as losses:
        err = here.refused(*_EVALUATE, "--predictions", "p.csv")
    assert "predictions() returns more than " in err
    assert losses.call_count == 1  # of three batches
