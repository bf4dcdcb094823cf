"""Each built-in task has the same bits on one to three processes and through kills."""

from pathlib import Path

import pytest

from tests.support.films import FIELDS as FILM_FIELDS
from tests.support.films import write_films
from tests.support.har_folder import write_folder
from tests.support.pictures import FIELDS as PICTURE_FIELDS
from tests.support.pictures import MULTILABEL, REGRESSION, make_pictures, write_labels
from tests.support.ranks import Ranks
from tests.support.texts import FIELDS as TEXT_FIELDS
from tests.support.texts import write_texts

# fmt: off
_CASES = [
    ("images", 8, PICTURE_FIELDS | {"label_smoothing": 0.1, "mixup": 0.2, "cutmix": 1.0, "ema": 0.5,
                                    "class_weights": "true"}),
    ("images_regression", 8, REGRESSION | {"ema": 0.5}),
    ("images_multilabel", 8, MULTILABEL),
    ("har", 50, {"mode": "flatten", "width": 64}),  # three unequal shards
    ("har", 50, {"width": 16}),
    ("har", 50, {"model": "lstm", "width": 32, "layers": 2}),  # with dropout between the layers
    ("har", 50, {"model": "transformer", "width": 32}),
    ("video", 16, FILM_FIELDS),
    ("text", 6, TEXT_FIELDS),
    ("ssvae", 64, {"dataset": "digits", "hidden": 64}),
    ("teacher_student", 128, {"method": "gd", "epsilon": 0}),
    ("teacher_student", 128, {"method": "gnc", "epsilon": 0, "draws_per_step": 200}),
]
# fmt: on


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize(("task", "batch", "fields"), _CASES)
def test_the_drill_of_a_task_finds_the_same_bits(
    ranks: Ranks,
    tmp_path: Path,
    task: str,
    batch: int,
    fields: dict[str, object],
) -> None:
    data = tmp_path / "data"
    paths = make_pictures(data / "shapes", ("cross", "disc", "stripes"), 12, seed=0)
    write_labels(data / "shapes", paths)
    write_texts(data / "texts")
    if task == "har":
        write_folder(data)
    if task == "video":
        write_films(data / "video")
    env = {
        "SET": " ".join(f"{name}={value}" for name, value in fields.items()),
        "TRAINBOX_BATCH_SIZE": str(batch),
    }
    words = ("drill", task, "--shards", "3", "--steps", "12", "--seed", "1", "--gpus", "0")
    ended = ranks.launch(*words, env=env).wait()
    assert ended.code == 0, ended.out + ended.errs[0]
    assert "the same bits in all 5 trainings" in ended.out
    assert ended.out.count("killed after step") == 2
