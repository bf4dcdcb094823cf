"""What TensorBoard shows of metrics.jsonl."""

import re
import resource
import signal
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import list_session_groups
from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS, ListSessionGroupsRequest
from tensorboard.plugins.hparams.backend_context import Context

from tests.support.here import board_of
from trainbox.options.config import Config
from trainer.records.tensorboard import TensorBoardLog


def test_a_picture_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    reports: list[str] = []
    log = TensorBoardLog(tmp_path, reports.append)
    log.begin(1)
    log.pictures(7, True, lambda: {"one": torch.zeros(5, 4, 4, dtype=torch.uint8)})
    log.write(lambda file: file.scalars({"train/loss": 1}, 8))
    log.close()
    log.close()
    assert len(reports) == 1
    assert reports[0].startswith("the pictures of step 7 cannot be written (")
    assert reports[0].endswith("): training continues without them")


def test_the_pictures_of_the_best_step_are_files(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path, pytest.fail)
    log.begin(1)
    picture = torch.zeros(3, 4, 4, dtype=torch.uint8)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/notes-of-me.png").touch()
    for step, is_best, name in ((6, True, "by class/f1"), (12, True, "f1"), (18, False, "f1")):
        log.pictures(step, is_best, lambda name=name: {name: picture})  # type: ignore[misc]
        log.finish_pictures()
        (file,) = (tmp_path / "pictures").glob("*f1-*")
        assert (tmp_path / "pictures/notes-of-me.png").exists()
        assert file.name == ("by class-f1-6.png" if step == 6 else "f1-12.png")
    log.close()


def test_a_log_that_was_not_begun_writes_nothing(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path, [].append)
    log.write(lambda file: file.scalars({"train/loss": 1}, 8))
    log.pictures(8, True, lambda: pytest.fail("drawn"))
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_once_and_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The limit of a file's size acts as a full disk."""
    reports: list[str] = []
    log = TensorBoardLog(tmp_path, reports.append)
    log.begin(1)
    (path,) = tmp_path.iterdir()
    earlier, limits = signal.getsignal(signal.SIGXFSZ), resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))
    try:
        for step in range(9):
            log.write(lambda file, step=step: file.scalars({"train/loss": 1}, step))  # type: ignore[misc]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, earlier)
    log.close()
    (report,) = reports
    reason = r"\((File too large|No space left on device)\)"
    assert re.match(f"TensorBoard's files cannot be written {reason}: ", report)
    assert capfd.readouterr().err == ""
    board = board_of(tmp_path)
    assert [event.step for event in board.Scalars("train/loss")] == [0, 1]


def test_an_event_is_in_the_file_at_once(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path, [].append)
    log.begin(1)
    log.write(lambda file: file.scalars({"train/loss": 1}, 3))
    board = board_of(tmp_path)
    assert [event.step for event in board.Scalars("train/loss")] == [3]
    log.close()


def test_the_hparams_tab_has_a_row_for_each_run(tmp_path: Path) -> None:
    for number, width in enumerate((8, 16)):
        fields = {"width": width, "layers": [1, 2]}
        config = Config(task="tiny", seed=number, deterministic=False, fields=fields)
        log = TensorBoardLog(tmp_path / f"trial-{number}", [].append)
        log.begin(1)
        log.hyperparameters(config, 4, {"accuracy": 0.5 + number}, ["width"])
        log.close()
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    provider = MultiplexerDataProvider(runs, str(tmp_path))
    tab = Context(TBContext(logdir=str(tmp_path), data_provider=provider))
    written = tab.hparams_metadata(RequestContext(), "")
    experiment = tab.experiment_from_metadata(RequestContext(), "", False, written, [])
    # TensorBoard shows what differs first.
    columns = [info.name for info in experiment.hparam_infos]
    assert columns == ["task.width", "deterministic", "optimizer", "seed", "task", "task.layers"]
    query = ListSessionGroupsRequest(allowed_statuses=[STATUS_SUCCESS], slice_size=9)
    found = list_session_groups.Handler(RequestContext(), tab, "", query).run().session_groups
    assert [group.name for group in found] == ["trial-0", "trial-1"]
    second = found[1]
    assert second.hparams["task.width"].number_value == 16
    assert second.hparams["task.layers"].string_value == "[1, 2]"
    assert not second.hparams["deterministic"].bool_value
    (metric,) = second.metric_values
    assert (metric.name.tag, metric.value) == ("validation/best_accuracy", 1.5)
    assert metric.training_step == 4
