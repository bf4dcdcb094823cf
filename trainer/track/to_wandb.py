"""Send runs to Weights & Biases, through the user's `wandb` package and its WANDB_ variables.

Online, the server is asked which values it has. Offline, a file beside the parts that wandb has
written lists them, and a part that is not in this file is from a process that was killed.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainbox.contract.errors import NetworkFailure, StorageFailure, WrongUse
from trainbox.contract.files import read_object, replacing
from trainbox.contract.secret_rule import without_secrets
from trainbox.contract.storage import storage_failure
from trainer.track.runs import EntryRow, Run
from trainer.track.upload import TrackedRun

_STATE, _SENT = "trainbox.json", "trainbox_sent"
# Used if the user does not set them: wandb prints nothing, and does not report its own errors.
_DEFAULTS = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
# Nothing of the machine that sends a run belongs to the run.
_SETTINGS = {
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "host": "trainbox",
}


class WandbTracker:
    """A project of Weights & Biases."""

    def __init__(self, project: str | None) -> None:
        """Use the project `project` of the user's default entity.

        Raises:
            WrongUse: The package is missing or disabled.
        """
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        import wandb

        self._wandb = wandb
        self._project = project or os.environ.get("WANDB_PROJECT") or "trainbox"
        mode = wandb.setup().settings.mode
        if mode == "disabled":
            raise WrongUse("wandb is disabled: set WANDB_MODE to online or offline")
        self._is_offline = mode in ("offline", "dryrun")
        self.place = f"wandb, project {self._project}{' (offline)' if self._is_offline else ''}"

    def open(self, run: Run) -> TrackedRun:
        """Return the run of the project that has the ID of `run`."""
        kind = _OfflineRun if self._is_offline else _OnlineRun
        return kind(self._wandb, self._project, run)


class _WandbRun:
    """What both modes have in common."""

    sent: str | None = None

    def __init__(self, wandb: Any, project: str, run: Run) -> None:
        self._wandb, self._project, self._run = wandb, project, run
        self._open: Any = None

    def _begin(self, folder: Path, **mode: Any) -> None:
        run = self._run
        with _errors():
            self._open = self._wandb.init(
                project=self._project,
                id=run.id,
                name=run.name,
                group=run.sweep or None,
                config={**run.params, "manifest": run.tags},
                dir=str(folder),
                reinit="create_new",
                settings=self._wandb.Settings(**_SETTINGS),
                **mode,
            )
            # Each value is shown over its own step. wandb's step counts the rows, because it must
            # increase, and several entries can have the same step.
            self._open.define_metric("step", hidden=True)
            self._open.define_metric("*", step_metric="step")

    def _log(self, rows: Sequence[EntryRow], first: int | None) -> None:
        for number, row in enumerate(rows):
            values = {**row.values, "step": row.step, "_timestamp": row.time_unix_s}
            self._open.log(values, step=None if first is None else first + number)


class _OnlineRun(_WandbRun):
    def __init__(self, wandb: Any, project: str, run: Run) -> None:
        super().__init__(wandb, project, run)
        self._folder: Path | None = None
        self._known = self._find()
        if self._known is not None:
            self.sent = self._known.config.get(_SENT)

    def stored(self) -> set[tuple[str, int]]:
        if self._known is None:
            return set()
        with _errors():
            return {
                (name, row["step"])
                for row in self._known.scan_history(use_cache=False)
                for name in row
                if row.get("step") is not None and row[name] is not None
            }

    def send(self, rows: Sequence[EntryRow]) -> None:
        if self._open is None:
            self._folder = Path(tempfile.mkdtemp(prefix="trainbox-wandb-"))
            self._begin(self._folder, resume="allow")
        self._log(rows, None)

    def close(self, sent: str) -> None:
        if self._open is None:
            return
        with _errors():
            self._open.finish()
            assert self._folder is not None
            shutil.rmtree(self._folder, ignore_errors=True)
            if (known := self._find()) is not None:
                known.config[_SENT] = sent
                known.update()

    def _find(self) -> Any:
        """Return the run on the server, or None if it does not exist."""
        with _errors():
            try:
                return self._wandb.Api(timeout=30).run(f"{self._project}/{self._run.id}")
            except (ValueError, self._wandb.errors.CommError) as error:
                if "not find" in str(error) or "not found" in str(error):
                    return None
                raise


class _OfflineRun(_WandbRun):
    def __init__(self, wandb: Any, project: str, run: Run) -> None:
        super().__init__(wandb, project, run)
        self._folder = run.folder / "wandb"
        self._parts: list[str] = []
        self._stored: set[tuple[str, int]] = set()
        self._rows = 0
        try:
            state = read_object(self._folder / _STATE)
            if state["run_id"] == run.id:
                self.sent, self._rows, self._parts = state["sent"], state["rows"], state["parts"]
                self._stored = {(name, n) for name, steps in state["steps"].items() for n in steps}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageFailure(
                f"{self._folder / _STATE} is damaged: restore it, or remove {self._folder} to "
                "send the run again"
            ) from error

    def stored(self) -> set[tuple[str, int]]:
        return set(self._stored)

    def send(self, rows: Sequence[EntryRow]) -> None:
        if self._open is None:
            self._remove_unfinished()
            self._begin(self._run.folder)
        self._log(rows, self._rows)
        self._rows += len(rows)
        self._stored.update((name, row.step) for row in rows for name in row.values)

    def close(self, sent: str) -> None:
        if self._open is None:
            return
        part = Path(self._open.dir).parent
        with _errors():
            self._open.config[_SENT] = sent
            self._open.finish()
        if not self._folder.is_dir():
            return  # the run was removed meanwhile
        if not _has_record(part / f"run-{self._run.id}.wandb", sent):
            raise StorageFailure(
                f"wandb has not written all entries to {part}: free some space, and start the same "
                "command again"
            )
        steps: dict[str, list[int]] = {}
        for name, step in sorted(self._stored):
            steps.setdefault(name, []).append(step)
        parts = [*self._parts, part.name]
        state = {
            "run_id": self._run.id,
            "sent": sent,
            "rows": self._rows,
            "parts": parts,
            "steps": steps,
        }
        try:
            with replacing(self._folder / _STATE) as file:
                file.write(json.dumps(state).encode())
        except OSError as error:
            raise storage_failure(self._folder / _STATE, error) from error

    def _remove_unfinished(self) -> None:
        """Remove the parts of this run that a killed process has not finished."""
        try:
            self._folder.mkdir(exist_ok=True)
            # Without this check, wandb would write to a temporary folder.
            with replacing(self._folder / f".{_STATE}"):
                pass
        except OSError as error:
            raise storage_failure(self._folder, error) from error
        for path in self._folder.glob(f"offline-run-*-{self._run.id}"):
            if path.name not in self._parts:
                shutil.rmtree(path, ignore_errors=True)


def _has_record(path: Path, text: str) -> bool:
    """Return whether a file of wandb has `text`, which was written after all rows.

    If the disk is full, wandb drops the rest of the file and reports nothing. Each block of 32 KiB
    begins with 7 bytes that are not part of a record.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return False
    blocks = (content[begin + 7 : begin + 2**15] for begin in range(0, len(content), 2**15))
    return text.encode() in b"".join(blocks)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise wandb's errors as failures of one line."""
    import wandb.errors as known

    try:
        yield
    except (known.Error, OSError) as error:
        if isinstance(error, known.UsageError) or _was_answered(error):
            raise WrongUse(f"wandb refuses ({_line(error)}): log in with `wandb login`") from error
        raise NetworkFailure(
            f"wandb cannot be reached ({_line(error)}): check the network and WANDB_BASE_URL, or "
            "set WANDB_MODE=offline, and start the same command again"
        ) from error


def _was_answered(error: Exception) -> bool:
    """Return whether the server has refused the login. wandb has one error for all its failures."""
    import wandb.errors as known

    is_login = isinstance(error, known.AuthenticationError)
    return is_login and getattr(error.__cause__, "response", error) is not None


def _line(error: Exception) -> str:
    return without_secrets(" ".join(str(error).split()))[:300]
