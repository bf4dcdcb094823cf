"""Write a file of TensorBoard, without torch.

Only this file imports tensorboard.
"""

import errno
import io
import itertools
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2 as api
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from trainbox.folders.record_folder import EVENTS

# Other types are shown as text.
_TYPES = {bool: "DATA_TYPE_BOOL", int: "DATA_TYPE_FLOAT64", float: "DATA_TYPE_FLOAT64"}


class EventFile:
    """A new file in the TensorBoard log `folder`, which threads may share.

    Each event is written at once, so TensorBoard shows it and a kill loses none. TensorBoard's own
    writer has a thread, which prints a traceback if the disk is full.
    """

    _numbers = itertools.count()

    def __init__(self, folder: Path, from_step: int | None = None) -> None:
        """Make the file. TensorBoard drops the values of earlier files from `from_step`.

        Raises:
            OSError: The file cannot be written. The other methods may raise this, too.
        """
        folder.mkdir(parents=True, exist_ok=True)
        of_this = f"{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        path = folder / f"{EVENTS}{int(time.time()):010d}.{of_this}"
        self._file, self._lock = path.open("xb", buffering=0), threading.Lock()
        self._add(Event(file_version="brain.Event:2", wall_time=time.time()))
        if from_step is not None:
            start = SessionLog(status=SessionLog.START)
            self._add(Event(session_log=start, wall_time=time.time(), step=from_step))

    def scalars(
        self, scalars: Mapping[str, float], step: int, time_unix_s: float | None = None
    ) -> None:
        """Write all scalars of a step in one event, which is four times as fast as several."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(values, step, time_unix_s)

    def text(self, tag: str, text: str, step: int, time_unix_s: float | None = None) -> None:
        """Write `text` at `step`. TensorBoard shows one text per tag and step."""
        self._write(text_pb(tag, text).value, step, time_unix_s)

    def picture(self, tag: str, png: bytes, step: int = 0) -> None:
        """Write a picture in the format PNG."""
        with Image.open(io.BytesIO(png)) as picture:
            width, height = picture.size
        image = Summary.Image(height=height, width=width, encoded_image_string=png)
        self._write([Summary.Value(tag=tag, image=image)], step)

    def hyperparameters(
        self, settings: Mapping[str, Any], first: Collection[str], metrics: Collection[str]
    ) -> None:
        """Write a row of the HParams tab with the scalars of the tags `metrics`.

        The settings `first` are marked as varying, so that TensorBoard shows them first.
        """
        shown = {
            name: value if type(value) in _TYPES else str(value) for name, value in settings.items()
        }
        experiment = api.Experiment(
            hparam_infos=[
                api.HParamInfo(
                    name=name,
                    type=_TYPES.get(type(value), "DATA_TYPE_STRING"),
                    differs=name in first,
                )
                for name, value in shown.items()
            ],
            metric_infos=[api.MetricInfo(name=api.MetricName(tag=tag)) for tag in metrics],
        )
        parts = {
            metadata.EXPERIMENT_TAG: HParamsPluginData(experiment=experiment),
            metadata.SESSION_END_INFO_TAG: HParamsPluginData(
                session_end_info=SessionEndInfo(status=api.STATUS_SUCCESS)
            ),
        }
        # Without a group, each run has its own row. Its time of start is not known here.
        values = hparams_pb(shown, trial_id="", start_time_secs=0).value
        values.extend(
            Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(part))
            for tag, part in parts.items()
        )
        self._write(values)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(
        self, values: Collection[Any], step: int = 0, time_unix_s: float | None = None
    ) -> None:
        when = time.time() if time_unix_s is None else time_unix_s
        self._add(Event(summary=Summary(value=values), wall_time=when, step=step))

    def _add(self, event: Any) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        data = record.getvalue()
        with self._lock:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
