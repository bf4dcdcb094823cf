"""Start from the weights of another run or of a file (--init), and train some (--freeze)."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.here import Here
from tests.support.kinds import slow_after
from tests.support.transfer import TRANSFER, Transfer
from tests.support.unsafe_pickle import MakesFolder
from trainbox.initial_weights import read_tensors, unwrapped

_SHORT: dict[str, Any] = {"task": TRANSFER, "max_steps": 3}
_RUN = ("train", TRANSFER, "--device", "cpu", "--max-steps", "1")


@pytest.fixture
def trained(here: Here) -> dict[str, Tensor]:
    """Train the run `a`, and return its best weights."""
    here.train("a", **_SHORT)
    return load_file(here.path("a") / "model.safetensors")


def _differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name in one if not torch.equal(one[name], other[name])}


def test_a_run_starts_from_the_best_weights_of_another(
    here: Here, trained: dict[str, Tensor]
) -> None:
    out = here.train("b", **_SHORT, fields={"classes": 5}, init="runs/a", freeze=["body"])
    assert "\ninit       runs/a/model.safetensors: 7 of 9 tensors; head is new (5 classes)\n" in out
    assert "\nfrozen     4 of 6 tensors (42 of 77 parameters), and the statistics of 1 batc" in out
    after = here.weights("b")
    assert len(after["head.bias"]) == 5
    # Also the running statistics come from the file.
    body = {name: value for name, value in trained.items() if name.startswith("body")}
    assert len(body) == 7 and _differing(body, after) == set()
    initial = here.json("manifest.json", "b")["init"]
    assert initial["file"] == "runs/a/model.safetensors"
    assert initial["loaded"] == "7 of 9 tensors; head is new (5 classes)"
    assert len(initial["sha256"]) == 64


@pytest.mark.parametrize("ending", slow_after(1, ["safetensors", "pt", "checkpoint"]))
def test_a_file_gives_the_same_bits_as_its_run(
    here: Here, trained: dict[str, Tensor], ending: str
) -> None:
    here.train("b", **_SHORT, init="runs/a")
    file = f"w.{ending}"
    if ending == "safetensors":
        save_file(trained, file)
    elif ending == "pt":
        torch.save({"model_state_dict": trained, "epoch": 3}, file)
    else:
        file = "runs/a/checkpoints/step-00000003.pt"
    here.train("c", **_SHORT, init=file)
    assert here.digest("b") == here.digest("c")
    here.train("d", **_SHORT)
    assert here.digest("d") != here.digest("c")


@pytest.mark.usefixtures("trained")
def test_a_damaged_checkpoint_of_a_run_is_refused(here: Here) -> None:
    file = Path("runs/a/checkpoints/step-00000003.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    err = here.refused("train", TRANSFER, "--device", "cpu", "--init", str(file))
    assert err.startswith(f"trainbox: --init {file} is damaged (sha256 ")


def test_the_names_of_a_wrapped_model_are_matched(here: Here, trained: dict[str, Tensor]) -> None:
    start = "module._orig_mod."
    torch.save({"state_dict": {start + name: value for name, value in trained.items()}}, "w.pt")
    out = here.train("b", **_SHORT, init="w.pt", freeze=["body"])
    assert f"\ninit       w.pt: 9 of 9 tensors; names of the file without {start}\n" in out
    assert torch.equal(here.weights("b")["body.0.weight"], trained["body.0.weight"])


def test_names_that_the_model_has_are_kept() -> None:
    inner = torch.nn.Linear(2, 2)
    own = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})
    tensors = {f"module.{name}": value for name, value in inner.state_dict().items()}
    assert unwrapped(tensors, own) == (tensors, "")
    for start in ("module.", "_orig_mod."):
        named = {f"{start}{name}": value for name, value in inner.state_dict().items()}
        assert unwrapped(named, inner)[1] == start
    assert unwrapped({**tensors, "step": torch.ones(1)}, inner)[1] == ""
    assert unwrapped({}, inner) == ({}, "")


def test_other_weights_than_the_frozen_ones_train(here: Here, trained: dict[str, Tensor]) -> None:
    """The frozen ones do not decay either."""
    freeze = ["*.bias", "body.1.running_mean"]
    out = here.train("b", **_SHORT, init="runs/a", freeze=freeze, weight_decay=0.5, clip_norm=0.1)
    assert "\nfrozen     3 of 6 tensors (15 of 63 parameters), and the stat" in out
    assert _differing(trained, here.weights("b")) == {"body.0.weight", "body.1.weight",
                                                      "head.weight"}  # fmt: skip


def test_statistics_move_if_only_the_weights_of_a_batch_norm_are_frozen(here: Here) -> None:
    out = here.train("b", **_SHORT, freeze=["body.1.weight", "body.1.bias"])
    assert "statistics" not in out
    assert int(here.weights("b")["body.1.num_batches_tracked"]) == 3


@pytest.mark.usefixtures("trained")
def test_a_resume_does_not_load_again(here: Here) -> None:
    settings = _SHORT | {"max_steps": 6, "init": "runs/a", "freeze": ["body"]}
    here.train("whole", **settings)
    here.stopped(2, "b", **settings)
    initial = here.json("manifest.json", "b")["init"]
    shutil.rmtree("runs/a")
    out = here.train("b", **settings)
    assert "\ninit " not in out and "\nfrozen " in out and "changed since" not in out
    assert here.digest("b") == here.digest("whole")
    assert here.json("manifest.json", "b")["init"] == initial


@pytest.mark.usefixtures("trained")
def test_verify_repeats_a_run_from_the_same_weights(here: Here) -> None:
    here.train("b", **_SHORT, init="runs/a", freeze=["body"], digest_steps=1)
    code, out, err = here.command("verify", "runs/b", "--device", "cpu")
    assert (code, err) == (0, "") and out.splitlines()[-1].startswith("SAME BITS: runs/b")
    # Other weights in the same file.
    here.train("other", **_SHORT, seed=1)
    file = here.path("a") / "model.safetensors"
    shutil.copy(here.path("other") / "model.safetensors", file)
    err = here.refused("verify", "runs/b", "--device", "cpu")
    assert "started from runs/a/model.safetensors, which has changed since (its SHA-256 was " in err
    file.unlink()
    err = here.refused("verify", "runs/b", "--device", "cpu")
    assert "started from runs/a/model.safetensors, which does not exist: check the path" in err


def _without_best(here: Here) -> None:
    (here.path("a") / "model.safetensors").unlink()


def _not_validated(here: Here) -> None:
    _without_best(here)
    newest = max((here.path("a") / "checkpoints").glob("*.json"))
    newest.write_text(json.dumps(json.loads(newest.read_text()) | {"best_step": None}))


def _wider(here: Here) -> None:
    save_file(dict(Transfer(width=7).build_model().state_dict()), "w.safetensors")


def _state() -> dict[str, Tensor]:
    return dict(Transfer().build_model().state_dict())


def _of_another_model(here: Here) -> None:
    save_file({"encoder.weight": torch.ones(2)}, "w.safetensors")


def _of_another_body(here: Here) -> None:
    state = {"layer.weight": torch.ones(2), "head.bias": torch.ones(3)}
    save_file(state, "w.safetensors")


# fmt: off
_PREPARES = [
    (None, ["--init", "gone.pt"], "--init gone.pt does not exist: check the path"),
    (None, ["--init", "runs"],
     "--init runs is neither a file nor a run: give a file of weights, or the folder of a run"),
    (_without_best, ["--init", "a"], "--init a does not exist: did you mean runs/a?"),
    (_not_validated, ["--init", "runs/a"],
     "--init runs/a has no model.safetensors, which a run has after its first validation"),
    (_without_best, ["--init", "runs/a"],
     "--init runs/a has no model.safetensors any more: give the command of that run again, which "),
    (lambda here: torch.save(MakesFolder(Path("ran")), "w.pt"), ["--init", "w.pt"],
     "w.pt has no weights that can be loaded (it has an object of posix.mkdir, and only tensors, "
     "numbers and texts are read): use a .safetensors"),
    (lambda here: os.mkfifo("w.pt"), ["--init", "w.pt"],
     "--init w.pt is neither a file nor a run: give a file of weights, or the folder of a run"),
    (lambda here: torch.save({"net": _state(), "epoch": 3}, "w.pt"), ["--init", "w.pt"],
     "w.pt does not contain tensors by name (it has net, epoch): use a .safetensors file"),
    (lambda here: torch.save({n: t.to("meta") for n, t in _state().items()}, "w.pt"),
     ["--init", "w.pt"],
     "w.pt does not contain tensors by name (it has body.0.weight, body.0.bias, "),
    (lambda here: torch.save({n: t.cfloat() for n, t in _state().items()}, "w.pt"),
     ["--init", "w.pt"],
     "--init w.pt: body.0.weight has complex numbers instead of real ones: use weights of"),
    (_wider, ["--init", "w.safetensors"], "--init w.safetensors: body.0.weight has shape (7, 4) "
     "instead of (6, 4): use weights of this model, or drop --init"),
    (_of_another_model, ["--init", "w.safetensors"], "--init w.safetensors has no tensor of the "
     "model: it has encoder.weight, and the model has body.0.weight, body.0.bias, body.1.weight, "
     "...: use weights"),
    (_of_another_body, ["--init", "w.safetensors"],
     "--init w.safetensors has no tensor of the model outside its last layer head: it has "),
    (None, ["--freeze", "body", "--freeze", "haed.*"], "--freeze haed.* matches no trained "
     "tensor of the model: use the name of one (body.0.weight, "),
    (None, ["--freeze", "body", "--freeze", "head"],
     "--freeze body --freeze head matches all 6 trained tensors, so nothing would train"),
]
# fmt: on


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(("prepare", "arguments", "message"), _PREPARES)
def test_weights_that_cannot_be_used_are_one_line_and_exit_2(
    here: Here, prepare: Callable[[Here], object] | None, arguments: list[str], message: str
) -> None:
    if prepare is not None:
        prepare(here)
    err = here.refused(*_RUN, *arguments)
    assert err.startswith(f"trainbox: {message}")
    assert not Path("ran").exists()


def test_a_file_that_is_replaced_while_it_is_read_is_refused(
    here: Here, trained: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(trained, "w.safetensors")

    def read_and_replace(path: Path) -> dict[str, Tensor]:
        tensors = read_tensors(path)
        save_file({name: value + 1 for name, value in tensors.items()}, path)
        return tensors

    monkeypatch.setattr("trainbox.initial_weights.read_tensors", read_and_replace)
    err = here.refused(*_RUN, "--init", "w.safetensors")
    assert "--init w.safetensors changed while it was read, as the best weights of " in err
