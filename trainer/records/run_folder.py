"""The run directory and what people see: the only importer of tensorboard.

Only the first process writes.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy
import torch
from torch import Tensor
from tqdm import tqdm

from trainer.data.batches import Schedule
from trainer.errors import Busy, StorageFailure, WrongUse
from trainer.parallel.world import Process
from trainer.records.checkpoint import FIRST_CHECKPOINT, replacing
from trainer.records.compare import read_entries, shown_value
from trainer.records.gpu_events import EVENT, hardware_events, note_run
from trainer.settings.config import FREE_AT_RESUME, Config
from trainer.system.files import append_regular, read_object, read_text
from trainer.system.storage import storage_failure
from trainer.system.streams import printable

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_PLAIN_LINE_EVERY_S = 10.0
_LOOK_EVERY_S = 5.0


class RunDirectory:
    """One run's folder.

    On every process but the first (`writes` false) each method does nothing.
    """

    def __init__(self, path: Path, rank: int) -> None:
        """Make the folder and its parts, and lock it.

        Raises:
            StorageFailure: it cannot be written.
            Busy: another process trains in it.
        """
        self.path, self.writes = path, rank == 0
        self._bar: tqdm[Any] | None = None
        self._board: SummaryWriter | None = None
        self._board_broken = False
        self._board_from = 0
        self._metrics: TextIO | None = None
        self._plain_at = self._look_at = 0.0
        self._step = self._batch_size = 0
        self._steps_per_epoch = 1
        self._events, self._known_events = hardware_events(), list[dict[str, Any]]()
        heartbeat = os.environ.get("TRAINBOX_HEARTBEAT")
        self._heartbeat = Path(heartbeat) if heartbeat and self.writes else None
        try:
            for folder in ("checkpoints", "logs"):
                (path / folder).mkdir(parents=True, exist_ok=True)
            self._log = append_regular(path / "logs" / f"rank-{rank}.log")
            self._lock = append_regular(path / "lock") if self.writes else None
        except OSError as error:
            raise storage_failure(path, error) from error
        if self._lock is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise Busy(
                    f"another process trains in {path} now: wait for it, or give this one "
                    "a --run NAME of its own"
                ) from None
        # Warnings and tracebacks of this process land in its own file too.
        self._handler = logging.StreamHandler(self._log)
        self._handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
        )
        logging.getLogger().addHandler(self._handler)

    def read_config_text(self) -> str | None:
        """The config.json that the run was started with; None if it is new.

        Raises:
            WrongUse: there is something, and it cannot be read.
        """
        path = self.path / "config.json"
        try:
            return read_text(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WrongUse(
                f"{path} cannot be read ({reason}): restore it or use another --run"
            ) from error

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in the file `name`; None if it is not there or damaged."""
        try:
            return read_object(self.path / name)
        except (OSError, ValueError):
            return None

    def has_had_a_checkpoint(self) -> bool:
        """Whether a checkpoint was ever completed here."""
        return (self.path / FIRST_CHECKPOINT).exists()

    def write_json(self, name: str, text: str) -> None:
        if self.writes:
            try:
                with replacing(self.path / name) as file:
                    file.write(text.encode())
            except OSError as error:
                raise storage_failure(self.path / name, error) from error

    def begin(self, step: int, evaluated_step: int, schedule: Schedule) -> None:
        """Start the progress at `step`; entries of what will be done again, after a crash, are
        dropped.
        """
        if not self.writes:
            return
        # what the hardware has done is not done again
        last = {"validation": evaluated_step, "health": math.inf}
        for name in ("metrics.jsonl", "digests.jsonl"):
            try:
                entries = read_entries(self.path / name)
            except OSError as error:
                raise StorageFailure(
                    f"{self.path / name} cannot be read ({error.strerror}): restore the "
                    "file, or move it away"
                ) from error
            if step and not entries and self._has_lost(name):
                self.say(
                    f"{self.path / name} is missing or damaged: its entries up to step "
                    f"{step} are lost, "
                    "and verify and diff will report that"
                )
            kept = [
                entry for entry in entries if entry["step"] <= last.get(entry.get("kind", ""), step)
            ]
            if step == 0 and name == "digests.jsonl":
                kept = []  # the start is recorded again
            self.write_json(name, "".join(json.dumps(entry) + "\n" for entry in kept))
        self._metrics = append_regular(self.path / "metrics.jsonl")
        note_run(self.path / "metrics.jsonl")
        self._board_from = step + 1
        self._step, self._batch_size, self._steps_per_epoch = (
            step,
            schedule.batch_size,
            schedule.steps_per_epoch,
        )
        self._known_events = [
            entry
            for entry in read_entries(self.path / "metrics.jsonl")
            if entry.get("kind") == "health"
        ]
        # TensorBoard drops all that came after `step`.
        self._show_events([entry for entry in self._known_events if entry["step"] > step])
        if sys.stderr.isatty():
            self._bar = tqdm(
                initial=step * schedule.batch_size,
                total=schedule.total_steps * schedule.batch_size,
                unit=" samples",
                unit_scale=True,
                dynamic_ncols=True,
                bar_format="{desc}{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} "
                "[{elapsed}<{remaining}, {rate_fmt}]",
            )

    def _has_lost(self, name: str) -> bool:
        """Whether the record `name`, in which no entry was found, had any; metrics.jsonl may still
        be empty.
        """
        path = self.path / name
        return name == "digests.jsonl" or not path.exists() or path.stat().st_size > 0

    def say(self, text: str) -> None:
        """A line for people, on the terminal and in the log."""
        if self.writes:
            text = printable(text, keep="\n\t")  # other nodes' texts are among it
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
            self._log.write(text + "\n")

    def advance(self) -> None:
        """Count a step; every few seconds touch the file that the image's health check looks at,
        and look at the hardware's.
        """
        self._step += 1
        if self._bar is not None:
            self._bar.update(self._batch_size)
        if time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + _LOOK_EVERY_S
            if self._heartbeat is not None:
                with contextlib.suppress(OSError):
                    self._heartbeat.touch()
            self._record_events()

    def record(
        self,
        kind: str,
        step: int,
        epoch: int,
        values: Mapping[str, Any],
        line: str,
        speed: str | None = None,
    ) -> None:
        """One entry in metrics.jsonl and TensorBoard, and a line on the terminal.

        With `speed` it is one of many: on the bar, which knows the speed itself, or every few
        seconds in full.
        """
        if not self.writes:
            return
        self._write_entry(
            {
                "kind": kind,
                "step": step,
                "epoch": epoch,
                "time_unix_s": round(time.time(), 3),
                **values,
            }
        )
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._on_board(
            lambda board: _write_scalars(
                board, {f"{kind}/{n}": v for n, v in numbers.items()}, step
            )
        )
        if speed is None:
            self.say(line)
        elif self._bar is not None:
            self._bar.set_description_str(line + "  ", refresh=False)
        elif time.monotonic() - self._plain_at > _PLAIN_LINE_EVERY_S:
            self._plain_at = time.monotonic()
            self.say(line + speed)

    def _write_entry(self, entry: Mapping[str, Any]) -> None:
        assert self._metrics is not None
        # JSON has no infinity; a gradient's norm may be one under fp16.
        finite = {
            n: None if isinstance(v, float) and not math.isfinite(v) else v
            for n, v in entry.items()
        }
        try:
            self._metrics.write(json.dumps(finite) + "\n")
        except OSError as error:
            raise storage_failure(self.path / "metrics.jsonl", error) from error

    def _record_events(self) -> None:
        """The hardware's new events, in metrics.jsonl and TensorBoard; the entrypoint has printed
        them.
        """
        if self._metrics is None:
            return
        known = [{name: entry.get(name) for name in EVENT} for entry in self._known_events]
        events = [event for event in self._events.new() if event not in known]
        epoch = (max(1, self._step) - 1) // self._steps_per_epoch + 1
        for event in events:
            self._write_entry({"kind": "health", "step": self._step, "epoch": epoch, **event})
        self._show_events(events)

    def _show_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """In TensorBoard at the present step; those of a check in one text, since it shows one at a
        step.
        """
        by_check: dict[Any, list[Mapping[str, Any]]] = {}
        for event in events:
            by_check.setdefault(event.get("check"), []).append(event)

        def write(board: "SummaryWriter") -> None:
            for check, found in by_check.items():
                texts = (
                    ", ".join(f"{n} {event[n]}" for n in EVENT[1:] if event.get(n) is not None)
                    for event in found
                )
                board.add_text(
                    f"health/{check}", "\n\n".join(texts), self._step, found[-1].get("time_unix_s")
                )

        if by_check:
            self._on_board(write)

    def record_digests(self, entry: Mapping[str, Any]) -> None:
        """One entry in digests.jsonl."""
        if self.writes:
            path = self.path / "digests.jsonl"
            try:
                with append_regular(path) as file:
                    file.write(json.dumps(entry) + "\n")
            except OSError as error:
                raise storage_failure(path, error) from error

    def pictures(self, step: int, figures: Mapping[str, Tensor]) -> None:
        """Pictures (3, H, W) uint8, in TensorBoard."""
        self._on_board(
            lambda board: [board.add_image(f"validation/{n}", p, step) for n, p in figures.items()]
        )

    def hyperparameters(
        self,
        config: Config,
        best_step: int,
        metrics: Mapping[str, float],
        swept: Collection[str] = (),
    ) -> None:
        """The run's row in TensorBoard's HParams tab: its settings, those that a sweep varies
        first, and its best metrics.
        """
        # Its table shows few columns: those that nobody has touched would hide the ones that a
        # sweep is about.
        usual, hidden = vars(Config()), FREE_AT_RESUME | {"fields", "best_by"}
        shown = {"task", "optimizer", "seed"} | {
            n for n, v in vars(config).items() if v != usual[n] and n not in hidden
        }
        # in each trial, or TensorBoard would leave out those with a usual value
        shown |= set(swept) & vars(config).keys()
        settings = {name: _plain(value) for name, value in vars(config).items() if name in shown}
        settings |= {
            f"task.{name}": _plain(shown_value(name, value))
            for name, value in config.fields.items()
        }
        best = {f"validation/best_{name}": value for name, value in metrics.items()}

        def write(board: "SummaryWriter") -> None:
            from torch.utils.tensorboard.summary import hparams

            # Not add_hparams, which starts a run of its own and gives the metrics step 0.
            experiment, *session = hparams(settings, best)
            _put_first(experiment, {*swept, *(f"task.{name}" for name in swept)})
            for summary in (experiment, *session):
                board.file_writer.add_summary(summary)  # type: ignore[attr-defined]
            _write_scalars(board, best, best_step)

        self._on_board(write)

    def close(self) -> None:
        """Give the run free for others."""
        self.end_progress()
        logging.getLogger().removeHandler(self._handler)
        self._log.close()
        if self._lock is not None:
            self._lock.close()

    def end_progress(self) -> None:
        """Close the bar, TensorBoard's files and metrics.jsonl; `say` still works."""
        with contextlib.suppress(StorageFailure):  # the training's end is what matters now
            self._record_events()
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()
            self._board = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def _on_board(self, write: Any) -> None:
        """TensorBoard is a view: if it cannot be written, training goes on, and says so once."""
        if not self.writes or self._board_broken:
            return
        try:
            if self._board is None:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(self.path / "tensorboard", purge_step=self._board_from)
            write(self._board)
        except OSError as error:
            self._board_broken = True
            self.say(
                f"TensorBoard's files cannot be written ({error}): training goes on "
                "without; metrics.jsonl has it all"
            )


def _put_first(experiment: Any, names: Collection[str]) -> None:
    """Mark hyperparameters as those that differ: TensorBoard shows them first and sorts the others
    by name.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[import-untyped]

    plugin = experiment.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(plugin.content)
    for info in data.experiment.hparam_infos:
        info.differs = info.name in names
    plugin.content = data.SerializeToString()


def _write_scalars(board: "SummaryWriter", scalars: Mapping[str, float], step: int) -> None:
    """All of a step in one event: add_scalar's event for each takes four times as long."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    board.file_writer.add_summary(Summary(value=values), step)  # type: ignore[attr-defined]


def write_picture(folder: Path, name: str, file: Path) -> None:
    """Show the picture in `file` in the TensorBoard of `folder`."""
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    with (
        contextlib.closing(SummaryWriter(folder / "tensorboard")) as board,
        Image.open(file) as picture,
    ):
        board.add_image(name, numpy.asarray(picture.convert("RGB")), dataformats="HWC")


def gpu_figures(process: Process) -> dict[str, Any]:
    """Memory of all GPUs, the most and each, and NVML's utilisation of this process's; nothing on a
    CPU. All must call it.
    """
    if process.device.type != "cuda":
        return {}
    memory_mib = process.peak_memory_mib()
    figures: dict[str, Any] = {"gpu_memory_mib": max(memory_mib), "gpu_memory_mib_each": memory_mib}
    try:
        figures["gpu_utilization_percent"] = float(torch.cuda.utilization(process.device))
    except Exception as error:  # noqa: BLE001 - NVML missing or refusing in any way: a figure less
        logging.getLogger(__name__).info("no utilisation: %s", error)
    return figures


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
