"""What TensorBoard shows of metrics.jsonl."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.records.tensorboard import TensorBoardLog


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
