"""Pictures with labels in a CSV file: classes, numbers, several labels, and mistakes in a row."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.here import Here, board_of
from tests.support.pictures import FIELDS, MULTILABEL, REGRESSION, make_pictures, write_labels
from trainbox.errors import WrongUse
from trainer.tasks.images import Images
from trainer.tasks.images_multilabel import ImagesMultilabel
from trainer.tasks.images_regression import ImagesRegression
from trainer.tasks.imaging.parts import TEST, TRAIN, VALIDATION, Picture, split

_CLASSES = ("cross", "disc", "stripes")
_SHORT: dict[str, Any] = {"max_steps": 2, "batch_size": 8, "workers": 0, "threads": 1}


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """Return a folder of 36 pictures with a class, a number and tags in labels.csv."""
    folder = tmp_path / "data/shapes"
    write_labels(folder, make_pictures(folder, _CLASSES, 12, seed=0))
    return folder


def _listed(
    folder: Path, text: str, **fields: str
) -> list[tuple[str, tuple[str, ...], str | None]]:
    """Return (name, labels, part) of each picture in a CSV file with this text."""
    folder.mkdir(exist_ok=True)
    (folder / "labels.csv").write_bytes(text.encode())
    pictures = ImagesMultilabel(**fields).listed(folder, test=False)  # type: ignore[arg-type]
    return [(picture.name, picture.labels, picture.part) for picture in pictures]


def test_the_name_of_a_picture_does_not_depend_on_how_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("a.jpg", "./a.jpg", f"{tmp_path}/data/a.jpg", "b/../a.jpg"):
        text = f"file,label\n{name},x\n"
        assert _listed(Path("data"), text) == [("a.jpg", ("x",), None)], name


# Trainings.


def test_a_csv_of_classes_has_the_bits_of_class_folders(here: Here, shapes: Path) -> None:
    here.train("folders", task="images", fields=FIELDS, **_SHORT)
    fields = FIELDS | {"labels": "labels.csv", "label_column": "class"}
    here.train("csv", task="images", fields=fields, **_SHORT)
    assert here.digest("csv") == here.digest("folders")


def test_labels_that_differ_by_case_are_named() -> None:
    listed = [Picture(Path("a.jpg"), "a.jpg", (name,)) for name in ("disc", "Disc", "ring")]
    described = Images(classes="Disc/disc/ring").described(listed, listed)
    assert described["labels"] == "Disc and disc are different classes"
    assert "labels" not in Images(classes="disc/ring").described(listed, listed)


def test_a_run_with_numbers_validates_predicts_and_exports(here: Here, shapes: Path) -> None:
    fields = REGRESSION | {"ema": 0.5, "test_share": 0.2}
    out = here.train(task="images_regression", fields=fields, **_SHORT)
    assert re.search(r"\nlabels     4\.125 to 8\.\d+, mean 6\.\d+, deviation 1\.\d+\n", out), out
    (entry,) = here.entries("validation")
    assert {"loss", "mae", "rmse", "r2"} <= set(entry)
    names = {tag.rpartition("/")[2] for tag in board_of(here.path()).Tags()["images"]}
    assert names == {"prediction_and_truth"}
    # The mean error of the rows is the metric.
    here.succeeds("evaluate", "runs/r", "--device", "cpu", "--predictions", "out.csv")
    header, *rows = [row.split(",") for row in Path("out.csv").read_text().splitlines()]
    assert header == ["id", "truth", "prediction"]
    errors = [abs(float(row[1]) - float(row[2])) for row in rows]
    assert sum(errors) / len(errors) == pytest.approx(entry["mae"], rel=1e-5)
    assert "examples" in here.succeeds("evaluate", "runs/r", "--device", "cpu", "--data", "test")
    # Neither a prediction nor the file needs the labels.
    code, out, err = here.command("export", "runs/r")
    assert code == 0, err
    (shapes / "labels.csv").unlink()
    code, out, err = here.command("predict", "runs/r", "--device", "cpu", rows[0][0])
    assert code == 0, err
    assert out.splitlines()[0] == "file,prediction"
    assert float(out.splitlines()[1].split(",")[1]) == pytest.approx(float(rows[0][2]), rel=1e-4)


def test_a_run_with_several_labels_validates_and_predicts(here: Here, shapes: Path) -> None:
    out = here.train(task="images_multilabel", fields=MULTILABEL, **_SHORT)
    assert "\nclasses    cross 10, disc 9, even 1" in out
    code, _, err = here.command("export", "runs/r")
    assert code == 0, err
    (entry,) = here.entries("validation")
    labels = [f"f1_{name}" for name in ("cross", "disc", "even", "stripes")]
    assert {"loss", "accuracy", "macro_f1", "exact", *labels} <= set(entry)
    (shapes / "labels.csv").unlink()
    code, out, err = here.command("predict", "runs/r", "--device", "cpu", "data/shapes/disc")
    assert code == 0, err
    header, row = [line.split(",") for line in out.splitlines()[:2]]
    assert header[1:5] == [f"prediction_{label[3:]}" for label in labels]
    assert header[5:] == [f"probability_{label[3:]}" for label in labels]
    found = [(int(x), float(p)) for x, p in zip(row[1:5], row[5:], strict=True)]
    assert all(x == (p > 0.5) for x, p in found)


# Metrics.


def _metrics(task: Any, outputs: Tensor, targets: Tensor) -> Mapping[str, float]:
    with torch.no_grad():
        sums = task.statistics(lambda _: outputs, (None, targets))
    totals = {name: value.double() for name, value in sums.items()}
    return task.metrics(totals | {"examples": torch.tensor(float(len(targets)))})  # type: ignore[no-any-return]


def test_the_metrics_of_numbers_have_their_unit() -> None:
    task = ImagesRegression(mean=100.0, deviation=10.0)
    found = _metrics(task, torch.tensor([101.0, 110.0, 120.0]), torch.tensor([100.0, 110.0, 123.0]))
    assert found["mae"] == pytest.approx(4 / 3)
    assert found["rmse"] == pytest.approx((10 / 3) ** 0.5)
    assert found["loss"] == pytest.approx(10 / 3 / 100)
    assert found["r2"] == pytest.approx(1 - 10 / (121 + 1 + 144), rel=1e-5)


def test_the_metrics_of_labels_are_means_over_the_labels() -> None:
    task = ImagesMultilabel(classes="a/b/c")
    logits = torch.tensor([[1.0, 1, -1], [1, -1, -1], [-1, 1, -1]])
    targets = torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 1, 0]])
    found = _metrics(task, logits, targets)
    assert (found["f1_a"], found["f1_b"]) == (1, 0.8)
    assert found["f1_c"] != found["f1_c"]  # it never occurs
    assert found["macro_f1"] == pytest.approx(0.9)
    assert found["accuracy"] == pytest.approx(8 / 9)
    assert found["exact"] == pytest.approx(2 / 3)


# Reading.


@pytest.mark.parametrize(
    "text",
    [
        "file,label\na.jpg,x\nb.jpg,\"y, z\"\n",
        "\ufefffile;label\r\na.jpg;x\r\n\r\nb.jpg;y|z\r\n",
        "label\tfile_name\nx\ta.jpg\ny;z\tb.jpg",
        " File , Label ,note\n a.jpg , x,\nb.jpg,y|z,\"more, \n lines\"\n",
        "file,x,y,z\na.jpg,1,0,0\nb.jpg,0,1,1.0\n",
    ],
)  # fmt: skip
def test_the_usual_forms_of_csv_are_read(tmp_path: Path, text: str) -> None:
    assert _listed(tmp_path, text) == [("a.jpg", ("x",), None), ("b.jpg", ("y", "z"), None)]


def test_columns_of_other_names_are_chosen(tmp_path: Path) -> None:
    text = "image,kind,fold,part\na.jpg,x,train,hand\nb.jpg,y,TEST,foot\n"
    columns = {"file_column": "image", "label_column": "kind"}
    expected = [("a.jpg", ("x",)), ("b.jpg", ("y",))]
    assert _listed(tmp_path, text, **columns) == [(*each, None) for each in expected]
    found = _listed(tmp_path, text, **columns, part_column="fold")
    assert [part for *_, part in found] == [TRAIN, TEST]


def test_parts_come_from_a_column_or_the_folders(tmp_path: Path) -> None:
    text = "file,label,split\na.jpg,x,train\nb.jpg,x,Valid\nc.jpg,x,test\n"
    assert [part for *_, part in _listed(tmp_path, text)] == [TRAIN, VALIDATION, TEST]
    text = "file,label\ntrain/a.jpg,x\nval/b.jpg,x\n./test/c.jpg,x\n"
    assert [part for *_, part in _listed(tmp_path, text)] == [TRAIN, VALIDATION, TEST]
    for part in ("train", "test"):  # as Hugging Face writes it
        (tmp_path / f"hf/{part}").mkdir(parents=True)
        (tmp_path / f"hf/{part}/metadata.csv").write_text(f"file_name,label\n{part}.png,x\n")
    task = Images(labels="metadata.csv", classes="x/y")
    found = task.listed(tmp_path / "hf", test=False)
    assert [(picture.name, picture.part) for picture in found] == [
        ("test/test.png", TEST),
        ("train/train.png", TRAIN),
    ]


def test_a_share_and_a_seed_choose_parts_that_stay() -> None:
    pictures = [Picture(Path(name), name) for name in map(str, range(1000))]
    first = split(pictures, 0.2, 0.1, 0)
    assert [len(first[part]) for part in (TRAIN, VALIDATION, TEST)] == [693, 212, 95]
    assert split(pictures, 0.2, 0, 0)[VALIDATION] == first[VALIDATION]
    assert split(pictures[:500], 0.2, 0.1, 0)[TEST] == [p for p in first[TEST] if int(p.name) < 500]
    other = split(pictures, 0.2, 0.1, 1)
    assert len({*other[VALIDATION]} & {*first[VALIDATION]}) < 80
    # Training pictures are split if no picture is for validation.
    marked = [Picture(p.path, p.name, part=TEST if int(p.name) < 9 else TRAIN) for p in pictures]
    found = split(marked, 0.2, 0.1, 0)
    assert len(found[TEST]) == 9 and len(found[VALIDATION]) == 211


# Mistakes.

# fmt: off
_MISTAKES = [
    ("cross/0000.jpg,x\ndisc/0000.jpg,y\n",
     "D/labels.csv has no header: add a first row, such as file,label"),
    ("file,label\ncross\\0000.jpg,x\ndisc\\0000.jpg,y\n", "D/labels.csv, row 2: "
     "D/cross\\0000.jpg does not exist (1 more are missing): write / instead of \\ in the names"),
    ("", "D/labels.csv has no rows below a header: write a row for each picture"),
    ("file,label\n", "D/labels.csv has no rows below a header"),
    ("name,label\na.jpg,x\n", "D/labels.csv has no column file or file_name (it has name, label): "
                              "name one of them with --set file_column=NAME"),
    ("file,kind\na.jpg,x\n", "D/labels.csv has no column label or labels (it has file, kind): "),
    ("file,label\na.jpg,x\n,y\n", "D/labels.csv, row 3 has no file: write its name, or remove "),
    ("file,label\na.jpg,x\nb.jpg,\n", "D/labels.csv, row 3 has no label: write the label, or "),
    ("file,label\na.jpg,x\n\nb.jpg,y,z\n", "D/labels.csv, row 4 has 3 cells instead of 2: put "),
    ('file,label\na.jpg,"x\n', "D/labels.csv, row 2: unexpected end of data: close its double "),
    ("file,label\na.jpg,x\n./a.jpg,y\n",
     "D/labels.csv, row 3: a.jpg is listed a second time, after D/labels.csv, row 2: keep one"),
    ("file,label,split\na.jpg,x,train\nb.jpg,y,3\n",
     "D/labels.csv, row 3 has the part '3': write train, val or test"),
    ("file,label\ntrain/a.jpg,x\nb.jpg,y\n",
     "D/labels.csv, row 3: b.jpg is not in the same kind of folder as the first picture: put all"),
    ("file,label\na.jpg,x\nb.jpg,x\n", "D/labels.csv has 1 label(s): add pictures of another one"),
    ("file,label\na.jpg,x\nb.jpg,n/a\n", "D/labels.csv, row 3: the label n/a contains a slash"),
    ("file,label\ncross/0000.jpg,x\ncross/9.jpg,y\n",
     "D/labels.csv, row 3: D/cross/9.jpg does not exist: correct the row, which is relative to"),
    ("file,label\ncross/0000,x\ndisc/0000,y\n",
     "D/labels.csv, row 2: D/cross/0000 does not exist (1 more are missing), but "
     "D/cross/0000.jpg does: write 0000.jpg instead of 0000, and so in each row"),
    ("file,label\ncross/0000.jpg,0.5\ncross/0001.jpg,1.25\ncross/0002.jpg,2\n",
     "data/shapes: the labels are numbers, such as 0.5, which no picture for validation has: train "
     "the task images_regression"),
    ("file,label\ncross/0000.jpg,1\ncross/0001.jpg,2\ncross/0002.jpg,3\n",
     "data/shapes: class 1 has no picture for validation: add pictures, or choose"),
    ("file,label\ncross/0000.JPG,x\ncross/0001.JPG,y\n",
     "D/labels.csv, row 3: D/cross/0001.JPG does not exist (1 more are missing), but "
     "D/cross/0001.jpg does: write 0001.jpg instead of 0001.JPG, and so in each row"),
    ("file,label\n0000.jpg,x\nb.jpg,y\n",
     "D/labels.csv, row 2: D/0000.jpg does not exist (1 more are missing), but "
     "D/cross/0000.jpg does: write cross/0000.jpg instead of 0000.jpg, and so"),
    ("file,label\n0000,x\nb,y\n", "D/labels.csv, row 2: D/0000 does not exist (1 more are missing)"
     ", but D/cross/0000.jpg does: write cross/0000.jpg instead of 0000, and so"),
    ("file,circle,cross\na.jpg,1,0\nb.jpg,0,1\n", "D/labels.csv has no column label or labels, "
     "but 1 or 0 in circle, cross: train the task images_multilabel, or write one column label"),
    ("file label\na.jpg x\n", "D/labels.csv has only one column ('file label'): separate the "
     "columns by a comma, a semicolon or a tab"),
    ("file|label\na.jpg|x\n", "D/labels.csv has only one column ('file|label'): separate"),
    ("a.jpg x\nb.jpg y\n", "D/labels.csv has only one column ('a.jpg x'): separate the"),
]
# fmt: on


@pytest.mark.parametrize(("text", "message"), _MISTAKES)
def test_a_mistake_in_a_csv_is_one_line_with_the_row(
    here: Here, shapes: Path, text: str, message: str
) -> None:
    (shapes / "labels.csv").write_text(text)
    settings = [f"--set={name}={value}" for name, value in FIELDS.items()]
    err = here.refused("train", "images", *settings, "--set=labels=labels.csv", "--device=cpu")
    assert err.startswith("trainbox: " + message.replace("D/", "data/shapes/"))


@pytest.mark.parametrize("place", ["", "train", "test"])
def test_a_csv_that_is_not_named_is_proposed(tmp_path: Path, place: str) -> None:
    for part in ("train", "test")[: 2 * bool(place)]:
        (tmp_path / "images" / part).mkdir(parents=True)
    (tmp_path / "images" / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / "images" / place / "metadata.csv").write_text("file_name,label\n")
    with pytest.raises(WrongUse, match=r"metadata\.csv: if .* add --set labels=metadata\.csv$"):
        Images().with_data(tmp_path)


def test_missing_pictures_are_skipped_on_request(here: Here, shapes: Path) -> None:
    (shapes / "disc/0003.jpg").unlink()
    fields = REGRESSION | {"skip_damaged": "true"}
    out = here.train(task="images_regression", fields=fields, **_SHORT)
    assert "\ndamaged    1 pictures are skipped: data/shapes/disc/0003.jpg" in out


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        (ImagesRegression(), "file,label,split\na,1,val\nb,3;7,train\n",
         "row 3 has the label '3;7', which is no finite number: write a number such as 3.7"),
        (ImagesRegression(), "file,label,split\na,1,train\nb,nan,val\n",
         "row 3 has the label 'nan', which is no "),
        (ImagesMultilabel(), "file,x,note\na,1,0\nb,0,old\n",
         "row 3 has 'old' in the column note: write 1 or 0, or name the column of the labels"),
        (ImagesMultilabel(label_column="tags"), "file,x\na,1\n", "has no column tags (it has fi"),
    ],
)  # fmt: skip
def test_a_wrong_label_is_named_with_its_row(
    tmp_path: Path, task: Images, text: str, message: str
) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/labels.csv").write_text(text)
    for name in "ab":
        (tmp_path / f"images/{name}").write_bytes(b"BM")
    with pytest.raises(WrongUse) as refused:
        task.with_data(tmp_path).train_dataset(tmp_path)
    assert message in str(refused.value)


def test_a_missing_csv_is_named(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(WrongUse, match=r"/images/labels\.csv does not exist: write it with the "):
        ImagesRegression().train_dataset(tmp_path)
    (tmp_path / "images/labels.csv").write_bytes("file,label\nä,x\n".encode("utf-16"))
    with pytest.raises(
        WrongUse, match=r"/label\.csv does not exist: did you mean --set labels=lab"
    ):
        ImagesRegression(labels="label.csv").train_dataset(tmp_path)
    with pytest.raises(WrongUse, match=r"does not exist: did you mean --set labels=labels\.csv\?"):
        ImagesRegression(labels="data/images/labels.csv").train_dataset(tmp_path)
    with pytest.raises(WrongUse, match=r"/labels\.csv is not text in UTF-8: save it as CSV in UTF"):
        ImagesRegression().train_dataset(tmp_path)


def test_a_share_for_the_test_leaves_pictures_for_the_training() -> None:
    with pytest.raises(WrongUse, match=r"^--set test_share=0\.8: use a number below 0\.8, which"):
        Images(test_share=0.8)
