"""The video classifier on small films: motion, the split by recording, decoding and errors."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.support.films import CLIPS, COUNTS, FIELDS, FRAMES, SIDE, encode, film, write_films
from tests.support.here import Here, board_of
from trainbox.errors import StorageFailure, WrongUse
from trainer.tasks.reading import videos
from trainer.tasks.video import Video, validation_recordings

_FEW = {"rest": 5, "vertical": 3}
_MISSING = "does not exist: put videos there, as data/video/CLASS/NAME.mp4, or set another"


def _task(**fields: Any) -> Video:
    return Video(**{**FIELDS, **fields})


def _write_half_encoded(folder: Path) -> None:
    """Write all films, two of them as an .mp4 and an .avi."""
    write_films(folder)
    for name, ending, codec in (("rest-00", ".mp4", "libx264"), ("vertical-00", ".avi", "mpeg4")):
        source = folder / name.partition("-")[0] / f"{name}.npy"
        encode(source.with_suffix(ending), numpy.load(source), codec)
        source.unlink()


_SHORT: dict[str, Any] = {
    "epochs": 10,
    "eval_every": 5,
    "batch_size": 16,
    "learning_rate": 5e-3,
    "workers": 0,
    "threads": 1,
    "fields": FIELDS | {"width": 4},
}


@pytest.mark.slow
@pytest.mark.rare
def test_a_short_training_separates_two_motions(here: Here) -> None:
    """A model that sees one frame of each clip stays below 0.7."""
    write_films(here.folder / "data/video", {"horizontal": 16, "vertical": 16})
    here.train(task="video", **_SHORT)
    assert max(entry["macro_f1"] for entry in here.entries("validation")) > 0.8


def test_a_run_reports_classes_recordings_and_figures(here: Here) -> None:
    _write_half_encoded(here.folder / "data/video")
    out = here.train(task="video", max_steps=1, batch_size=4, workers=0, threads=1, fields=FIELDS)
    assert "\nclasses    horizontal 104 x 0.875, pulse 32 x 2.84, rest 172 x 0.529, " in out
    assert "\nvalidation horizontal 24, pulse 8, rest 44, vertical 16, from 23 of 114 " in out
    (entry,) = here.entries("validation")
    assert sum(map(sum, entry["confusion"])) == 24 + 8 + 44 + 16
    pictures = board_of(here.path()).Tags()["images"]
    assert {tag.rpartition("/")[2] for tag in pictures} == {"confusion_matrix", "clips"}


def test_the_default_model_has_its_documented_size() -> None:
    task = Video(classes="/".join("abcdefg"))
    model = task.build_model().eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_936_359
    clips, _, _ = task.prepare(
        (torch.zeros(1, 17, 256, 256, dtype=torch.uint8), None, None), training=False
    )
    with torch.no_grad():
        assert model(clips).shape == (1, 7)


# The split into training and validation.


def test_no_recording_is_in_both_parts_and_all_clips_are_in_one(tmp_path: Path) -> None:
    write_films(tmp_path / "video")
    task = _task().with_data(tmp_path)
    train, validation = task._clips(tmp_path)
    assert not train.recordings & validation.recordings
    assert len(train.recordings | validation.recordings) == sum(COUNTS.values())
    assert len(train) + len(validation) == 4 * sum(COUNTS.values())
    for label, count in enumerate(COUNTS.values()):
        assert validation.counts()[label] == 4 * round(0.2 * count)
    assert {validation[i][1] for i in range(16)} == {0, 1, 2, 3}  # mixed


def test_new_recordings_of_a_class_do_not_move_other_classes(tmp_path: Path) -> None:
    write_films(tmp_path / "video", _FEW)
    before = _task().with_data(tmp_path)._clips(tmp_path)[1].recordings
    for number in range(5, 15):
        numpy.save(tmp_path / f"video/rest/rest-{number:02}.npy", film("rest", number))
    after = _task().with_data(tmp_path)._clips(tmp_path)[1].recordings
    assert {name for name in before if "vertical" in name} == {
        name for name in after if "vertical" in name
    }
    assert len([name for name in after if "rest" in name]) == 3


def test_all_files_of_a_recording_are_in_one_part(tmp_path: Path) -> None:
    for kind in ("rest", "vertical"):
        (tmp_path / "video" / kind).mkdir(parents=True)
        for mouse in range(5):
            for part in range(2):
                numpy.save(
                    tmp_path / f"video/{kind}/mouse{mouse}.{part}.npy",
                    film(kind, 10 * mouse + part),
                )
    train, validation = _task().with_data(tmp_path)._clips(tmp_path)
    assert len(validation.recordings) == 1
    assert len(train.recordings) == 4
    assert len(validation) == 2 * 2 * 4


_MANY = {f"many-{i}" for i in range(50)}


# fmt: off
_RECORDINGS = [
    pytest.param([{"a", "b"}], 0.0, [1], id="at least one"),
    pytest.param([{"a", "b"}], 0.99, [1], id="one is left to train on"),
    pytest.param([_MANY, {"x", "y", "z"}], 0.2, [10, 1], id="a share of each class"),
    pytest.param([{"a", "b"}, {"b", "c"}, {"c", "d"}, {"d", "a"}], 0.2, [1, 1, 1, 1],
     id="shared recordings"),
    pytest.param([{"a"}, {"b", "c"}], 0.2, [0, 1], id="nothing to choose from"),
]
# fmt: on


@pytest.mark.parametrize(("recordings", "share", "expected"), _RECORDINGS)
def test_the_choice_of_validation_recordings(
    recordings: list[set[str]], share: float, expected: list[int]
) -> None:
    chosen = validation_recordings(recordings, share)
    assert [len(own & chosen) for own in recordings] == expected
    assert validation_recordings(recordings[::-1], share) == chosen


# The weights.


@pytest.mark.parametrize(("weighted", "expected"), [(True, [20 / 24, 20 / 16]), (False, [1, 1])])
def test_each_example_has_its_class_weight_in_both_parts(
    tmp_path: Path, weighted: bool, expected: list[float]
) -> None:
    write_films(tmp_path / "video", {"rest": 4, "vertical": 3})
    for part in _task(weighted=weighted).with_data(tmp_path)._clips(tmp_path):
        for clip, label, weight in (part[i] for i in range(len(part))):
            assert clip.shape == (FRAMES, SIDE, SIDE)
            assert float(weight) == pytest.approx(expected[label])


class _Fixed(nn.Module):
    def forward(self, clips_BCTHW: Tensor) -> Tensor:
        return torch.tensor([[0.0, 0.0], [2.0, 0.0]])


def test_each_loss_is_multiplied_by_its_own_weight() -> None:
    task, batch = (
        _task(classes="a/b"),
        (torch.zeros(2, 1, 1, 1, 1), torch.tensor([0, 1]), torch.tensor([0.5, 3.0])),
    )
    expected = [0.5 * 0.6931472, 3 * 2.1269280]
    assert task.losses(_Fixed(), batch)["cross_entropy"].tolist() == pytest.approx(expected)
    found = task.statistics(_Fixed(), batch)
    assert float(found["loss"]) == pytest.approx(sum(expected))
    assert found["confusion"].tolist() == [[1, 0], [1, 0]]


# Augmentation.


def test_clips_become_floats_and_are_mirrored_only_in_training() -> None:
    clips = torch.randint(
        0, 256, (64, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    plain = _task().prepare((clips, None, None), training=False)[0]
    assert plain.shape == (64, 1, 3, 4, 4)
    assert plain[:, 0].allclose(clips / 127.5 - 1, atol=1e-6)
    for flips, expected in ((True, 4), (False, 1)):
        torch.manual_seed(7)
        once = _task(flips=flips).prepare((clips, None, None), training=True)[0]
        ways = set()
        for clip, raw in zip(once, plain, strict=True):
            mirrored = {(): raw, (2,): raw.flip(2), (3,): raw.flip(3), (2, 3): raw.flip(2, 3)}
            (way,) = [key for key, frames in mirrored.items() if (clip - frames).std() < 1e-5]
            ways.add(way)
            assert abs(float((clip - mirrored[way]).mean())) <= 0.2
        assert len(ways) == expected
        # Each clip has its own brightness.
        assert (once.mean((1, 2, 3, 4)) - plain.mean((1, 2, 3, 4))).std() > 0.05
        torch.manual_seed(7)
        assert _task(flips=flips).prepare((clips, None, None), training=True)[0].equal(once)


# Decoding.


@pytest.mark.parametrize(
    ("ending", "codec"), [(".mp4", "libx264"), (".avi", "mpeg4"), (".MKV", "libx264")]
)
def test_a_video_is_decoded_once_to_its_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, codec: str
) -> None:
    write_films(tmp_path / "video", _FEW)
    # Each frame is brighter than the one before.
    frames = film("rest", 99, 40) // 2 + numpy.arange(0, 120, 3, numpy.uint8)[:, None, None]
    encode(tmp_path / f"video/rest/new{ending}", frames, codec)
    task = _task().with_data(tmp_path)
    datasets = task._clips(tmp_path)
    (cached,) = (tmp_path / "video/.cache").rglob("*.*")
    assert cached.name.startswith(f"new{ending}-")
    decoded = numpy.load(cached)
    assert decoded.shape == (40, SIDE, SIDE)
    # A video keeps only some shades of grey, but the order and content of the frames must match.
    assert numpy.abs(decoded.astype(float) - frames).mean() < 12
    for t in (0, 20, 39):
        errors = numpy.abs(decoded[t].astype(float) - frames).mean((1, 2))
        assert errors.argmin() == t
    clips = [clip for dataset in datasets for clip in dataset.clips if clip.path == cached]
    # The last 4 frames do not fill a clip.
    assert [clip.start for clip in sorted(clips, key=lambda clip: clip.start)] == [0, 9, 18, 27]
    with monkeypatch.context() as patch:
        patch.setattr(videos, "_decode", None)
        task._clips(tmp_path)
    encode(
        tmp_path / f"video/rest/new{ending}", frames[:30], codec
    )  # a new file with the same name
    task._clips(tmp_path)
    assert sorted(len(numpy.load(path)) for path in (tmp_path / "video/.cache").rglob("*.npy")) == [
        30,
        40,
    ]


def test_a_video_of_another_size_is_made_square(tmp_path: Path) -> None:
    bright = numpy.zeros((12, 48, 64), numpy.uint8)
    bright[:, :24, :32] = 200
    encode(tmp_path / "wide.mp4", bright)
    videos._decode(tmp_path / "wide.mp4", tmp_path / "out.npy", SIDE)
    frames = numpy.load(tmp_path / "out.npy")
    assert frames.shape == (12, SIDE, SIDE)
    assert frames[:, :14, :14].min() > 180
    assert frames[:, 18:].max() < 20
    assert frames[:, :, 18:].max() < 20


def test_an_unwritable_cache_is_reported(tmp_path: Path) -> None:
    write_films(tmp_path / "video", _FEW)
    encode(tmp_path / "video/rest/new.mp4", film("rest", 99))
    (tmp_path / "video/.cache").write_text("in the way")
    with pytest.raises(StorageFailure, match=r"cannot be written \(.*\) and needs .* or use .npy"):
        _task().with_data(tmp_path).train_dataset(tmp_path)


# Unusable data.


def _save(path: Path, frames: Any) -> None:
    numpy.save(path, frames)


# fmt: off
_DAMAGES = [
    pytest.param(lambda rest: (rest.parent / "empty").mkdir(), r"video/empty has no video \(.mp4, ",
     id="empty class"),
    pytest.param(lambda rest: [path.unlink() for path in sorted(rest.iterdir())[1:]],
     r"video/rest has too few recordings for both training and validation \(rest-00\): add one",
     id="one video"),
    pytest.param(lambda rest: (rest / "bad.mp4").write_bytes(b"no video"),
     r"video/rest/bad.mp4 cannot be decoded \(", id="no video"),
    pytest.param(lambda rest: (rest / "bad.npy").write_bytes(b"no array"),
     r"rest/bad.npy cannot be read \(", id="no array"),
    pytest.param(lambda rest: _save(rest / "bad.npy", numpy.zeros((9, 16, 32), numpy.uint8)),
     r"bad.npy has uint8 of shape \(9, 16, 32\) instead of uint8 of shape \(T, 32, 32\): convert "
     r"it, or .* --set size=N", id="another size"),
    pytest.param(lambda rest: _save(rest / "bad.npy", numpy.zeros((8, 32, 32), numpy.uint8)),
     r"1 video\(s\) in .*video have fewer than frames=9 frames \(.*rest/bad.npy is the first\): "
     r"remove them, or lower", id="too short"),
]
# fmt: on


@pytest.mark.parametrize(("damage", "message"), _DAMAGES)
def test_unusable_data_is_reported(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    write_films(tmp_path / "video", _FEW)
    damage(tmp_path / "video/rest")
    with pytest.raises(WrongUse, match=message) as failure:
        _task().with_data(tmp_path).train_dataset(tmp_path)
    assert "\n" not in str(failure.value)
    assert list((tmp_path / "video").glob(".cache/rest/.*")) == []  # no half-written file


@pytest.mark.parametrize("words", [[], ["--set", "classes=a/b"]])
def test_a_missing_folder_is_reported_with_the_expected_layout(
    here: Here, words: list[str]
) -> None:
    err = here.refused("train", "video", "--device", "cpu", *words)
    assert re.match(rf"trainbox: data/video {_MISSING}", err)


def test_the_field_classes_sets_the_order_of_the_outputs(tmp_path: Path) -> None:
    write_films(tmp_path / "video", _FEW)
    (tmp_path / "video/.hidden").mkdir()
    found = _task().with_data(tmp_path)
    assert found.class_names == ("rest", "vertical")
    assert _task(classes="vertical/rest").with_data(tmp_path).class_names == ("vertical", "rest")


def test_the_predictions_of_files_are_those_of_their_clips_in_an_evaluation(here: Here) -> None:
    write_films(Path("data/video"), {"rest": 3, "vertical": 3})
    encode(Path("data/video/rest/film.mp4"), film("rest", 7))
    settings: dict[str, Any] = {"workers": 0, "threads": 1, "fields": FIELDS | {"width": 4}}
    here.train(task="video", max_steps=1, batch_size=4, **settings)
    assert here.command("evaluate", "runs/r", "--device", "cpu", "--predictions", "out.csv")[0] == 0
    header, *rows = [row.split(",") for row in Path("out.csv").read_text().splitlines()]
    assert header == ["id", "truth", "prediction", "probability_rest", "probability_vertical"]
    paths = sorted({row[0].rpartition(":")[0] for row in rows})
    assert len(paths) >= 2
    code, out, _ = here.command("predict", "runs/r", "--device", "cpu", *paths)
    assert code == 0
    header, *found = [row.split(",") for row in out.splitlines()]
    assert header == ["file", "prediction", "probability_rest", "probability_vertical"]
    assert [row[0] for row in found] == [
        f"{path}:{start}" for path in paths for start in range(0, FRAMES * CLIPS, FRAMES)
    ]
    expected = {row[0]: row for row in rows}
    assert len(found) == len(expected)
    for name, prediction, *shares in found:
        assert prediction == expected[name][2]
        assert [float(share) for share in shares] == pytest.approx(
            [float(share) for share in expected[name][3:]], rel=1e-5
        )
    # A film is decoded beside it. The data of the training is not needed.
    shutil.copy("data/video/rest/film.mp4", "new.mp4")
    shutil.rmtree("data")
    code, out, _ = here.command("predict", "runs/r", "--device", "cpu", "new.mp4")
    assert code == 0 and [row.split(",")[0] for row in out.splitlines()[1:]] == [
        f"new.mp4:{start}" for start in (0, 9, 18, 27)
    ]
    assert len(list(Path(".cache").rglob("*.npy"))) == 1
    numpy.save("short.npy", film("rest", 1, frames=FRAMES - 1))
    err = here.refused("predict", "runs/r", "--device", "cpu", "new.mp4", "short.npy", silent=True)
    assert err == "trainbox: short.npy has 8 frames, fewer than the 9 of a clip: leave it out\n"


def test_a_link_to_a_missing_video_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").symlink_to("gone.mp4")
    with pytest.raises(WrongUse, match=r"/a\.mp4 cannot be read \(No such file or directory\): "):
        Video(classes="rest/groom").prediction_dataset([tmp_path / "a.mp4"])


def test_two_videos_with_equal_names_are_decoded_apart(tmp_path: Path) -> None:
    names = [tmp_path / part / "day/clip.avi" for part in ("rest", "groom")]
    for name in names:
        name.parent.mkdir(parents=True)
        name.write_bytes(b"same size")
        os.utime(name, (1, 1))
    assert len({videos._cached(name, tmp_path / ".cache", SIDE) for name in names}) == 2
