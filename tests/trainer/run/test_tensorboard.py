"""What TensorBoard shows of metrics.jsonl."""

import io
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.run.tensorboard import TensorBoardLog


def test_only_numbers_and_lists_of_each_gpu_become_scalars(tmp_path: Path) -> None:
    reports: list[str] = []
    log = TensorBoardLog(tmp_path, writes=True, report=reports.append)
    values = {
        "loss": 0.5,
        "gpu_memory_mib_each": [3.0, None, 4.0],
        "counts": [1, 2],
        "confusion": [[1, 2], [3, 4]],
    }
    log.scalars("validation", values, 7)
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {tag: board.Scalars(tag)[0].value for tag in board.Tags()["scalars"]} == {
        "validation/loss": 0.5,
        "validation/gpu_memory_mib/0": 3.0,
        "validation/gpu_memory_mib/2": 4.0,
    }
    assert reports == []


def test_pictures_are_drawn_and_written_in_another_thread(tmp_path: Path) -> None:
    reports: list[str] = []
    log = TensorBoardLog(tmp_path, writes=True, report=reports.append)
    picture_3HW = torch.arange(3 * 5 * 7, dtype=torch.uint8).reshape(3, 5, 7)
    threads: list[str] = []

    def draw() -> dict[str, torch.Tensor]:
        threads.append(threading.current_thread().name)
        return {"one": picture_3HW}

    log.pictures(7, draw)
    log.finish_pictures()
    log.pictures(9, lambda: {"one": torch.zeros_like(picture_3HW)})
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    found = {event.step: event.encoded_image_string for event in board.Images("validation/one")}
    pixels = {step: numpy.array(Image.open(io.BytesIO(png))) for step, png in found.items()}
    assert pixels[7].tolist() == picture_3HW.permute(1, 2, 0).tolist()
    assert set(pixels) == {7, 9}
    assert not pixels[9].any()
    assert threads == ["pictures"]
    assert reports == []


def test_no_two_threads_write_at_once(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path, writes=True, report=[].append)
    locked: dict[int, bool] = {}
    writer = SimpleNamespace(
        add_summary=lambda _summary, step: locked.update({step: log._lock.locked()})
    )
    log._board = SimpleNamespace(file_writer=writer, close=list)  # type: ignore[assignment]
    log.pictures(7, lambda: {"one": torch.zeros(3, 4, 4, dtype=torch.uint8)})
    log.scalars("train", {"loss": 1}, 8)
    log.close()
    assert locked == {7: True, 8: True}


def test_a_picture_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    reports: list[str] = []
    log = TensorBoardLog(tmp_path, writes=True, report=reports.append)
    log.pictures(7, lambda: {"one": torch.zeros(5, 4, 4, dtype=torch.uint8)})
    log.scalars("train", {"loss": 1}, 8)
    log.close()
    log.close()
    assert len(reports) == 1
    assert reports[0].startswith("the pictures of step 7 cannot be written (")
    assert reports[0].endswith("): training continues without them")
