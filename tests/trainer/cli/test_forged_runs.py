"""Each reader of a run finds a forged file: `verify` exits with 8, the others with 4."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.here import Here, training_here
from tests.support.unsafe_pickle import MakesFolder
from trainbox.files.sidecar import read_sidecar, sidecar_text
from trainer.records.digest import digest_of_digests, saved_digests, tensor_digests

_TASK = "tests.support.tiny:FromFiles"
_USERS = {
    "verify": ("verify", "runs/r", "--device", "cpu"),
    "evaluate": ("evaluate", "runs/r", "--device", "cpu"),
    "predict": ("predict", "runs/r", "a.txt", "--device", "cpu"),
    "export": ("export", "runs/r"),
    "init": ("train", _TASK, "--device", "cpu", "--run", "new", "--init", "runs/r"),
}
_AGAIN = ("--max-steps", "12", "--best-by", "max:loss", "--workers", "0")
_READERS = {
    **_USERS,
    "train": ("train", _TASK, "--device", "cpu", "--run", "r", *_AGAIN),
}


def _sidecar(path: Path, **changes: Any) -> None:
    path.write_text(sidecar_text(read_sidecar(path) | changes))


def _sidecars(**changes: Any) -> Callable[[Path], None]:
    def forge(run: Path) -> None:
        for path in (run / "checkpoints").glob("*.json"):
            _sidecar(path, **changes)

    return forge


def _edited_metrics(run: Path) -> None:
    for path in (run / "checkpoints").glob("*.json"):
        fields = json.loads(path.read_text())
        path.write_text(json.dumps(fields | {"metrics": {"loss": 0.125}}))


def _files(write: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a function that writes another file for each checkpoint, and corrects its sidecar."""

    def forge(run: Path) -> None:
        for path in (run / "checkpoints").glob("*.pt"):
            write(path)
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            _sidecar(path.with_suffix(".json"), sha256=digest, bytes=len(data))

    return forge


def _contents(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Return a function that changes each checkpoint, and corrects its sidecar."""

    def write(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return _files(write)


def _exchange(one: Any, other: Any) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        one[name], other[name] = other[name], one[name]


def _exchange_moments(state: Any) -> None:
    for each in state["optimizer"]["state"].values():
        each["exp_avg"], each["exp_avg_sq"] = each["exp_avg_sq"], each["exp_avg"]


def _second_entries(run: Path) -> None:
    """Change the weights, and append entries of the digests that agree with them."""
    states = list[Any]()
    _contents(lambda s: (s["model"]["linear.weight"].neg_(), states.append(s)))(run)
    path = run / "digests.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    for state in states:
        step, model = state["progress"]["step"], tensor_digests(state["model"])
        last = [n for n, entry in enumerate(entries) if entry["step"] == step][-1]
        tensors = entries[last]["tensors"] | {n: digest[:16] for n, digest in model.items()}
        changed = {"model": digest_of_digests(model), "saved": saved_digests(state)}
        entries.insert(last + 1, entries[last] | changed | {"tensors": tensors})
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


_FORGED: dict[str, Callable[[Path], object]] = {
    "digests of the files": _sidecars(sha256="0" * 64),
    "another run": _sidecars(run_id="0" * 16),
    "another step": _sidecars(step=5),
    "no checkpoints": lambda run: shutil.rmtree(run / "checkpoints"),
    "best step": _sidecars(best_step=3),
    "an edited metric": _edited_metrics,
    "weights": _contents(lambda s: s["model"]["linear.weight"].neg_()),
    "exchanged moments": _contents(_exchange_moments),
    "moments of two parameters": _contents(lambda s: _exchange(*s["optimizer"]["state"].values())),
    "betas": _contents(lambda s: s["optimizer"]["param_groups"][0].update(betas=(0.5, 0.5))),
    "weight_decay": _contents(lambda s: s["optimizer"]["param_groups"][0].update(weight_decay=9.0)),
    "best_metrics": _contents(lambda s: s["progress"].update(best_metrics={"loss": 0.0})),
    "patience": _contents(lambda s: s["progress"].update(patience_used=3)),
    "scaler": _contents(lambda s: s["scaler"].update(scale=2.0)),
    "state under texts": _contents(
        lambda s: s["optimizer"].update(
            state={str(index): each for index, each in s["optimizer"]["state"].items()}
        )
    ),
    "second entries of the digests": _second_entries,
}
# What replaces each checkpoint, and the reason of each reader.
# fmt: off
_UNSAFE: dict[str, tuple[Callable[[Path], object], str]] = {
    "an object": (lambda path: torch.save({"model": MakesFolder(Path("ran"))}, path),
     "cannot be loaded safely (it has an object of posix.mkdir, and only tensors, numbers and"),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(MakesFolder(Path("ran")))),
     "cannot be loaded safely (it is damaged, or torch.save did not write it): restore it from"),
    "half a file": (lambda path: path.write_bytes(path.read_bytes()[:path.stat().st_size // 2]),
     "cannot be loaded safely (it is damaged, or torch.save did not write it): restore it from"),
    "a text": (lambda path: path.write_text("the weights of a model\n" * 99),
     "cannot be loaded safely (it is damaged, or torch.save did not write it): restore it from"),
}
# fmt: on


def _without_entry(step: int) -> Callable[[Path], None]:
    """Return a function that changes the weights of `step`, and removes their digests."""

    def forge(run: Path) -> None:
        path = run / "digests.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["step"] != step))
        _contents(lambda s: s["progress"]["step"] == step and s["model"]["linear.weight"].neg_())(
            run
        )
        if step == _BEST:
            tensors = {n: -tensor for n, tensor in load_file(run / "model.safetensors").items()}
            save_file(tensors, run / "model.safetensors", {"format": "pt", "step": str(step)})

    return forge


def _record(name: str, **changes: Any) -> Callable[[Path], None]:
    def forge(run: Path) -> None:
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(content | changes))

    return forge


def _other_manifest(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    settings = manifest["settings"] | {"seed": 5}
    changes = {"run_id": "0123456789abcdef", "settings": settings}
    (run / "manifest.json").write_text(json.dumps(manifest | changes))


# What is wrong with config.json or manifest.json, and the message of each reader.
# fmt: off
_RECORDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "classes": (lambda run: _without(run / "manifest.json", "classes"),
     "runs/r/manifest.json is damaged (classes is missing or malformed)"),
    "plan": (_record("manifest.json", plan={"strategy": "ddp"}),
     "runs/r/manifest.json is damaged (plan is missing or malformed)"),
    "config.json": (lambda run: (run / "config.json").write_text("{"),
     "runs/r/config.json is damaged ("),
    "keep": (_record("config.json", keep=-1),
     "runs/r/config.json is damaged (keep is -1, not a number from 0)"),
    "seed": (_record("config.json", seed=5),
     "runs/r/config.json was edited after the run was started (settings.seed: 0 -> 5)"),
    "another manifest": (_other_manifest,
     "runs/r/manifest.json is of another run (its run_id is 0123456789abcdef, and the "),
}
# fmt: on


def _without(path: Path, name: str) -> None:
    record = json.loads(path.read_text())
    del record[name]
    path.write_text(json.dumps(record))


_BEST, _LAST = 6, 12  # the loss falls


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with training_here(tmp_path_factory.mktemp("whole")) as here:
        here.train(task=_TASK, max_steps=_LAST, best_by="max:loss", workers=0)
        assert here.steps() == [_BEST, _LAST]
        yield here.path()


@pytest.fixture
def run(here: Here, whole: Path) -> Path:
    """Return a copy of the run, and write a file to predict."""
    shutil.copytree(whole, "runs/r")
    Path("a.txt").write_text("1 2 3 4")
    return here.path()


def _err(here: Here, reader: str, code: int) -> str:
    """Return the line of a reader that ends with `code`."""
    err = here.refused(*_READERS[reader], code=code)
    (line,) = (line for line in err.splitlines() if not line.startswith("reading "))
    return line


# All readers open a run by one mechanism, so some forgeries are shown to only two of them.
@pytest.mark.parametrize(
    ("forged", "reader"),
    [
        (forged, reader)
        for forged in _FORGED
        for reader in [*_USERS, "train"]
        if reader in ("verify", "train") or forged in ("weights", "best step")
    ],
)
def test_a_forged_run_is_refused(here: Here, run: Path, forged: str, reader: str) -> None:
    _FORGED[forged](run)
    _err(here, reader, 8 if reader == "verify" else 4)


@pytest.mark.parametrize("reader", ["evaluate", "export"])
@pytest.mark.parametrize("removed", ["all", "the best"])
def test_the_best_weights_of_a_run_without_their_checkpoint_are_used(
    here: Here, run: Path, removed: str, reader: str
) -> None:
    """Checkpoints are large, and model.safetensors has the best weights as well."""
    best = json.loads(max((run / "checkpoints").glob("*.json")).read_text())["best_step"]
    assert (removed == "all") or len([*(run / "checkpoints").glob("*.json")]) > 1
    pattern = "*" if removed == "all" else f"*{best}.*"
    for path in [*(run / "checkpoints").glob(pattern)]:
        path.unlink()
    code, out, err = here.command(*_READERS[reader])
    assert code == 0, err
    line = f"the checkpoint of step {best} was removed: the weights are from runs/r/model.safe"
    assert line in out + err
    with (run / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert "model.safetensors is damaged" in _err(here, reader, 4)


@pytest.mark.parametrize("reader", ["verify", "evaluate", "train"])
@pytest.mark.parametrize("unsafe", _UNSAFE)
def test_another_file_instead_of_a_checkpoint_is_refused(
    here: Here, run: Path, unsafe: str, reader: str
) -> None:
    write, reason = _UNSAFE[unsafe]
    _files(write)(run)
    assert reason in _err(here, reader, 8 if reader == "verify" else 4)
    assert not Path("ran").exists()


@pytest.mark.parametrize("reader", ["verify", "export"])
@pytest.mark.parametrize("step", [_BEST, _LAST])
def test_weights_without_an_entry_in_digests_are_refused(
    here: Here, run: Path, step: int, reader: str
) -> None:
    _without_entry(step)(run)
    line = _err(here, reader, 8 if reader == "verify" else 4)
    assert f"damaged (step {step} has no entry of a checkpoint in digests.jsonl): restore" in line


def test_a_resume_sets_a_checkpoint_without_an_entry_aside(here: Here, run: Path) -> None:
    digest = here.digest()
    _without_entry(_LAST)(run)
    out = here.succeeds(*_READERS["train"])
    assert f"(step {_LAST} has no entry of a checkpoint in digests.jsonl): set aside" in out
    assert here.digest() == digest
    here.succeeds(*_READERS["verify"])


def test_a_resume_without_any_digests_is_refused_but_not_anyway(here: Here, run: Path) -> None:
    (run / "digests.jsonl").unlink()
    assert "has no entry of a checkpoint in digests.jsonl" in _err(here, "train", 4)
    out = here.succeeds(*_READERS["train"], "--resume", "anyway")
    assert f"the checkpoint of step {_LAST} was not compared" in out


@pytest.mark.parametrize("reader", ["verify", "predict"])
@pytest.mark.parametrize("forged", _RECORDS)
def test_forged_settings_or_a_forged_manifest_are_refused(
    here: Here, run: Path, forged: str, reader: str
) -> None:
    forge, message = _RECORDS[forged]
    forge(run)
    is_edited = forged in ("seed", "another manifest")  # the manifest contradicts the settings
    assert message in _err(here, reader, 8 if is_edited and reader == "verify" else 2)


@pytest.mark.parametrize("reader", _READERS)
def test_the_whole_run_is_read(here: Here, run: Path, reader: str) -> None:
    assert here.command(*_READERS[reader])[0] == 0
