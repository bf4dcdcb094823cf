"""What proves a run: digests, the manifest that is compared at a resume, verify and diff."""

import hashlib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.conftest import Trainbox
from tests.trainer import tiny
from tests.trainer.here import Here, StopAfter
from tests.trainer.tiny import Tiny
from trainer import manifest
from trainer.compare import Evidence, Parting, first_other_validation, first_parting, read_entries, verdict
from trainer.errors import Changed, Differs, Preempted, WrongUse


def _digests(here: Here, run: str = "r") -> list[dict[str, Any]]:
    return read_entries(here.path(run) / "digests.jsonl")


def _change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_digests_stand_at_the_start_each_epoch_and_the_end(here: Here) -> None:
    here.train(max_steps=15)  # epochs of 6 steps
    entries = _digests(here)
    assert [(entry["kind"], entry["step"]) for entry in entries] == [("start", 0), ("step", 6), ("step", 12), ("step", 15)]
    assert len({entry["model"] for entry in entries}) == 4
    assert entries[0]["order"] == entries[1]["order"] != entries[2]["order"] != entries[3]["order"]
    assert list(entries[1]["tensors"]) == [
        "forwards",
        "linear.weight",
        "linear.bias",
        *(f"optimizer.linear.{p}.{key}" for p in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")),
    ]
    assert entries[-1]["model"] == here.digest()


def test_a_resumed_runs_digests_are_those_of_one_never_stopped(here: Here) -> None:
    here.train("whole", max_steps=15, digest_steps=2)
    with pytest.raises(Preempted):
        here.train(max_steps=15, digest_steps=2, stop=StopAfter(5))
    here.train(max_steps=15, digest_steps=2)
    assert ("resume", 5) in [(entry["kind"], entry["step"]) for entry in _digests(here)]
    assert first_parting(_digests(here), _digests(here, "whole")) is None
    assert "SAME BITS: runs/r and runs/whole, 9 digests up to step 15" in here.command("diff", "runs/r", "runs/whole")[1]


def _entry(step: int, **tensors: str) -> dict[str, Any]:
    whole = "".join(tensors.values())
    return {"step": step, "model": whole, "optimizer": "o", "order": "x", "tensors": tensors}


def test_the_first_step_and_tensor_that_part_are_named() -> None:
    one = [_entry(0, a="1", b="1"), _entry(4, a="2", b="2"), _entry(6, a="9", b="9"), _entry(8, a="3", b="3")]
    other = [_entry(0, a="1", b="1"), _entry(4, a="2", b="2"), _entry(8, a="3", b="4", c="1")]
    parting = first_parting(one, other)
    assert parting == Parting(8, 4, ("b", "c"))
    assert parting.in_words() == "first difference at step 8 (step 4 is the same): first tensor b, 2 in all"
    assert first_parting(one, one) is None
    with pytest.raises(Differs, match="DIFFERENT BITS: A against B: first difference at step 8 .*: threads: 1 -> 2"):
        verdict(Evidence("A", one, []), Evidence("B", other, []), "threads: 1 -> 2")
    with pytest.raises(WrongUse, match="A and B have no digest of a trained step in common: .*the first of A is of step 4"):
        verdict(Evidence("A", one, []), Evidence("B", one[:1], []), "")  # the first weights alone prove nothing
    order = [one[0] | {"order": "y"}]
    assert first_parting(one, order) == Parting(0, None, ())


def test_verify_does_a_run_again(here: Here) -> None:
    here.train(task="digits", max_steps=30, threads=1)
    code, out, err = here.command("verify", "runs/r", "--device", "cpu")
    assert (code, err) == (0, "")
    assert "SAME BITS: runs/r and the same settings done again, 3 digests up to step 30" in out
    code, out, _ = here.command("verify", "runs/r", "--device", "cpu", "--steps", "22")
    assert code == 0
    assert "2 digests up to step 22" in out
    assert [path.name for path in Path("runs").iterdir()] == ["r"]


def test_validations_are_compared_too(here: Here) -> None:
    here.train(max_steps=12)
    here.train("other", max_steps=12)
    assert here.command("diff", "runs/r", "runs/other")[0] == 0
    path = here.path("other") / "metrics.jsonl"
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1])
    assert (last["kind"], last["step"]) == ("validation", 12)
    path.write_text("\n".join([*lines[:-1], json.dumps(last | {"loss": 9.0})]) + "\n")
    code, _, err = here.command("diff", "runs/r", "runs/other")
    assert code == 8
    assert "the weights are the same, and the validation at step 12 gave another loss (" in err
    assert first_other_validation([last], [last | {"time_unix_s": 1.0}]) is None


def test_verify_names_the_altered_entry_the_first_step_and_the_first_tensor(here: Here) -> None:
    here.train(task="digits", max_steps=30, threads=1)
    _change(here.path() / "config.json", threads=2)
    code, _, err = here.command("verify", "runs/r", "--device", "cpu")
    assert code == 8
    assert err.startswith(
        "trainbox: DIFFERENT BITS: runs/r against the same settings done again: "
        "first difference at step 22 (step 0 is the same): first tensor "
    )
    assert err.endswith("manifest entries that differ: threads: 1 -> 2\n")


@pytest.mark.parametrize(("name", "value"), [("learning_rate", 0.5), ("shards", 2), ("precision", "bf16"), ("seed", 3)])
def test_verify_names_each_altered_setting(here: Here, name: str, value: Any) -> None:
    here.train(max_steps=6)
    _change(here.path() / "config.json", **{name: value})
    code, _, err = here.command("verify", "runs/r", "--device", "cpu")
    assert code == 8
    assert f"; manifest entries that differ: settings.{name}: " in err


@pytest.mark.parametrize("words", [["verify", "runs/none"], ["diff", "runs/none", "runs/none"]])
def test_a_folder_that_is_no_run_is_told(here: Here, words: list[str]) -> None:
    code, _, err = here.command(*words)
    assert code == 2
    assert err.startswith(f"trainbox: {words[0]} runs/none: no ")


def test_diff_names_the_settings(here: Here) -> None:
    here.train("one", max_steps=6)
    here.train("other", max_steps=6, seed=1)
    code, _, err = here.command("diff", "runs/one", "runs/other")
    assert code == 8
    assert "first difference at step 0 (there is no earlier step to compare): first tensor linear.weight" in err
    assert "; manifest entries that differ: settings.seed: 0 -> 1" in err


_STOPPED = {"max_steps": 15}


def _stopped(here: Here) -> Path:
    with pytest.raises(Preempted):
        here.train(**_STOPPED, stop=StopAfter(5))
    return here.path() / "manifest.json"


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("cuda", "11.0", "cuda: 11.0 -> "),
        ("packages", {"torch": "1.0"}, "packages.torch: 1.0 -> "),
        ("sources", {"tests.trainer.tiny": "0" * 64}, "sources.tests.trainer.tiny: 000000000000... -> "),
        ("data", {"train": "a", "validation": "b"}, "data.train: a -> "),
        ("environment", {"MKL_CBWR": "AVX"}, "environment.MKL_CBWR: AVX -> nothing"),
    ],
)
def test_a_resume_under_what_changes_bits_is_refused_unless_wanted(here: Here, entry: str, value: Any, words: str) -> None:
    path = _stopped(here)
    _change(path, **{entry: value})
    with pytest.raises(WrongUse) as refused:
        here.train(**_STOPPED)
    assert f"runs/r cannot go on to the same bits, since it was started with {words}" in str(refused.value)
    assert "or go on all the same with --resume anyway" in str(refused.value)
    assert words in here.train(**_STOPPED, resume="anyway")
    (start,) = json.loads(path.read_text())["resumes"]
    assert start["step"] == 5
    assert any(name.startswith(entry) for name in start["changed"])


def test_a_resume_without_its_manifest_is_refused_unless_wanted(here: Here) -> None:
    _stopped(here).unlink()
    with pytest.raises(WrongUse, match="runs/r/manifest.json is missing or damaged"):
        here.train(**_STOPPED)
    here.train(**_STOPPED, resume="anyway")
    assert json.loads((here.path() / "manifest.json").read_text())["settings"]["max_steps"] == 15


def test_a_resume_under_what_explains_only_is_listed(here: Here) -> None:
    path = _stopped(here)
    packages = json.loads(path.read_text())["packages"]
    _change(path, python="3.0", image_digest="sha256:abc", packages=packages | {"torchvision": "0.1"})
    out = here.train(**_STOPPED)
    assert "changed since the run's start: " in out
    assert "packages.torchvision: 0.1 -> " in out
    assert "python: 3.0 -> 3." in out
    assert "image_digest: sha256:abc -> nothing" in out


def test_other_data_and_another_task_source_have_other_digests(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Tiny()
    data = task.train_dataset(Path())
    digest = manifest.dataset_digest(data, [])
    assert manifest.dataset_digest(task.train_dataset(Path()), []) == digest
    data.tensors[0][17, 2] += 1
    assert manifest.dataset_digest(data, []) != digest
    monkeypatch.setattr(manifest, "_WHOLE_BYTES", 100)  # of more than a gibibyte, every so-many-th example
    data.tensors[0][1, 2] += 1
    assert manifest.dataset_digest(data, []) == manifest.dataset_digest(data, [])
    here.train(max_steps=1)
    described = json.loads((here.path() / "manifest.json").read_text())
    source = Path(tiny.__file__).read_bytes()
    assert described["sources"]["tests.trainer.tiny"] == hashlib.sha256(source).hexdigest()
    assert {"cpu_model", "cpu_capability"} < set(described["machine"])
    assert set(described["data"]) == {"train", "validation"}
    assert described["settings"]["seed"] == 0


def test_nothing_is_trained_where_nothing_could_be_compared(here: Here) -> None:
    here.train(max_steps=6)
    code, out, err = here.command("verify", "runs/r", "--steps", "3", "--device", "cpu")
    assert (code, out) == (2, "")
    assert "runs/r has no digest of a trained step up to step 3 to compare with (the first is of step 6" in err


def test_a_resume_with_another_neighbour_of_the_task_is_refused(trainbox: Trainbox) -> None:
    (trainbox.folder / "helper.py").write_text("SCALE = 1.0\n")
    (trainbox.folder / "mine.py").write_text(
        "from dataclasses import dataclass\n\nimport helper\nfrom tests.trainer.tiny import Tiny\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(Tiny):\n"
        "    def losses(self, model, batch):\n"
        "        return {k: v * helper.SCALE for k, v in super().losses(model, batch).items()}\n"
    )
    words = ("train", "mine.py:Mine", "--device", "cpu", "--max-steps", "6", "--checkpoint-steps", "3", "--run", "r")
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    assert trainbox(*words, env=env).code == 0
    for path in (trainbox.folder / "runs/r/checkpoints").glob("step-00000006*"):
        path.unlink()
    (trainbox.folder / "helper.py").write_text("SCALE = 2.0\n")
    ended = trainbox(*words, env=env)
    assert ended.code == 2
    assert "it was started with sources.helper: " in ended.err


_TASK = """
import importlib, importlib.util
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from package_of_mine import SCALE
from tests.trainer.tiny import Tiny

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
    """A task and what it imports; the function forgets the modules, as a new process would not have them."""
    for path in _HELPERS.values():
        (here.folder / path).parent.mkdir(exist_ok=True)
        (here.folder / path).write_text("SCALE = 1.0\n")
    (here.folder / "package_of_mine/__init__.py").write_text("from package_of_mine.helper import SCALE\n")
    (here.folder / "elsewhere/task.py").write_text(_TASK)
    (here.folder / "linked_task.py").symlink_to("elsewhere/task.py")
    monkeypatch.syspath_prepend(here.folder)

    def forget() -> None:
        for name in [*_HELPERS, "package_of_mine"]:
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()

    return forget


@pytest.mark.parametrize("workers", [0, 1])
def test_the_manifest_lists_every_source_file_that_is_loaded(here: Here, helpers: Callable[[], None], workers: int) -> None:
    helpers()
    here.train(task="linked_task:Mine", max_steps=6, workers=workers)
    helpers()
    sources = json.loads((here.path() / "manifest.json").read_text())["sources"]
    found = {name: sources[name] for name in _HELPERS}
    assert found == {name: hashlib.sha256(Path(path).read_bytes()).hexdigest() for name, path in _HELPERS.items()}
    assert not any(name.partition(".")[0] in ("torch", "json", "trainbox", "pytest", "__main__") for name in sources)


@pytest.mark.parametrize("name", _HELPERS)
def test_a_resume_with_another_source_file_is_refused_before_it_saves(
    here: Here, helpers: Callable[[], None], name: str
) -> None:
    settings: dict[str, Any] = {"task": "linked_task:Mine", "max_steps": 12, "workers": int(name == "read_by_workers")}
    with pytest.raises(Preempted):
        here.train(**settings, stop=StopAfter(8))
    helpers()
    with Path(_HELPERS[name]).open("a") as file:
        file.write("# another text\n")
    with pytest.raises(Changed, match=f"runs/r cannot go on to the same bits, since it was started with sources.{name}: "):
        here.train(**settings)
    helpers()
    assert here.steps()[-1] == 8
    assert f"changed since the run's start: sources.{name}: " in here.train(**settings, resume="anyway")
    helpers()
    (start,) = json.loads((here.path() / "manifest.json").read_text())["resumes"]
    assert list(start["changed"]) == [f"sources.{name}"]


def test_a_source_file_that_a_resume_cannot_find_before_it_is_imported_is_compared_then(
    here: Here, helpers: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.session.located_sources", lambda _names: {})
    settings: dict[str, Any] = {"task": "linked_task:Mine", "max_steps": 12, "workers": 0}
    with pytest.raises(Preempted):
        here.train(**settings, stop=StopAfter(8))
    helpers()
    Path("imported_late.py").write_text("SCALE = 2.0\n")
    with pytest.raises(Changed, match="it was started with sources.imported_late: "):
        here.train(**settings)
    helpers()
    assert here.steps()[-1] == 8
    assert "changed since the run's start: sources.imported_late: " in here.train(**settings, resume="anyway")
    helpers()
    start = json.loads((here.path() / "manifest.json").read_text())["resumes"][-1]
    assert list(start["changed"]) == ["sources.imported_late"]


def test_processes_with_other_source_files_are_refused() -> None:
    record = manifest.SourceRecord(Mock(writes=False), {"one": "a"}, False)
    record.compare_and_add([{"one": "a"}, {"one": "a", "only_there": "b"}])
    with pytest.raises(WrongUse, match="the source file of module two differs between process 0 and process 1: copy the same"):
        record.compare_and_add([{"two": "a"}, {"two": "b"}])


def test_a_moment_of_another_type_than_its_parameter_comes_back_as_it_was(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("sum", torch.zeros_like(parameter, dtype=torch.float64))
                    state["sum"] += parameter.grad.double() / 3
                    parameter.data -= 0.01 * state["sum"].float()

    monkeypatch.setattr(Tiny, "build_optimizer", lambda _t, model, _n, rate, _w: Doubled(model.parameters(), rate))
    here.train("undisturbed", max_steps=12)
    with pytest.raises(Preempted):
        here.train(max_steps=12, stop=StopAfter(5))
    here.train(max_steps=12)
    entries = [read_entries(here.path(run) / "digests.jsonl")[-1] for run in ("r", "undisturbed")]
    assert entries[0]["optimizer"] == entries[1]["optimizer"]
    assert entries[0]["model"] == entries[1]["model"]
