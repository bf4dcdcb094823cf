"""Teacher and student: the measurements, the drawn students, and the results of both methods."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.here import Here
from trainer.tasks.teacher_student import GuessAndCheck, Student, TeacherStudent

# With few measurements of a small matrix, a student that is drawn at random can fit them.
_SMALL = {
    "size": 3,
    "examples": 6,
    "teacher_rank": 1,
    "student_dim": 2,
    "epsilon": 0.02,
    "draws_per_step": 500,
}
_GNC: dict[str, Any] = {
    "task": "teacher_student",
    "batch_size": 6,
    "fields": {"method": "gnc", **_SMALL},
}


def _seeded(seed: int, **fields: Any) -> TeacherStudent:
    task = TeacherStudent(**fields)
    torch.manual_seed(seed)
    task.train_dataset(Path())
    return task


def test_the_examples_are_measurements_of_one_low_rank_matrix() -> None:
    task = _seeded(0, teacher_rank=2)
    matrices_NSS, targets_N = task.train_dataset(Path()).tensors
    validation = task.validation_dataset(Path())
    teacher = torch.linalg.lstsq(
        matrices_NSS.flatten(1).double(), 8 * targets_N.double()[:, None]
    ).solution.view(8, 8)
    assert (torch.linalg.svdvals(teacher) > 1e-3).sum() == 2
    fresh = validation.tensors[0][128:]
    assert torch.allclose(
        (fresh * teacher).sum((1, 2)) / 8, validation.tensors[1][128:].double(), atol=1e-4
    )
    assert validation.tensors[0][:128].equal(matrices_NSS)
    assert validation.tensors[2].tolist() == [True] * 128 + [False] * 512
    assert not torch.equal(_seeded(1).train_dataset(Path()).tensors[1], targets_N)


def test_a_student_of_zeros_has_error_1_and_the_teacher_has_error_0() -> None:
    errors = [
        _seeded(seed).validation_dataset(Path()).tensors[1].square().mean() for seed in range(40)
    ]
    assert float(torch.stack(errors).mean()) == pytest.approx(1, abs=0.15)


def test_gradient_descent_finds_the_teacher(here: Here) -> None:
    here.train(task="teacher_student", seed=3)
    last = here.entries("validation")[-1]
    # The training ends at the first validation that reaches epsilon.
    assert last["train_error"] <= 1e-3 < here.entries("validation")[-2]["train_error"]
    assert last["generalisation_error"] < 0.01
    assert last["draws"] == 0


def test_guess_and_check_stops_at_the_first_student_that_fits(here: Here) -> None:
    here.train(epochs=300, **_GNC)
    entries = here.entries("validation")
    assert entries[-1]["train_error"] <= 0.02 < entries[-2]["train_error"]
    assert [entry["draws"] for entry in entries[:-1]] == [
        500 * (n + 1) for n in range(len(entries) - 1)
    ]
    assert entries[-2]["draws"] < entries[-1]["draws"] <= entries[-2]["draws"] + 500
    errors = [entry["train_error"] for entry in entries]
    assert errors == sorted(errors, reverse=True)


def test_guess_and_check_stops_after_max_draws(here: Here) -> None:
    here.train(
        epochs=300, **{**_GNC, "fields": _GNC["fields"] | {"epsilon": 0.0, "max_draws": 1234}}
    )
    assert [entry["draws"] for entry in here.entries("validation")] == [500, 1000, 1234]


def test_the_best_of_the_drawn_students_is_kept() -> None:
    task = _seeded(0, **_SMALL)
    matrices_NSS, targets_N = task.train_dataset(Path()).tensors
    torch.manual_seed(1)
    model = Student(3, 2, 1.0)
    GuessAndCheck(model, matrices_NSS, targets_N, 0.0, 50, 50).step()
    generator = torch.Generator().manual_seed(int(model.seed))
    left = torch.randn((50, 3, 2), generator=generator) / 2**0.5
    right = torch.randn((50, 2, 3), generator=generator)
    errors = [
        float(((matrices_NSS * (a @ b)).sum((1, 2)) / 3 - targets_N).square().mean())
        for a, b in zip(left, right, strict=True)
    ]
    best = min(range(50), key=errors.__getitem__)
    assert torch.equal(model.left_SR, left[best])
    assert float(model.error) == pytest.approx(errors[best], rel=1e-5)
    assert (int(model.draws), model.right_RS.equal(right[best])) == (50, True)


def test_the_figures_show_the_student() -> None:
    task = _seeded(0, **_SMALL)
    model = Student(3, 2, 1.0)
    figures = task.figures(model, None, {})
    matrix = (model.left_SR @ model.right_RS).detach()
    picture = figures["student"]
    assert picture.dtype == torch.uint8
    assert picture.shape == (3, 255, 255)
    corner = picture[:, 5, 5].tolist()
    assert (corner[0] > corner[2]) == bool(matrix[0, 0] > 0)  # red above 0
    assert figures["singular_values"].shape == (3, 160, 255)
    # The largest bar has nearly the full height.
    assert int((figures["singular_values"][0, 100] == 60).sum()) >= 84
