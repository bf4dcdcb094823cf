"""Folders of the task `images` that are parts, links, thumbnails, and files of other endings."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support.here import Here
from tests.support.pictures import FIELDS, make_pictures
from trainbox.found_files import files_in
from trainer.tasks.reading.files import find_classes


def _data(here: Here, *fields: str) -> tuple[str, ...]:
    words = [f"--set={name}={value}" for name, value in FIELDS.items()]
    return ("train", "images", "--device", "cpu", "--max-steps", "1", *words, *fields)


@pytest.mark.parametrize(
    ("parts", "classes"),
    [
        (("Training", "Testing"), ["cat", "dog"]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (("Training_set", "test-set"), ["cat"]),
                (("seg_train/seg_train", "seg_test/seg_test"), ["cat", "dog"]),
                (("images", "annotations"), ["cat", "dog"]),
                (("images", "masks"), []),
                (("one", "other"), ["cat", "dog"]),
            )
        ),
    ],
)
def test_parts_of_the_data_are_not_classes(
    here: Here, parts: tuple[str, str], classes: list[str]
) -> None:
    for number, part in enumerate(parts):
        folder = here.folder / "data" / "shapes" / part
        # One of the parts has another class.
        names = classes if classes != ["cat"] else [*classes, *["dog"][:number]]
        make_pictures(folder if names else folder.parent, names or [folder.name], 30, number)
    first, second = sorted(part.partition("/")[0] for part in parts)
    err = here.refused(*_data(here), code=2)
    assert f"{first} and {second} " in err and "may be parts of the data" in err
    assert f"as in --set folder=shapes/{first}, or the classes, as " in err
    assert f"--set classes={first}/{second}" in err
    here.succeeds(*_data(here, f"--set=classes={first}/{second}", "--batch-size", "4"))


def test_classes_with_one_folder_or_other_folders_are_classes(tmp_path: Path) -> None:
    for name in ("cat/images", "dog/images", "cow/brown", "cow/black", "pig/brown", "pig/pink"):
        (tmp_path / name).mkdir(parents=True)
    assert find_classes(tmp_path, "pictures", "x.jpg") == ["cat", "cow", "dog", "pig"]


def test_a_link_to_a_folder_around_it_is_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "shapes"
    (root / "cat/inner").mkdir(parents=True)
    (root / "dog").mkdir()
    for name in ("cat/a.jpg", "cat/inner/b.jpg", "dog/c.jpg"):
        (root / name).touch()
    (root / "cat/all").symlink_to(root)
    (root / "cat/inner/up").symlink_to("..")
    (root / "cat/far").symlink_to(tmp_path.parent)
    (root / "self").symlink_to(".")
    assert [*files_in(root / "cat", (".jpg",))] == [root / "cat/a.jpg", root / "cat/inner/b.jpg"]
    assert find_classes(root, "pictures", "x.jpg") == ["cat", "dog"]
    (tmp_path / "elsewhere").symlink_to(root / "dog")
    (root / "cat/dogs").symlink_to(tmp_path / "elsewhere")
    assert len([*files_in(root / "cat", (".jpg",))]) == 3


def test_other_endings_are_read_and_thumbnails_are_left_out_with_a_count(here: Here) -> None:
    root = here.folder / "data" / "shapes"
    paths = make_pictures(root, ["cat", "dog"], 30, 1)
    paths[0].rename(paths[0].with_suffix(".JFIF"))
    paths[1].rename(paths[1].with_suffix(".jpe"))
    for folder in (root / "@eaDir", root / "cat/@eaDir/0003.jpg", root / "dog/__MACOSX"):
        folder.mkdir(parents=True)
        shutil.copy(paths[5], folder / "SYNOPHOTO_THUMB_M.jpg")
    shutil.copy(paths[5], root / "dog/._0001.jpg")
    out = here.succeeds(*_data(here, "--batch-size", "4"))
    counts = re.search(r"\ndata +([\d,]+) training and ([\d,]+) validation", out)
    assert counts and int(counts[1]) + int(counts[2]) == 60
    assert re.search(r"\nleft out +\d hidden pictures or thumbnails, such as data/shapes/", out)
    assert "\nclasses    cat" in out and "@eaDir" not in out.partition("left out")[0]
