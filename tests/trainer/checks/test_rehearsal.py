"""The rehearsal refuses tasks whose resume would not have the same bits."""

import contextlib
import copy
import hashlib
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from tests.support.here import Here
from tests.support.tiny import StepCounter, Tiny
from trainbox.errors import WrongUse
from trainer.checks import same_bits
from trainer.session import train

_OWN = numpy.random.default_rng(0)


def _noisy(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    inputs_B4, targets_B = batch
    return {"error": (model(inputs_B4) - targets_B + float(_OWN.normal())).square()}


def _dropping(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    """As random as `_noisy`, but from torch's generator."""
    inputs_B4, targets_B = batch
    return {"error": (model(inputs_B4) - targets_B + torch.randn(())).square()}


class _Rows(Dataset[Any]):
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)) + self.draw(), torch.tensor(1.0)


def test_losses_that_draw_from_their_own_generator_are_refused(here: Here) -> None:
    here.plant(losses=_noisy)
    text = "the loss error differs when the same step is computed again: draw random numbers only f"
    with pytest.raises(WrongUse, match=text):
        here.train(max_steps=2)
    assert not (here.path() / "checkpoints" / "step-00000002.pt").exists()


def test_losses_that_draw_from_torchs_generator_pass_and_the_check_changes_no_bits(
    here: Here,
) -> None:
    here.plant(losses=_dropping)
    here.train("checked", max_steps=2)
    here.train("unchecked", max_steps=2, rehearses=False)
    assert here.digest("checked") == here.digest("unchecked")


@pytest.mark.parametrize(
    ("kind", "workers"), [("own", 0), ("own", 1), ("state", 0), ("seeded", 0), ("seeded", 1)]
)
def test_a_dataset_that_draws_from_its_own_generator_is_refused(
    here: Here, kind: str, workers: int
) -> None:
    def dataset(_task: Tiny, _folder: Path) -> _Rows:
        own, count = random.Random(0), itertools.count()  # noqa: S311
        draws = {"own": own.random, "state": lambda: next(count), "seeded": numpy.random.normal}
        return _Rows(draws[kind])

    here.plant(train_dataset=dataset)
    if kind == "seeded":
        here.train(max_steps=2, workers=workers)
        return
    with pytest.raises(WrongUse, match="task Tiny: the loss squared_error differs after"):
        here.train(max_steps=2, workers=workers)


class _Recorded(_Rows):
    """A dataset that records which process reads it."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with Path("readers").open("a") as readers:
            readers.write(f"{os.getpid()}\n")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_only_loader_workers_read_the_dataset(here: Here, workers: int) -> None:
    """Workers would share a file that the training process opens, with its position."""
    here.plant(
        train_dataset=lambda _task, _folder: _Recorded(lambda: 0.0),
        validation_dataset=lambda _task, _folder: _Recorded(lambda: 0.0),
    )
    here.train(max_steps=2, workers=workers)
    readers = set(map(int, Path("readers").read_text().split()))
    assert (os.getpid() in readers) == (workers == 0)
    assert len(readers) > workers


def _rarely_random(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
    """Draw from the global generators of Python and NumPy, but rarely."""
    inputs_B4, targets_B = batch
    noise = numpy.random.normal() if random.random() < 0.1 else 0.0  # noqa: S311
    return {"error": (model(inputs_B4) - targets_B + noise).square()}


def test_the_generators_of_python_and_numpy_are_seeded(here: Here) -> None:
    here.plant(losses=_rarely_random)
    for run in ("one", "other"):
        random.seed(run)
        numpy.random.seed(len(run))
        here.train(run)
    assert here.digest("one") == here.digest("other")


def test_data_and_models_drawn_by_numpy_are_seeded(here: Here) -> None:
    class Drawn(StepCounter):
        def __init__(self) -> None:
            super().__init__()
            self.linear.weight.data += float(numpy.random.normal())

    plain = Tiny.train_dataset

    def shuffled(task: Tiny, folder: Path) -> TensorDataset:
        order = torch.from_numpy(numpy.random.permutation(50))
        return TensorDataset(*(tensor[order] for tensor in plain(task, folder).tensors))

    here.plant(build_model=lambda _task: Drawn(), train_dataset=shuffled)
    for run in ("one", "other"):
        numpy.random.seed(len(run))
        here.train(run, max_steps=3)
    assert here.digest("one") == here.digest("other")
    here.train("third", max_steps=3, seed=1)
    assert here.digest("third") != here.digest("one")


class _Counting(StepCounter):
    """A model with a state that checkpoints leave out, or that a new model does not have."""

    kind = ""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        if self.kind == "teacher":
            self.teacher = nn.Linear(4, 1).requires_grad_(False)
            self.teacher.load_state_dict(self.linear.state_dict())

    def forward(self, inputs_B4: Tensor) -> Tensor:
        output_B = super().forward(inputs_B4)
        if self.training and self.kind == "counter":
            self.calls += 1
            output_B = output_B * (1 + (self.calls > 6))
        if self.kind == "made" and "late" not in dict(self.named_buffers()):
            self.register_buffer("late", torch.zeros(3))
        if self.training and self.kind == "teacher":
            with torch.no_grad():
                for mean, weight in zip(
                    self.teacher.parameters(), self.linear.parameters(), strict=True
                ):
                    mean.mul_(0.9).add_(weight, alpha=0.1)
            output_B = output_B + 0.1 * self.teacher(inputs_B4).squeeze(1)
        return output_B


# fmt: off
_KINDS = [
    ("counter", "task Tiny: _Counting.calls changes the training: step 3 has other bits, first in "
     "the loss squared_error, if it is 11, as at the end, and checkpoints leave it out: make it a"),
    ("made", r"the model has changed since it was built \(late: missing -> shape \(3,\)\), so a "
     r"resume could not load a checkpoint: create all parameters and buffers in build_model\(\), "
     r"with their final shapes and types, or run an example through the model there"),
]
# fmt: on


@pytest.mark.parametrize(("kind", "text"), _KINDS)
def test_state_that_a_resume_cannot_restore_is_refused(
    here: Here, monkeypatch: pytest.MonkeyPatch, kind: str, text: str
) -> None:
    monkeypatch.setattr(_Counting, "kind", kind)
    here.plant(build_model=lambda _task: _Counting())
    with pytest.raises(WrongUse, match=text):
        here.train(max_steps=12)


@pytest.mark.slow
def test_a_mean_teacher_changes_once_per_step_and_survives_a_resume(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Counting, "kind", "teacher")
    here.plant(build_model=lambda _task: _Counting())
    here.train("undisturbed", shards=2, threads=1, max_steps=12, learning_rate=0.5)
    here.stopped(5, shards=2, threads=1, max_steps=12, learning_rate=0.5)
    here.train(shards=2, threads=1, max_steps=12, learning_rate=0.5)
    assert here.digest() == here.digest("undisturbed")
    weights = {step: here.state(step, "undisturbed")["model"] for step in here.steps("undisturbed")}
    assert not torch.equal(weights[12]["teacher.weight"], weights[12]["linear.weight"])
    # One step moves the teacher by a tenth of the way to the student before the step, although the
    # forwards of both shards move it.
    here.train("one", shards=2, threads=1, max_steps=1, learning_rate=0.5)
    here.train("two", shards=2, threads=1, max_steps=2, learning_rate=0.5)
    one, two = (here.weights(run) for run in ("one", "two"))
    assert torch.allclose(
        two["teacher.weight"], 0.9 * one["teacher.weight"] + 0.1 * one["linear.weight"], atol=1e-6
    )


class _Extra(StepCounter):
    """A model that keeps a number in its extra state, as torch intends."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [0]

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen[0]}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen[0] = state["seen"]

    def forward(self, inputs_B4: Tensor) -> Tensor:
        if self.training:
            self.seen[0] += 1
        return super().forward(inputs_B4)


def test_a_modules_extra_state_is_saved_digested_and_restored(here: Here) -> None:
    here.plant(build_model=lambda _task: _Extra())
    here.stopped(4, max_steps=6)
    assert here.state(4)["model"]["_extra_state"] == {"seen": 4}
    here.train(max_steps=6)
    assert here.state(6)["model"]["_extra_state"] == {"seen": 6}
    assert "_extra_state" in here.digests()[-1]["tensors"]


class _Sparse(StepCounter):
    """A model with a gradient that only lists the rows that a batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3, 1, sparse=True)

    def forward(self, inputs_B4: Tensor) -> Tensor:
        return super().forward(inputs_B4) + self.rows(torch.zeros(len(inputs_B4), dtype=int))[:, 0]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_sparse_gradient_is_refused(here: Here, shards: int) -> None:
    here.plant(build_model=lambda _task: _Sparse())
    with pytest.raises(WrongUse, match=r"the gradient of rows.weight is sparse and cannot be"):
        here.train(max_steps=2, shards=shards, threads=1)


@dataclass(frozen=True)
class Wide(Tiny):
    """A model whose weights are much larger than all else that is hashed."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 3000), nn.Linear(3000, 40), nn.Linear(40, 1), nn.Flatten(0)
        )

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_B4, targets_B = batch
        return {"error": (model(inputs_B4) - targets_B).square()}


class _Counted:
    """Counts the bytes that are hashed, and the waits for the disk, while the rehearsal runs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.hashed, self.synced, self._counts = 0, 0, False
        sha256, rehearse, file_digest, fsync = (
            hashlib.sha256, train.rehearse, hashlib.file_digest, os.fsync
        )  # fmt: skip
        counted = self

        class Hash:
            def __init__(self, data: Any = b"") -> None:
                self._hash = sha256()
                self.update(data)

            def update(self, data: Any) -> None:
                counted.hashed += counted._counts * memoryview(data).nbytes
                self._hash.update(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._hash, name)

        def digest_of(file: Any, name: str) -> Any:
            self.hashed += self._counts * os.fstat(file.fileno()).st_size
            return file_digest(file, name)

        def synced(descriptor: int) -> None:
            self.synced += self._counts
            fsync(descriptor)

        def rehearsed(*arguments: Any) -> Any:
            with self._counting():
                return rehearse(*arguments)

        patch.setattr(hashlib, "sha256", Hash)
        patch.setattr(hashlib, "file_digest", digest_of)
        patch.setattr(os, "fsync", synced)
        patch.setattr(train, "rehearse", rehearsed)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        self._counts = True
        yield
        self._counts = False


def test_a_rehearsal_hashes_little_and_does_not_wait_for_the_disk(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = _Counted(monkeypatch)
    here.train(task=f"{__name__}:Wide", max_steps=3)
    size = (here.path() / "checkpoints/step-00000003.pt").stat().st_size
    assert size > 1_000_000
    assert 0 < counted.hashed <= 2 * size
    assert counted.synced == 0
    seconds = here.json("manifest.json")["rehearsal"]["seconds"]
    assert set(seconds) == {"build", "steps", "validation", "save", "checks", "load", "compare"}
    assert all(value >= 0 for value in seconds.values())


@pytest.mark.parametrize("most_bytes", [0, 2**29])
def test_the_bits_of_small_and_of_large_models_are_compared(
    here: Here, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """Copies of a large model do not fit, so its digests are compared."""
    monkeypatch.setattr(same_bits, "_MOST_HOST_BYTES", most_bytes)
    here.train("same", max_steps=3)
    step, calls = torch.optim.AdamW.step, itertools.count()

    def signed(self: Any, *arguments: Any) -> Any:
        """Set a bias to 0 or -0, which are equal numbers."""
        found = step(self, *arguments)
        with torch.no_grad():
            self.param_groups[0]["params"][-1].zero_().mul_(1 if next(calls) % 2 else -1)
        return found

    monkeypatch.setattr(torch.optim.AdamW, "step", signed)
    with pytest.raises(WrongUse, match="linear.bias differs when the same step is computed again"):
        here.train("other", max_steps=3)


class _Parts(nn.Module):
    """Has weights that a forward does not use, or does not train."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(4, 4), nn.Linear(4, 1)
        if kind == "experts":
            self.experts = nn.ModuleList(
                [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(12)]
            )
            self.prompts = nn.ParameterList([torch.ones(4) for _ in range(3)])
        elif kind == "unused":
            self.head = nn.Linear(4, 3)
        elif kind == "frozen":
            self.head = nn.Linear(4, 3).requires_grad_(False)
        elif kind == "average":
            self.average = AveragedModel(self.last)
        elif kind == "words":
            self.words = nn.Embedding(500, 4)
        elif kind == "small":
            self.large, self.mask = nn.Linear(4, 400), nn.Parameter(torch.ones(4))
            self.back = nn.Linear(400, 4)

    def forward(self, inputs_B4: Tensor) -> Tensor:
        first = copy.deepcopy(self.first) if self.kind == "copied" else self.first
        if self.kind == "checkpoint":
            hidden_B4 = checkpoint(first, inputs_B4, use_reentrant=True)
        elif self.kind == "all copied":
            return copy.deepcopy(self.last)(first(inputs_B4).detach()).squeeze(1)
        else:
            hidden_B4 = first(inputs_B4)
        if self.kind == "experts":
            hidden_B4 = self.experts[1](hidden_B4) * self.prompts[1]
        elif self.kind == "words":
            hidden_B4 = hidden_B4 + self.words(torch.tensor(3))
        elif self.kind == "small":
            hidden_B4 = self.back(self.large(hidden_B4))
        outputs_B: Tensor = self.last(hidden_B4).squeeze(1)
        return outputs_B


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("unused", "15 of 40 parameters got no gradient in the first 2 steps, first head.weight: "),
        ("copied", "20 of 25 parameters got no gradient in the first 2 steps, first first.weight"),
        ("all copied", "25 of 25 parameters got no gradient in the first 2 steps, first first.w"),
        ("checkpoint", "20 of 25 parameters got no gradient in the first 2 steps, first first.w"),
        *((kind, "") for kind in ("", "experts", "frozen", "average", "words", "small")),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_parameters_without_a_gradient_are_noted(here: Here, kind: str, text: str) -> None:
    def losses(_task: Tiny, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"squared_error": (model(batch[0]) - batch[1]).square()}

    here.plant(losses=losses, build_model=lambda _task: _Parts(kind))
    notes = [line for line in here.train().splitlines() if "got no gradient" in line]
    assert [line.partition(text)[0] for line in notes] == (["note       "] if text else [])


@pytest.mark.parametrize("shards", [1, 2])
def test_optimizers_that_take_turns_are_not_noted(here: Here, shards: int) -> None:
    def losses(_task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        return {"squared_error": (model.first(batch[0])[:, 0] - batch[1]).square()}

    def build_optimizer(_task: Tiny, model: Any, *_: Any) -> Any:
        parts = (model.first.parameters(), model.last.parameters())
        return tuple(torch.optim.SGD(part, lr=0.1) for part in parts)

    here.plant(losses=losses, build_model=lambda _task: _Parts(""))
    assert "5 of 25 parameters got no gradient" in here.train("one", shards=shards)
    here.plant(build_optimizer=build_optimizer)
    assert "got no gradient" not in here.train("two", shards=shards)
