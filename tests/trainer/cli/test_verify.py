"""Digests, the comparison of manifests at a resume, and `verify`."""

import hashlib
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from tests.support.here import Here, training_here
from tests.support.tiny import TEXTS, Tiny
from trainbox.disclosure.recorded_values import shown_arguments, shown_value
from trainbox.errors import Changed, Failure, Stopped, WrongUse
from trainbox.processes.environment import LaunchFacts
from trainer.records import manifest
from trainer.records.compare_records import Evidence, verdict
from trainer.records.compare_runs import first_difference, first_figure_difference
from trainer.records.digest import value_digest
from trainer.records.run_log import RunLog
from trainer.session.verify import verify_run
from trainer.system.signals import StopRequest


def _change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _entry(step: int, **tensors: str) -> dict[str, Any]:
    whole = "".join(tensors.values())
    return {"step": step, "model": whole, "optimizer": "o", "order": "x", "tensors": tensors}


_A, _B = [_entry(0, a="1"), _entry(4, a="2")], _entry(0, a="1", b="1")
# fmt: off
_DIFFERENCES = [
    ([_B, _entry(4, a="2", b="2"), _entry(6, a="9", b="9"), _entry(8, a="3", b="3")],
     [_B, _entry(4, a="2", b="2"), _entry(8, a="3", b="4", c="1")],
     "first difference at step 8 (step 4 is the same): first tensor b, 2 in all"),
    ([_B], [_B | {"order": "y"}],
     "first difference at step 0 (no earlier step was compared): the order of the batches"),
    (_A, [_A[0], _A[1] | {"model": "9"}],
     "first difference at step 4 (step 0 is the same): the weights"),
    (_A, [_A[0], _A[1] | {"tensors": {"a": "9"}}],
     "first difference at step 4 (step 0 is the same): first tensor a, 1 in all"),
    (_A, _A, None),
]
# fmt: on


@pytest.mark.parametrize(("one", "other", "difference"), _DIFFERENCES)
def test_the_first_step_and_tensor_that_differ_are_named(
    one: list[dict[str, Any]], other: list[dict[str, Any]], difference: str | None
) -> None:
    assert first_difference(one, other) == difference


def _evidence(
    name: str, digests: list[dict[str, Any]], *validations: int, best: int | None = None
) -> Evidence:
    metrics = [{"kind": "validation", "step": step, "loss": 1.0} for step in validations]
    return Evidence(name, {"cuda": name}, digests, metrics, 0, best)


_DIGESTS = [_entry(0, a="1"), _entry(4, a="2"), _entry(8, a="3")]


def test_the_verdict_on_two_runs_with_the_same_bits() -> None:
    one = _evidence("A", _DIGESTS, 4, 8, best=8)
    assert verdict(one, replace(one, name="B")) == (
        "SAME BITS: A and B, 3 digests up to step 8, weights 3; no manifest entry differs"
    )


# fmt: off
_VERDICTS = [
    ([*_DIGESTS[:2], _entry(8, a="9")], (4, 8), 8,
     "DIFFERENT BITS: A against B: first difference at step 8 .*differ: cuda: A -> B"),
    (_DIGESTS, (4,), 8, "DIFFERENT FILES: .*: the weights are the same, and the metrics.jsonl of B "
     "has no validation at step 8: if it was rotated or truncated, restore it"),
    (_DIGESTS, (8,), 8, "DIFFERENT FILES: .* the metrics.jsonl of B has no validation at step 4"),
    (_DIGESTS[:2], (4,), 4,
     "DIFFERENT ENDS: A ends at step 8 and B at step 4: the same bits up to step 4, the"),
    (_DIGESTS, (4, 8), 4,
     "DIFFERENT BEST WEIGHTS: the model.safetensors of A is of step 8, and the file of B of "
     "step 4"),
]
# fmt: on


@pytest.mark.parametrize(("digests", "validations", "best", "message"), _VERDICTS)
def test_the_difference_is_named(
    digests: list[dict[str, Any]], validations: tuple[int, ...], best: int, message: str
) -> None:
    one, other = (
        _evidence("A", _DIGESTS, 4, 8, best=8),
        _evidence("B", digests, *validations, best=best),
    )
    with pytest.raises(Failure, match=message) as raised:
        verdict(one, other)
    assert raised.value.exit_code == 8


def test_runs_without_a_common_trained_step_are_not_compared() -> None:
    one = _evidence("A", _DIGESTS, 4, 8)
    with pytest.raises(WrongUse, match="in common .the first digest of A is of step 4"):
        verdict(one, _evidence("B", _DIGESTS[:1]))  # the initial weights do not prove anything


def test_a_run_that_stopped_before_a_validation_is_compared_up_to_its_end() -> None:
    stopped, whole = _evidence("A", _DIGESTS[:2]), _evidence("B", _DIGESTS[:2], 4)
    assert "SAME BITS: A and B, 2 digests up to step 4" in verdict(stopped, whole, 4)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with finished runs of 18 steps and 3 epochs.

    `twin` has the settings of `r`, and `other` has another seed.
    """
    with training_here(tmp_path_factory.mktemp("done")) as here:
        for name, seed in (("r", 0), ("twin", 0), ("other", 1)):
            here.train(name, seed=seed, checkpoint_steps=5)
            # A checkpoint may be written after later steps, and tests name the lines of the file.
            record = here.path(name) / "digests.jsonl"
            lines = record.read_text().splitlines(keepends=True)
            record.write_text("".join(sorted(lines, key=lambda line: json.loads(line)["step"])))
        yield here.folder / "runs"


@pytest.fixture
def finished(here: Here, done: Path) -> Here:
    """Return a folder with copies of the runs of `done`."""
    shutil.copytree(done, "runs")
    return here


def test_each_checkpoint_and_the_last_step_have_a_digest(finished: Here) -> None:
    entries = finished.digests()
    assert [(entry["kind"], entry["step"]) for entry in entries] == [
        ("start", 0),
        ("checkpoint", 5),
        ("step", 6),
        ("checkpoint", 6),
        ("checkpoint", 10),
        ("step", 12),
        ("checkpoint", 12),
        ("checkpoint", 15),
        ("step", 18),
        ("checkpoint", 18),
    ]
    state = finished.state(15)
    assert entries[7]["model"] == value_digest(state["model"])
    assert len({entry["model"] for entry in entries}) == 7
    orders = [entry["order"] for entry in entries if entry["kind"] == "step"]
    assert len(set(orders)) == 3
    names = {
        "forwards",
        "linear.bias",
        "optimizer.linear.bias.step",
        "optimizer.linear.bias.exp_avg",
    }
    assert names < entries[2]["tensors"].keys()
    assert "7 digests up to step 18" in finished.succeeds("verify", "runs/r", "runs/twin")


def test_a_resume_that_did_not_restore_the_digests_differs(finished: Here) -> None:
    path = finished.path("r") / "digests.jsonl"
    last = finished.digests()[-1] | {"kind": "resume"}
    for changes in ({}, {"optimizer": "0" * 64}):
        with path.open("a") as file:
            file.write(json.dumps(last | changes) + "\n")
        if not changes:
            finished.succeeds("verify", "runs/r", "runs/twin")
    err = finished.refused("verify", "runs/r", "runs/twin", code=8)
    assert "line 12 of runs/r/digests.jsonl: the second entry of step 18 has a different" in err


def test_an_early_stop_has_a_digest_of_its_last_step(here: Here) -> None:
    here.train(epochs=9, digest_steps=7, early_stopping="max:loss", patience=2)  # which falls
    assert [(entry["kind"], entry["step"]) for entry in here.digests()][-2:] == [
        ("step", 14),
        ("checkpoint", 18),
    ]
    assert here.digests()[-1]["model"] == here.digest()


def _swap_weights(run: Path) -> None:
    shutil.copy(run.parent / "other/model.safetensors", run)


def _older_weights(run: Path) -> None:
    with safe_open(run / "model.safetensors", "pt") as file:
        assert file.metadata()["step"] == "18"
    state = torch.load(run / "checkpoints/step-00000012.pt", weights_only=True)
    (run / "model.safetensors").write_bytes(save(state["model"], {"step": "12"}))


def _swap_digests(run: Path) -> None:
    shutil.copy(run.parent / "other/digests.jsonl", run)


def _without_validations(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if "validation" not in line))


def _with_line(number: int, text: bytes) -> Callable[[Path], object]:
    """Return a function that replaces a line of digests.jsonl by `text`."""

    def write(run: Path) -> None:
        lines = (run / "digests.jsonl").read_bytes().splitlines(keepends=True)
        (run / "digests.jsonl").write_bytes(b"".join([*lines[: number - 1], text, *lines[number:]]))

    return write


def _with_entry(number: int, **changes: Any) -> Callable[[Path], object]:
    """Return a function that changes an entry of digests.jsonl. None removes a value."""

    def write(run: Path) -> None:
        lines = (run / "digests.jsonl").read_text().splitlines()
        entry = json.loads(lines[number - 1]) | changes
        lines[number - 1] = json.dumps(
            {name: value for name, value in entry.items() if value is not None}
        )
        (run / "digests.jsonl").write_text("".join(f"{line}\n" for line in lines))

    return write


def _as_fifo(name: str) -> Callable[[Path], object]:
    def make(run: Path) -> None:
        (run / name).unlink()
        os.mkfifo(run / name)

    return make


# fmt: off
_CHANGED_RUNS: list[tuple[Callable[[Path], object], str]] = [
    (_swap_weights, "runs/r/model.safetensors is damaged (its weights differ from the entry of "
     "step 18 in digests.jsonl: first tensor linear.weight"),
    (_older_weights, "runs/r/model.safetensors is damaged (it is of step 12, but "),
    (_swap_digests, "its weights differ from the entry of step 12 in digests.jsonl: first tensor"),
    (lambda run: (run / "model.safetensors").unlink(),
     "runs/r/model.safetensors is damaged (it is missing)"),
    (lambda run: (run / "metrics.jsonl").unlink(), "runs/r/metrics.jsonl is missing"),
    (_without_validations, "runs/r/metrics.jsonl has no validation at step 18"),
    (_with_entry(10, model="0" * 64), "line 10 of runs/r/digests.jsonl: the second entry of step"),
    (lambda run: (run / "model.safetensors").write_text("{}"),
     "runs/r/model.safetensors is damaged (it cannot be read: "),
]
# fmt: on


@pytest.mark.parametrize(("change", "message"), _CHANGED_RUNS)
def test_a_run_whose_files_contradict_each_other_differs(
    finished: Here, change: Callable[[Path], object], message: str
) -> None:
    change(finished.path())
    for arguments in (
        ("verify", "runs/r", "--device", "cpu"),
        ("verify", "runs/r", "runs/twin"),
        ("verify", "runs/twin", "runs/r"),
    ):
        err = finished.refused(*arguments, code=8, silent=True)
        assert message in err


# fmt: off
_DAMAGED_RUNS: list[tuple[Callable[[Path], object], str]] = [
    (_with_line(10, b'{"kind": "ste'), "line 10 of runs/r/digests.jsonl is damaged (incomplete)"),
    (_with_line(3, b"[3]\n"), "line 3 of runs/r/digests.jsonl is damaged (not a JSON object)"),
    (_with_line(3, b'{"step": "\xff"}\n'),
     "runs/r/digests.jsonl is damaged ('utf-8' codec can't decode byte 0xff"),
    (_with_entry(3, step=5),
     "line 3 of runs/r/digests.jsonl is damaged (step 5 comes after step 5)"),
    (_with_entry(3, model=None),
     "line 3 of runs/r/digests.jsonl is damaged (model is missing or malformed)"),
    (_with_entry(3, tensors={"a": 1}),
     "line 3 of runs/r/digests.jsonl is damaged (tensors.a is missing or malformed)"),
    (_as_fifo("metrics.jsonl"), "runs/r/metrics.jsonl cannot be read (not a regular file)"),
    (lambda run: (run / "manifest.json").write_text("[]"),
     "runs/r/manifest.json is damaged (not a JSON object)"),
    (lambda run: _change(run / "manifest.json", resumes=[1]),
     "runs/r/manifest.json is damaged (resumes is "),
    (lambda run: (run / "metrics.jsonl").write_text('{"kind": "train"}\n'),
     "line 1 of runs/r/metrics.jsonl is damaged (step"),
]
# fmt: on


@pytest.mark.parametrize(("change", "message"), _DAMAGED_RUNS)
def test_a_damaged_record_is_wrong_use(
    finished: Here, change: Callable[[Path], object], message: str
) -> None:
    change(finished.path())
    for arguments in (("verify", "runs/r", "--device", "cpu"), ("verify", "runs/twin", "runs/r")):
        err = finished.refused(*arguments, silent=True)
        assert message in err


def test_a_truncated_record_is_incomplete(finished: Here) -> None:
    lines = (finished.path() / "digests.jsonl").read_text().splitlines(keepends=True)
    (finished.path() / "digests.jsonl").write_text("".join(lines[:2]))
    for arguments in (("verify", "runs/r", "--device", "cpu"), ("verify", "runs/r", "runs/twin")):
        err = finished.refused(*arguments, code=8, silent=True)
        assert "(step 12 has no entry of a checkpoint in digests.jsonl)" in err
    shutil.rmtree("runs/r/checkpoints")
    for name in ("model.safetensors", "first_checkpoint.json"):
        (finished.path() / name).unlink()
    _without_validations(finished.path())
    err = finished.refused("verify", "runs/r", "--device", "cpu", silent=True)
    assert "runs/r is incomplete (digests.jsonl ends at step 5, metrics.jsonl at step 18)" in err
    err = finished.refused("verify", "runs/r", "runs/twin", silent=True)
    assert "digests.jsonl ends at step 5, metrics.jsonl at step 18" in err
    (finished.path() / "metrics.jsonl").write_text("")
    err = finished.refused("verify", "runs/r", "--device", "cpu")
    assert "is not finished (it ends at step 5" in err
    err = finished.refused("verify", "runs/r", "runs/twin", code=8, silent=True)
    assert "DIFFERENT ENDS: runs/r ends at step 5 and runs/twin at step 18: the same bi" in err


def test_the_first_part_of_a_stopped_run_can_be_verified(here: Here) -> None:
    here.stopped(5, max_steps=15)
    err = here.refused("verify", "runs/r", "--device", "cpu")
    assert "runs/r is not finished (it ends at step 5 without a validation): resume it" in err
    out = here.succeeds("verify", "runs/r", "--device", "cpu", "--steps", "5")
    assert "2 digests up to step 5" in out
    here.refused("verify", "runs/r", "--device", "cpu", "--steps", "6")


def test_the_manifest_has_no_secrets(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_AUTH_URL", "https://karo:hunter2@host")
    monkeypatch.setenv("TORCH_MIRROR", "https://karo:hunter2@host/x")
    hidden = ("TORCH_LOGIN", "TORCH_HUB_BEARER", "NCCL_X_LOGIN", "NCCL_X_TOK")
    for name in hidden:  # names without a rule of their own
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    fields = ("--set", "url=https://karo:hunter2@host", "--set", "api_key=hunter2")
    more = ("--set", "note=plain", "--device", "cpu", "--run", "r", "--max-steps", "6")
    here.succeeds("train", TEXTS, *fields, *more)
    text = (here.path() / "manifest.json").read_text()
    assert "hunter2" not in text
    described = json.loads(text)
    environment = described["environment"]
    assert environment["NCCL_SOCKET_IFNAME"] == "eth0"
    hidden = (*hidden, "TORCH_AUTH_URL", "TORCH_MIRROR")
    assert {environment[name] for name in hidden} == {"(set, not shown)"}
    shown = {"url": "https://(not shown)@host", "api_key": "(set, not shown)", "note": "plain"}
    assert described["settings"]["fields"].items() <= (shown | {"nan_at": 0, "noise": 0.1}).items()
    assert described["argv"][3:7] == ["(not shown)@host", "--set", "api_key=(not shown)", "--set"]
    events = b"".join(path.read_bytes() for path in here.path().glob("events.out.tfevents.*"))
    assert b"task.note" in events
    assert b"hunter2" not in events
    # config.json has the secrets, and was not edited
    here.succeeds("verify", "runs/r", "--device", "cpu")
    config = here.json("config.json")
    here.edit("config.json", fields=config["fields"] | {"note": "other"})
    err = here.refused("verify", "runs/r", "--device", "cpu", code=8)
    assert "settings.fields.note: plain -> other" in err


def test_a_run_compared_with_itself_is_refused_and_a_copy_is_named(finished: Here) -> None:
    Path("link").symlink_to("runs/r")
    for other in ("runs/r", "link"):
        err = finished.refused("verify", "runs/r", other, silent=True)
        assert "both are the same folder" in err
    shutil.copytree("runs/r", "runs/copy")
    out = finished.succeeds("verify", "runs/r", "runs/copy")
    assert out.endswith(
        "; runs/copy is a copy of runs/r: this is one training, compared with itself\n"
    )
    assert "is a copy" not in finished.command("verify", "runs/r", "runs/twin")[1]
    shutil.copy("runs/other/model.safetensors", "runs/copy")
    finished.refused("verify", "runs/r", "runs/copy", code=8)


def test_verify_repeats_the_training_and_compares(here: Here) -> None:
    here.train(task="digits", max_steps=3, digest_steps=2, threads=1)
    out = here.succeeds("verify", "runs/r", "--device", "cpu")
    assert "SAME BITS: runs/r and the repeated run, 3 digests up to step 3" in out
    out = here.succeeds("verify", "runs/r", "--device", "cpu", "--steps", "2")
    assert "2 digests up to step 2" in out
    out = here.succeeds("verify", "runs/r", "--device", "cpu", "--steps", "4")
    assert "3 digests up to step 3" in out
    assert [path.name for path in Path("runs").iterdir()] == ["r"]


def test_validations_are_compared(here: Here) -> None:
    here.train(max_steps=12)
    here.train("other", max_steps=12)
    here.succeeds("verify", "runs/r", "runs/other")
    path = here.path("other") / "metrics.jsonl"
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1])
    assert (last["kind"], last["step"]) == ("validation", 12)
    path.write_text("\n".join([*lines[:-1], json.dumps(last | {"loss": 9.0})]) + "\n")
    err = here.refused("verify", "runs/r", "runs/other", code=8)
    assert "the weights are the same, and the validation at step 12 differs in loss (" in err
    assert first_figure_difference(last, last | {"time_unix_s": 1.0}) is None
    assert first_figure_difference(last, last | {"more": None}) == "more (missing -> null)"


def test_verify_names_the_altered_entry_the_first_step_and_the_first_tensor(here: Here) -> None:
    """Another number of threads adds in another order."""
    here.train(task="digits", max_steps=2, digest_steps=1, threads=1)
    here.edit("config.json", threads=2)
    err = here.refused("verify", "runs/r", "--device", "cpu", code=8)
    assert "first difference at step 1 (step 0 is the same): first tensor " in err
    assert err.endswith("manifest entries that differ: threads: 1 -> 2\n")


_STOPPED = {"max_steps": 15}


# fmt: off
_ENTRIES = [
    ("cuda", "11.0", "cuda: 11.0 -> "),
    ("packages", {"torch": "1.0"}, "packages.torch: 1.0 -> "),
    ("sources", {"tests.support.tiny": "0" * 64},
     "sources.tests.support.tiny: 000000000000... -> "),
    ("data", {"train": "a", "validation": "b"}, "data.train: a -> "),
    ("environment", {"MKL_CBWR": "AVX"}, "environment.MKL_CBWR: AVX -> nothing"),
]
# fmt: on


@pytest.mark.parametrize(("entry", "value", "arguments"), _ENTRIES)
def test_a_resume_after_a_change_of_bits_needs_resume_anyway(
    here: Here, entry: str, value: Any, arguments: str
) -> None:
    here.stopped(5, **_STOPPED)
    here.edit("manifest.json", **{entry: value})
    with pytest.raises(WrongUse) as refused:
        here.train(**_STOPPED)
    assert f"runs/r cannot be resumed with the same bits ({arguments}" in str(refused.value)
    assert "or accept different bits with --resume anyway" in str(refused.value)
    assert arguments in here.train(**_STOPPED, resume="anyway")
    (start,) = here.json("manifest.json")["resumes"]
    assert start["step"] == 5
    assert any(name.startswith(entry) for name in start["changed"])


def test_a_resume_without_its_manifest_needs_resume_anyway(here: Here) -> None:
    here.stopped(5, **_STOPPED)
    (here.path() / "manifest.json").unlink()
    with pytest.raises(WrongUse, match="runs/r/manifest.json is missing or damaged"):
        here.train(**_STOPPED)
    here.train(**_STOPPED, resume="anyway")
    assert here.json("manifest.json")["settings"]["max_steps"] == 15


def test_changes_that_do_not_change_bits_are_listed_at_a_resume(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.stopped(5, **_STOPPED)
    config_file = {"name": "exp.toml", "sha256": "abc"}
    facts = LaunchFacts(reason="the second start", config_file=config_file)
    monkeypatch.setenv(*facts.variable().popitem())
    packages = here.json("manifest.json")["packages"] | {"torchvision": "0.1"}
    here.edit("manifest.json", python="3.0", image_digest="sha256:abc", packages=packages)
    out = here.train(**_STOPPED)
    assert "changed since the run's start: " in out
    assert "packages.torchvision: 0.1 -> " in out
    assert "python: 3.0 -> 3." in out
    assert "image_digest: sha256:abc -> nothing" in out
    described = here.json("manifest.json")
    assert described["plan"]["reason"] is None
    (resumed,) = described["resumes"]
    assert resumed["plan"] == described["plan"] | {"reason": "the second start"}
    assert resumed["config_file"] == config_file
    assert resumed["changed"]["image_digest"] == ["sha256:abc", None]


def test_the_manifest_has_the_first_2400_characters_of_a_value() -> None:
    text = "a, " * 801
    assert shown_value("NCCL_DEBUG_FILE", text) == text[:2400]
    assert shown_arguments(["train", text]) == ["train", text[:2400]]


def test_other_data_have_other_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest_of(dataset: Dataset[Any]) -> str:
        return manifest.dataset_digest(dataset, 0, default_collate)[0]

    task = Tiny()
    data = task.train_dataset(Path())
    digest = digest_of(data)
    assert digest_of(task.train_dataset(Path())) == digest
    data.tensors[0][17, 2] += 1
    assert digest_of(data) != digest
    # only some examples of more than 1 GiB of data are read
    monkeypatch.setattr(manifest, "_HASHED_BYTES", 100)
    digest = digest_of(data)
    data.tensors[0][1, 2] += 1
    assert digest_of(data) == digest
    shorter = TensorDataset(*(tensor[:-1] for tensor in data.tensors))
    assert digest_of(shorter) != digest
    data.tensors[0][0, 2] += 1
    assert digest_of(data) != digest
    # the same examples of 16 and 17 are sampled
    assert digest_of(Subset(data, range(16))) != digest_of(Subset(data, range(17)))


def test_verify_without_a_digest_to_compare_does_not_train(here: Here) -> None:
    here.train(max_steps=6)
    err = here.refused("verify", "runs/r", "--steps", "3", "--device", "cpu", silent=True)
    assert "no digest of a trained step up to step 3 (the first is of step 6): train with" in err


_TASK = """
import importlib, importlib.util
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from package_of_mine import SCALE
from tests.support.tiny import TEXTS, Tiny

spec = importlib.util.spec_from_file_location("unregistered", "unregistered.py")
unregistered = importlib.util.module_from_spec(spec)
spec.loader.exec_module(unregistered)


class Rows(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        import read_by_workers

        return torch.full((4,), index / 50), torch.tensor(read_by_workers.SCALE)


@dataclass(frozen=True)
class Mine(Tiny):
    def train_dataset(self, place):
        return Rows()

    def losses(self, model, batch):
        scale = SCALE * importlib.import_module("imported_late").SCALE * unregistered.SCALE
        return {k: v * scale for k, v in super().losses(model, batch).items()}

    def metrics(self, totals):
        import imported_by_metrics

        return super().metrics(totals)
"""
_HELPERS = {
    "package_of_mine.helper": "package_of_mine/helper.py",  # through the package's __init__
    "linked_task": "elsewhere/task.py",  # the task's own file, behind a symlink
    "imported_late": "imported_late.py",
    "imported_by_metrics": "imported_by_metrics.py",
    "read_by_workers": "read_by_workers.py",
    "linked_task.unregistered": "unregistered.py",  # has no entry in sys.modules
}


@pytest.fixture
def helpers(here: Here, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A task and what it imports; the function forgets the modules, as a new process would not have
    them.
    """
    for path in _HELPERS.values():
        (here.folder / path).parent.mkdir(exist_ok=True)
        (here.folder / path).write_text("SCALE = 1.0\n")
    (here.folder / "package_of_mine/__init__.py").write_text(
        "from package_of_mine.helper import SCALE\n"
    )
    (here.folder / "elsewhere/task.py").write_text(_TASK)
    (here.folder / "linked_task.py").symlink_to("elsewhere/task.py")
    monkeypatch.syspath_prepend(here.folder)

    def forget() -> None:
        for name in [*_HELPERS, "package_of_mine"]:
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()

    return forget


@pytest.mark.parametrize("workers", [0, 1])
def test_the_manifest_lists_every_source_file_that_is_loaded(
    here: Here, helpers: Callable[[], None], workers: int
) -> None:
    helpers()
    here.train(task="linked_task:Mine", max_steps=6, workers=workers)
    helpers()
    sources = here.json("manifest.json")["sources"]
    found = {name: sources[name] for name in _HELPERS}
    assert found == {
        name: hashlib.sha256(Path(path).read_bytes()).hexdigest() for name, path in _HELPERS.items()
    }
    assert not any(
        name.partition(".")[0] in ("torch", "json", "trainbox", "pytest", "__main__")
        for name in sources
    )


@pytest.mark.parametrize("name", ["package_of_mine.helper", "imported_late", "read_by_workers"])
def test_a_resume_with_another_source_file_is_refused_before_it_saves(
    here: Here, helpers: Callable[[], None], name: str
) -> None:
    settings: dict[str, Any] = {
        "task": "linked_task:Mine",
        "max_steps": 12,
        "workers": int(name == "read_by_workers"),
    }
    here.stopped(8, **settings)
    helpers()
    with Path(_HELPERS[name]).open("a") as file:
        file.write("# another text\n")
    with pytest.raises(Changed, match=rf"resumed with the same bits \(sources.{name}: "):
        here.train(**settings)
    helpers()
    assert here.steps()[-1] == 8
    assert f"changed since the run's start: sources.{name}: " in here.train(
        **settings, resume="anyway"
    )
    helpers()
    (start,) = here.json("manifest.json")["resumes"]
    assert list(start["changed"]) == [f"sources.{name}"]


def test_processes_with_other_source_files_are_refused() -> None:
    record = manifest.SourceRecord(Mock(writes=False), {"one": "a"}, False)
    record.compare_and_add([{"one": "a"}, {"one": "a", "only_there": "b"}])
    with pytest.raises(WrongUse, match="module two differs between processes 0 and 1: copy the"):
        record.compare_and_add([{"two": "a"}, {"two": "b"}])


def test_a_source_file_that_changes_before_the_first_checkpoint_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunLog(tmp_path / "r", 0)
    run.folder.write_json("manifest.json", {"sources": {"mine": "a"}})
    manifest.SourceRecord(run, {"mine": "a"}, anyway=True).compare_and_add([{"mine": "b"}])
    run.close()
    assert "changed since the run's start: sources.mine: a -> b" in capsys.readouterr().out
    assert json.loads((tmp_path / "r" / "manifest.json").read_text()) == {"sources": {"mine": "a"}}


def test_a_resume_restores_the_type_of_an_optimizer_state(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("sum", torch.zeros_like(parameter, dtype=torch.float64))
                    state["sum"] += parameter.grad.double() / 3
                    parameter.data -= 0.01 * state["sum"].float()

    monkeypatch.setattr(
        Tiny, "build_optimizer", lambda _t, model, _n, rate, _w: Doubled(model.parameters(), rate)
    )
    here.train("undisturbed", max_steps=12)
    here.stopped(5, max_steps=12)
    here.train(max_steps=12)
    entries = [here.digests(run)[-1] for run in ("r", "undisturbed")]
    assert entries[0]["optimizer"] == entries[1]["optimizer"]
    assert entries[0]["model"] == entries[1]["model"]


def test_a_stopped_verification_names_no_checkpoint_that_is_removed(here: Here) -> None:
    here.train(max_steps=15)
    stop = StopRequest()
    stop.signal_name = "SIGTERM"
    with pytest.raises(Stopped) as caught:
        verify_run(here.path(), None, stop, "cpu", Path("data"))
    assert str(caught.value).startswith("the verification was stopped by ")
    assert str(caught.value).endswith(": the same command begins it again")
