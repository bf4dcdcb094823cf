"""Write a run to TensorBoard, which is a view of metrics.jsonl.

Only this file imports tensorboard.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbox.contract.config import FREE_AT_RESUME, Config
from trainer.run.compare import shown_value
from trainer.run.numbers import numbers

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLog:
    """TensorBoard's files of one run, opened at the first write.

    If they cannot be written, this is logged once with `report`. Later calls then do nothing.
    """

    def __init__(self, run: Path, writes: bool, report: Callable[[str], None]) -> None:
        self.from_step = 0  # TensorBoard drops the entries of earlier starts from this step
        self._run, self._disabled, self._report = run, not writes, report
        self._board: SummaryWriter | None = None
        self._lock = threading.Lock()  # of the board
        self._drawing: threading.Thread | None = None
        self._drawn_step = 0
        self._problem = ""  # found by the thread
        self._error: BaseException | None = None  # raised by the function that draws

    def scalars(self, kind: str, values: Mapping[str, Any], step: int) -> None:
        """Write the numbers among `values` as `kind/name`.

        The numbers of a list `name_each` are written as `kind/name/0` and so on.
        """
        scalars = numbers(kind, values)
        self._write(lambda board: _write_scalars(board, scalars, step))

    def text(self, name: str, text: str, step: int, time_unix_s: float | None) -> None:
        """Write `text` at `step`. TensorBoard shows one text per name and step."""
        self._write(lambda board: board.add_text(name, text, step, time_unix_s))

    def pictures(self, step: int, draw: "Callable[[], Mapping[str, Tensor]]") -> None:
        """Start a thread that calls `draw`, and that compresses and writes the pictures.

        `draw` returns pictures of shape (3, H, W) and type uint8, on the CPU. Before the next call,
        `finish_pictures` must be called.
        """
        if self._disabled:
            return
        self._drawn_step = step
        self._drawing = threading.Thread(target=self._draw, args=(step, draw), name="pictures")
        self._drawing.start()

    def _draw(self, step: int, draw: "Callable[[], Mapping[str, Tensor]]") -> None:
        try:
            pictures = draw()
        except BaseException as error:  # noqa: BLE001 - raised again by finish_pictures
            self._error = error
            return
        try:
            from torch.utils.tensorboard.summary import image

            found = [
                image(f"validation/{name}", picture, dataformats="CHW")
                for name, picture in pictures.items()
            ]

            def write(board: "SummaryWriter") -> None:
                for summary in found:
                    board.file_writer.add_summary(summary, step)  # type: ignore[attr-defined]

            self._write(write)
        except Exception as error:  # noqa: BLE001 - no picture ends a training
            self._problem = (
                f"the pictures of step {step} cannot be written ({error}): training continues "
                "without them"
            )

    def finish_pictures(self) -> None:
        """Wait until the last pictures are written, and report if they could not be.

        Raises:
            BaseException: What the function that draws them has raised.
        """
        if self._drawing is not None:
            self._drawing.join()
            self._drawing = None
        if self._problem:
            problem, self._problem = self._problem, ""
            self._report(problem)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def hyperparameters(
        self,
        config: Config,
        best_step: int,
        metrics: Mapping[str, float],
        swept: Collection[str],
    ) -> None:
        """Write the run's row of the HParams tab: its settings and its best metrics.

        The first columns are the settings in `swept`, which the sweep varies.
        """
        # The table has few columns, so settings with their default value are left out.
        usual, hidden = vars(Config()), FREE_AT_RESUME | {"fields", "best_by"}
        shown = {"task", "optimizer", "seed"} | {
            name
            for name, value in vars(config).items()
            if value != usual[name] and name not in hidden
        }
        # TensorBoard hides trials without a swept setting, even if its value is the default.
        shown |= set(swept) & vars(config).keys()
        settings = {name: _plain(value) for name, value in vars(config).items() if name in shown}
        settings |= {
            f"task.{name}": _plain(shown_value(name, value))
            for name, value in config.fields.items()
        }
        best = {f"validation/best_{name}": value for name, value in metrics.items()}

        def write(board: "SummaryWriter") -> None:
            from torch.utils.tensorboard.summary import hparams

            # add_hparams would create a separate run and write the metrics at step 0.
            experiment, *session = hparams(settings, best)
            _put_first(experiment, {*swept, *(f"task.{name}" for name in swept)})
            for summary in (experiment, *session):
                board.file_writer.add_summary(summary)  # type: ignore[attr-defined]
            _write_scalars(board, best, best_step)

        self._write(write)

    def close(self) -> None:
        """Write what is buffered and close the files.

        An error of the last drawing is reported. A training that was stopped, or that has failed,
        ends with its own exit code.
        """
        try:
            self.finish_pictures()
        except BaseException as error:  # noqa: BLE001 - see above
            self._report(
                f"the pictures of step {self._drawn_step} are missing, because figures() raised "
                f"{type(error).__name__}: {error}"
            )
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()
            self._board = None

    def _write(self, write: "Callable[[SummaryWriter], None]") -> None:
        if self._disabled:
            return
        try:
            with self._lock:
                if self._board is None:
                    from torch.utils.tensorboard import SummaryWriter

                    self._board = SummaryWriter(
                        self._run / "tensorboard", purge_step=self.from_step
                    )
                write(self._board)
        except OSError as error:
            self._disabled = True
            self._report(
                f"TensorBoard's files cannot be written ({error}): training continues without "
                "them, and metrics.jsonl has all values"
            )


class EntryLog:
    """Writes entries of metrics.jsonl to the TensorBoard log in `folder`, without torch."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        self._writer = EventFileWriter(str(folder))

    def write(self, entry: Mapping[str, Any]) -> None:
        """Write the numbers of an entry as scalars, and an event of the hardware as a text."""
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        kind, step = str(entry.get("kind", "train")), entry.get("step")
        time_unix_s = entry.get("time_unix_s")
        if not isinstance(step, int):
            return
        if kind == "health":
            values = [_text_value("health", " ".join(str(entry.get(n)) for n in _EVENT_TEXT))]
        else:
            names = entry.keys() - {"kind", "step", "time_unix_s"}
            found = numbers(kind, {name: entry[name] for name in sorted(names)})
            values = [Summary.Value(tag=tag, simple_value=n) for tag, n in found.items()]
        if values:
            when = time_unix_s if isinstance(time_unix_s, int | float) else time.time()
            self._writer.add_event(Event(summary=Summary(value=values), wall_time=when, step=step))

    def flush(self) -> None:
        """Write what is buffered, so that TensorBoard shows it."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._writer.close()


_EVENT_TEXT = ("result", "check", "gpu", "text")


def _text_value(tag: str, text: str) -> Any:
    """Return a value that TensorBoard's text tab shows."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[import-untyped]

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    return Summary.Value(
        tag=tag,
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
        tensor=TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape),
    )


def write_picture(folder: Path, name: str, file: Path) -> None:
    """Add the PNG picture in `file`, tagged `name`, to the TensorBoard log in `folder`.

    torch.utils.tensorboard would import torch, which the end of a sweep does not need.
    """
    from PIL import Image
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import (
        EventFileWriter,
    )

    with Image.open(file) as picture:
        image = Summary.Image(
            height=picture.height,
            width=picture.width,
            colorspace=len(picture.getbands()),
            encoded_image_string=file.read_bytes(),
        )
    summary = Summary(value=[Summary.Value(tag=name, image=image)])
    with contextlib.closing(EventFileWriter(str(folder / "tensorboard"))) as log:
        log.add_event(Event(summary=summary, wall_time=time.time()))


def _put_first(experiment: Any, names: Collection[str]) -> None:
    """Mark the hyperparameters `names` as varying, so that TensorBoard shows them first."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[import-untyped]

    plugin = experiment.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(plugin.content)
    for info in data.experiment.hparam_infos:
        info.differs = info.name in names
    plugin.content = data.SerializeToString()


def _write_scalars(board: "SummaryWriter", scalars: Mapping[str, float], step: int) -> None:
    """Write all scalars of a step in one event. One event per scalar takes four times as long."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    board.file_writer.add_summary(Summary(value=values), step)  # type: ignore[attr-defined]


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
