"""Write a run to TensorBoard, which is a view of metrics.jsonl."""

import contextlib
import functools
import io
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainbox.disclosure.recorded_values import shown_value
from trainbox.errors import text_of
from trainbox.files.regular_files import replacing
from trainbox.folders.record_folder import PICTURES
from trainbox.options.config import Config
from trainer.system.background import in_background

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from trainer.records.event_file import EventFile


_PICTURES_EVERY_S = 10.0
_MOST_SHARE = 0.05  # of the time, for pictures that take longer


class TensorBoardLog:
    """TensorBoard's file of one start of a run. Without `begin`, nothing is written.

    If the file cannot be written, this is logged with `report`. Later calls then do nothing.
    """

    def __init__(self, run: Path, report: Callable[[str], None]) -> None:
        self._run, self._report = run, report
        self._file: EventFile | None = None
        self._drawing: Future[None] | None = None
        self._next: tuple[int, bool, Callable[[], Mapping[str, Tensor]]] | None = None
        self._drawn_step, self._next_s = 0, 0.0

    def begin(self, from_step: int) -> None:
        """Open the file. TensorBoard drops the values of earlier starts from `from_step`."""
        # The import takes a third of a second, and only the first rank needs it.
        from trainer.records.event_file import EventFile

        with self._reported():
            self._file = EventFile(self._run, from_step)

    def write(self, write: "Callable[[EventFile], None]") -> None:
        """Call `write` with the file."""
        with self._reported():
            if self._file is not None:
                write(self._file)

    def pictures(
        self, step: int, is_best: bool, draw: "Callable[[], Mapping[str, Tensor]]"
    ) -> None:
        """Start a thread that calls `draw`, and that compresses and writes the pictures.

        `draw` returns pictures of shape (3, H, W) and type uint8, on the CPU. The pictures of the
        best step are also files in the folder `pictures` of the run. If the last drawing
        was just before, these pictures are drawn by `finish_pictures`, or never if a next call
        replaces them. Before that call, `wait_for_pictures` must be called.
        """
        self._next = step, is_best, draw
        if time.monotonic() >= self._next_s:
            self._start_drawing()

    def _start_drawing(self) -> None:
        """Draw the next pictures in a thread."""
        following, self._next = self._next, None
        if self._file is not None and following is not None:
            self._drawn_step = following[0]
            work = functools.partial(self._draw, self._file, *following)
            self._drawing = in_background(work, "pictures")

    def _draw(
        self,
        file: "EventFile",
        step: int,
        is_best: bool,
        draw: "Callable[[], Mapping[str, Tensor]]",
    ) -> None:
        from trainbox.pictures import write_png

        begin_s, files = time.monotonic(), list[Path]()
        pictures = draw()
        try:
            for name, picture in pictures.items():
                png = io.BytesIO()
                write_png(png, picture)
                file.picture(f"validation/{name}", png.getvalue(), step)
                if is_best:
                    files.append(self._run / PICTURES / f"{name.replace('/', '-')}-{step}.png")
                    files[-1].parent.mkdir(exist_ok=True)
                    with replacing(files[-1]) as copy:
                        copy.write(png.getvalue())
            for earlier in (self._run / PICTURES).glob("*-*.png") if files else ():
                # Files of the user have other names.
                if earlier not in files and earlier.stem.rpartition("-")[2].isdigit():
                    earlier.unlink()
        except Exception as error:  # noqa: BLE001 - no picture ends a training
            self._report(
                f"the pictures of step {step} cannot be written ({text_of(error)}): training "
                "continues without them"
            )
        now_s = time.monotonic()
        self._next_s = begin_s + max(_PICTURES_EVERY_S, (now_s - begin_s) / _MOST_SHARE)

    def wait_for_pictures(self) -> None:
        """Wait until the pictures that are being drawn are written.

        Raises:
            BaseException: What the function that draws them has raised.
        """
        drawing, self._drawing = self._drawing, None
        if drawing is not None:
            drawing.result()

    def finish_pictures(self) -> None:
        """Draw the next pictures now, and wait until all are written, as `wait_for_pictures`."""
        self.wait_for_pictures()
        self._start_drawing()
        self.wait_for_pictures()

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
        # TensorBoard hides trials without a swept setting, even if its value is the default.
        always = {"task", "optimizer", "seed", *swept}
        named = always | (config.identity().keys() - {"fields", "best_by"})
        settings = {name: value for name, value in vars(config).items() if name in named}
        settings |= {
            f"task.{name}": shown_value(name, value) for name, value in config.fields.items()
        }
        first = {*swept, *(f"task.{name}" for name in swept)}
        best = {f"validation/best_{name}": value for name, value in metrics.items()}
        self.write(lambda file: file.hyperparameters(settings, first, best))
        self.write(lambda file: file.scalars(best, best_step))

    def close(self) -> None:
        """Close the file.

        An error of the last drawing is reported. A training that was stopped, or that has failed,
        ends with its own exit code, and begins no other drawing.
        """
        try:
            self.wait_for_pictures()
        except BaseException as error:  # noqa: BLE001 - see above
            self._report(
                f"the pictures of step {self._drawn_step} are missing, because figures() raised "
                f"{type(error).__name__}: {text_of(error)}"
            )
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Log an error of the body, and write nothing more after it."""
        try:
            yield
        except OSError as error:
            self._close_file()
            self._report(
                f"TensorBoard's files cannot be written ({error.strerror}): training continues "
                "without them, and metrics.jsonl has all values"
            )
