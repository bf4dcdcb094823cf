"""Classify rare behaviours in short clips of grey video, from a folder of videos per class."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from trainbox import Classification, WrongUse, metrics, pictures
from trainer.tasks.reading.fields import FROM_1, SHARE, check_fields
from trainer.tasks.reading.files import (
    check_classes,
    class_files,
    class_weights,
    find_classes,
    refuse_missing,
)
from trainer.tasks.reading.videos import ENDINGS, VideoFile, decoded, frame_count

# Shape suffixes: B clips of a batch, C channels, T frames, H height, W width, K classes.

_SHEET_ROWS, _SHEET_COLUMNS = 6, 4
_BRIGHTNESS = 0.2  # the largest change, as a share of half the range from black to white


@dataclass(frozen=True)
class Video(Classification):
    """Clips of grey video from a folder per class, with larger weights for rare classes.

    No recording is in both the training part and the validation part.
    """

    epochs: ClassVar[int] = 30
    batch_size: ClassVar[int] = 48
    learning_rate: ClassVar[float] = 1e-3
    best_by: ClassVar[str] = "max:macro_f1"
    example_endings: ClassVar[tuple[str, ...]] = ENDINGS

    folder: str = "video"
    # The names of the folders, as in rest/groom. An empty string means all folders, sorted.
    classes: str = ""
    frames: int = 17
    size: int = 256
    width: int = 32
    validation_share: float = 0.2
    weighted: bool = True
    flips: bool = True

    def __post_init__(self) -> None:
        check_fields(self, FROM_1, "frames", "size", "width")
        check_fields(self, SHARE, "validation_share")
        if self.classes:
            check_classes(self.class_names)

    def with_classes(self, names: tuple[str, ...]) -> Self:
        return replace(self, classes="/".join(names))

    def with_data(self, data_dir: Path) -> Self:
        if self.classes:
            return self
        names = find_classes(self._existing_folder(data_dir), "videos", "NAME.mp4")
        return replace(self, classes="/".join(names))

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The classes in the order of the model's outputs."""
        return tuple(self.classes.split("/")) if self.classes else ()

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self._clips(data_dir)[0]

    def validation_dataset(self, data_dir: Path) -> Dataset[Any]:
        return self._clips(data_dir)[1]

    def prediction_dataset(self, files: Sequence[Path]) -> Dataset[Any]:
        """Return all clips of the videos, without labels. Each folder gets a .cache of frames."""
        clips: list[_Clip] = []
        for path in files:
            video = VideoFile(path, 0)
            (frames_of,) = decoded([video], path.parent / ".cache", self.size)
            length = frame_count(frames_of, self.size)
            if length < self.frames:
                raise WrongUse(
                    f"{path} has {length} frames, fewer than the {self.frames} of a clip: leave it "
                    "out"
                )
            clips += _cut(video, frames_of, length, self.frames)
        return _Clips(clips, self.frames, torch.ones(len(self.class_names)))

    def notes(self, train: Dataset[Any], validation: Dataset[Any]) -> dict[str, str]:
        assert isinstance(train, _Clips) and isinstance(validation, _Clips)
        counts, held_out, weights = train.counts(), validation.counts(), train.weights_K.tolist()
        classes = ", ".join(
            f"{name} {counts[k]:,} x {weights[k]:.3g}" for k, name in enumerate(self.class_names)
        )
        clips = ", ".join(f"{name} {held_out[k]:,}" for k, name in enumerate(self.class_names))
        recordings = len(train.recordings) + len(validation.recordings)
        return {
            "classes": f"{classes} (training clips x weight of each)",
            "validation": f"{clips}, from {len(validation.recordings)} of {recordings} recordings",
        }

    def build_model(self) -> nn.Module:
        w = self.width
        return nn.Sequential(
            *_block(1, w, kernel=(3, 5, 5), stride=(1, 2, 2)),
            *_block(w, 2 * w, kernel=(3, 3, 3), stride=(1, 2, 2)),
            *_block(2 * w, 4 * w, kernel=(3, 3, 3), stride=(2, 2, 2)),
            *_block(4 * w, 8 * w, kernel=(3, 3, 3), stride=(2, 2, 2)),
            *_block(8 * w, 8 * w, kernel=(3, 3, 3), stride=(2, 2, 2)),
            _Mean(),
            nn.Linear(8 * w, len(self.class_names)),
        )

    def prepare(self, batch: Any, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        clips_BTHW, labels_B, weights_B = batch
        if training and self.flips:
            for across in (2, 3):
                flipped_B = torch.rand(len(clips_BTHW), device=clips_BTHW.device) < 0.5
                clips_BTHW = torch.where(
                    flipped_B.view(-1, 1, 1, 1), clips_BTHW.flip(across), clips_BTHW
                )
        clips_BCTHW = clips_BTHW[:, None].float() / 127.5 - 1
        if training:
            clips_BCTHW += _BRIGHTNESS * (
                2 * torch.rand(len(clips_BCTHW), 1, 1, 1, 1, device=clips_BCTHW.device) - 1
            )
        return clips_BCTHW, labels_B, weights_B

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        clips_BCTHW, labels_B, weights_B = batch
        return {"cross_entropy": _weighted_losses(model(clips_BCTHW), labels_B, weights_B)}

    def statistics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        clips_BCTHW, labels_B, weights_B = batch
        logits_BK = model(clips_BCTHW).float()
        return {
            "loss": _weighted_losses(logits_BK, labels_B, weights_B).sum(),
            "confusion": metrics.confusion_matrix(
                labels_B, logits_BK.argmax(1), len(self.class_names)
            ),
        }

    def predictions(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        clips_BCTHW, labels_B, _ = batch
        return super().predictions(model, (clips_BCTHW, labels_B))

    def figures(
        self, model: nn.Module, batch: Any, totals: Mapping[str, Tensor]
    ) -> dict[str, pictures.Picture]:
        clips_BCTHW, labels_B, _ = batch
        predictions_B = model(clips_BCTHW).argmax(1)
        # Show the wrongly classified clips first.
        shown = (
            (predictions_B == labels_B).int().argsort(stable=True)[: _SHEET_ROWS * _SHEET_COLUMNS]
        )
        return {
            "confusion_matrix": partial(
                pictures.confusion_matrix, totals["confusion"], self.class_names
            ),
            "clips": partial(
                _sheet,
                clips_BCTHW[shown, 0].cpu(),
                labels_B[shown].tolist(),
                predictions_B[shown].tolist(),
                self.class_names,
            ),
        }

    def _existing_folder(self, data_dir: Path) -> Path:
        folder = data_dir / self.folder
        refuse_missing(folder, "videos", "CLASS/NAME.mp4")
        return folder

    def _clips(self, data_dir: Path) -> "tuple[_Clips, _Clips]":
        """Return the training part and the validation part, and decode new videos.

        Both parts have the class weights of the training part.

        Raises:
            WrongUse: a class has too few recordings, or a video cannot be used.
            StorageFailure: the decoded frames cannot be written.
        """
        # Find the videos, and choose the recordings for validation.
        folder = self._existing_folder(data_dir)
        files = class_files(folder, self.class_names, ENDINGS, "video", ENDINGS)
        videos = [VideoFile(path, label) for path, label in files]
        recordings = [
            {video.recording for video in videos if video.label == k}
            for k in range(len(self.class_names))
        ]
        held_out = validation_recordings(recordings, self.validation_share)
        for name, own in zip(self.class_names, recordings, strict=True):
            if not own & held_out or not own - held_out:
                raise WrongUse(
                    f"{folder / name} has too few recordings for both training and validation "
                    f"({', '.join(sorted(own)[:3])}): add one (the recording is a file's name up "
                    "to its first dot)"
                )
        # Decode the videos that are not in the cache.
        frames_of = decoded(videos, folder / ".cache", self.size)
        lengths = {path: frame_count(path, self.size) for path in frames_of}
        if short := [
            video.path
            for video, path in zip(videos, frames_of, strict=True)
            if lengths[path] < self.frames
        ]:
            raise WrongUse(
                f"{len(short)} video(s) in {folder} have fewer than frames={self.frames} "
                f"frames ({short[0]} is the first): remove them, or lower --set frames=N"
            )
        # Cut the videos into clips that do not overlap.
        parts: tuple[list[_Clip], list[_Clip]] = ([], [])
        for video, path in zip(videos, frames_of, strict=True):
            parts[video.recording in held_out].extend(_cut(video, path, lengths[path], self.frames))
        weights_K = torch.ones(len(self.class_names))
        if self.weighted:
            weights_K = class_weights([clip.label for clip in parts[0]], len(self.class_names))
        # Shuffle the validation clips, so that a batch and its sheet of clips has several classes.
        order = torch.randperm(len(parts[1]), generator=torch.Generator().manual_seed(0)).tolist()
        return _Clips(parts[0], self.frames, weights_K), _Clips(
            [parts[1][i] for i in order], self.frames, weights_K
        )


def validation_recordings(recordings: Sequence[set[str]], share: float) -> set[str]:
    """Choose the recordings for validation: about `share` of each class, and at least one.

    `recordings` has the names of the recordings of each class. The choice depends on the digests of
    the names. So files of another class do not change it, unless they share a recording. A
    recording is for validation in all of its classes. Each class keeps a recording for training. A
    class in which this is impossible gets no recording for validation.
    """
    chosen: set[str] = set()
    # Classes with few recordings choose first.
    for own in sorted(recordings, key=lambda names: (len(names), sorted(names))):
        for name in sorted(own - chosen, key=lambda name: hashlib.sha256(name.encode()).digest()):
            if len(own & chosen) >= max(1, round(share * len(own))):
                break
            if all(others - chosen - {name} for others in recordings if name in others):
                chosen.add(name)
    return chosen


def _sheet(
    clips_BTHW: Tensor, labels: Sequence[int], predictions: Sequence[int], names: Sequence[str]
) -> Tensor:
    """Draw the first, middle and last frame of each clip under its predicted class.

    A wrong prediction is red, and the true class follows.
    """
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(10, 1.25 * -(-len(clips_BTHW) // _SHEET_COLUMNS)), dpi=80, layout="constrained"
    )
    for position, (clip_THW, label, prediction) in enumerate(
        zip(clips_BTHW, labels, predictions, strict=True), 1
    ):
        axes = figure.add_subplot(-(-len(clips_BTHW) // _SHEET_COLUMNS), _SHEET_COLUMNS, position)
        gap = -(-clip_THW.shape[2] // 32)
        frames_HW = [
            F.pad(clip_THW[t], (gap, gap), value=float(clip_THW.max()))
            for t in (0, len(clip_THW) // 2, -1)
        ]
        axes.imshow(torch.cat(frames_HW, 1).numpy(), cmap="gray")
        axes.set_axis_off()
        right = label == prediction
        caption = names[prediction] if right else f"{names[prediction]}, not {names[label]}"
        axes.set_title(caption, fontsize=9, color="#006e32" if right else "#be1414")
    return pictures.from_figure(figure)


def _weighted_losses(logits_BK: Tensor, labels_B: Tensor, weights_B: Tensor) -> Tensor:
    return weights_B * F.cross_entropy(logits_BK, labels_B, reduction="none")


def _block(
    inputs: int, outputs: int, kernel: tuple[int, int, int], stride: tuple[int, int, int]
) -> list[nn.Module]:
    padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
    convolution = nn.Conv3d(inputs, outputs, kernel, stride, padding, bias=False)
    return [convolution, nn.BatchNorm3d(outputs), nn.ReLU(inplace=True)]


class _Mean(nn.Module):
    """The mean over time and space, (B, C, T, H, W) to (B, C).

    The gradient of torch's adaptive pooling is not deterministic on a GPU.
    """

    def forward(self, features_BCTHW: Tensor) -> Tensor:
        return features_BCTHW.mean((2, 3, 4))


@dataclass(frozen=True)
class _Clip:
    """A clip that starts at frame `start` of `video`, whose frames are in the .npy file `path`."""

    video: Path
    path: Path
    start: int
    label: int
    recording: str


def _cut(video: VideoFile, path: Path, length: int, frames: int) -> list[_Clip]:
    """Return the clips of `frames` frames, which do not overlap."""
    return [
        _Clip(video.path, path, start, video.label, video.recording)
        for start in range(0, length - frames + 1, frames)
    ]


class _Clips(Dataset[Any]):
    """A dataset of (clip (T, H, W) uint8, label, weight).

    The file is opened for each clip, so that workers do not share open files.
    """

    def __init__(self, clips: list[_Clip], frames: int, weights_K: Tensor) -> None:
        self.clips, self.frames, self.weights_K = clips, frames, weights_K

    @property
    def ids(self) -> list[str]:
        """The path of each clip's video, and the number of the clip's first frame."""
        return [f"{clip.video}:{clip.start}" for clip in self.clips]

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> tuple[Tensor, int, Tensor]:
        clip = self.clips[index]
        frames_THW = numpy.load(clip.path, mmap_mode="r")[clip.start : clip.start + self.frames]
        return torch.from_numpy(numpy.array(frames_THW)), clip.label, self.weights_K[clip.label]

    def counts(self) -> Counter[int]:
        """Return the number of clips of each class."""
        return Counter(clip.label for clip in self.clips)

    @property
    def recordings(self) -> set[str]:
        return {clip.recording for clip in self.clips}
