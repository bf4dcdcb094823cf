"""Send runs to Weights & Biases, through the user's `wandb` package and its WANDB_ variables.

The marker is a row of the history, because wandb stores rows in their order. Offline, a folder of
wandb has all rows of the run, and the marker is also a file in this folder.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainbox.contract.errors import NetworkFailure, StorageFailure, WrongUse
from trainbox.contract.files import read_text, replacing
from trainbox.contract.secret_rule import without_secrets
from trainbox.contract.storage import writing
from trainer.track.runs import EntryRow, Run
from trainer.track.send import TrackedRun

_SENT = "trainbox_sent"
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


class Target:
    """A project of Weights & Biases."""

    def __init__(self, project: str | None) -> None:
        """Use the project `project` of the user's default entity.

        Raises:
            WrongUse: The package is disabled.
            ImportError: The package is missing.
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

    def open(self, run: Run, now: str) -> TrackedRun:
        """Return the run of the project that has the ID of `run`."""
        if self._is_offline:
            # Rows are not added to a folder of wandb. A run that has changed is sent again.
            sent = now if now in map(_marker, _parts(run)) else ""
        else:
            sent = self._marker_of_server(run)
        return _WandbRun(self._wandb, self._project, run, sent, self._is_offline)

    def _marker_of_server(self, run: Run) -> str:
        """Return the newest marker of the run on the server, or an empty text."""
        sent = ""
        with _errors():
            try:
                stored = self._wandb.Api(timeout=30).run(f"{self._project}/{run.id}")
                for row in stored.scan_history(keys=[_SENT], use_cache=False):
                    sent = row[_SENT]
            except (ValueError, self._wandb.errors.CommError) as error:
                if "not find" not in str(error) and "not found" not in str(error):
                    raise
        return sent


class _WandbRun:
    def __init__(self, wandb: Any, project: str, run: Run, sent: str, is_offline: bool) -> None:
        self._wandb, self._project, self._run, self._is_offline = wandb, project, run, is_offline
        self._open: Any = None
        self.sent = sent

    def send(self, rows: Sequence[EntryRow], sent: str) -> None:
        if self._open is None:
            with _errors():
                self._open = self._begin()
        for row in rows:
            self._open.log({**row.values, "step": row.step, "_timestamp": row.time_unix_s})
        self._open.log({_SENT: sent, "_timestamp": rows[-1].time_unix_s})
        self.sent = sent

    def _begin(self) -> Any:
        run = self._run
        self._folder = (
            run.folder.resolve()
            if self._is_offline
            else Path(tempfile.mkdtemp(prefix="trainbox-wandb-")).resolve()
        )
        begun = self._wandb.init(
            project=self._project,
            id=run.id,
            name=run.name,
            group=run.tags.get("sweep"),
            config={**run.params, "manifest": run.tags},
            dir=str(self._folder),
            reinit="create_new",
            resume=None if self._is_offline else "allow",
            settings=self._wandb.Settings(**_SETTINGS),
        )
        self._part = Path(begun.dir).resolve().parent
        if self._part.parent != self._folder / "wandb":  # wandb has chosen a temporary folder
            raise StorageFailure(f"{self._folder}/wandb cannot be written: check its rights")
        # Each value is shown over its own step. wandb's step counts the rows, because it must
        # increase, and several entries can have the same step.
        begun.define_metric("step", hidden=True)
        begun.define_metric(_SENT, hidden=True)
        begun.define_metric("*", step_metric="step")
        return begun

    def close(self) -> None:
        with _errors():
            self._open.finish()
        if not self._is_offline:
            shutil.rmtree(self._folder, ignore_errors=True)
        elif self._part.is_dir():  # the run may have been removed meanwhile
            # Mark the folder as complete, and remove those of earlier and killed processes. If the
            # disk is full, wandb drops rows and reports nothing, but the marker cannot be written.
            with writing(self._part), replacing(self._part / _SENT) as file:
                file.write(self.sent.encode())
            for part in _parts(self._run):
                if part.name != self._part.name:
                    shutil.rmtree(part, ignore_errors=True)


def _parts(run: Run) -> Iterator[Path]:
    """Return the folders that wandb has written of a run in offline mode."""
    return run.folder.glob(f"wandb/offline-run-*-{run.id}")


def _marker(part: Path) -> str:
    try:
        return read_text(part / _SENT)
    except (OSError, ValueError):
        return ""


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise wandb's errors as failures of one line."""
    import wandb.errors as known

    try:
        yield
    except (known.Error, OSError) as error:
        line = without_secrets(" ".join(str(error).split()))[:300]
        # wandb has one error for all failures of a login, also if no server has answered.
        was_answered = getattr(error.__cause__, "response", error) is not None
        is_login = isinstance(error, known.AuthenticationError) and was_answered
        if isinstance(error, known.UsageError) or is_login:
            raise WrongUse(f"wandb refuses ({line}): log in with `wandb login`") from error
        raise NetworkFailure(
            f"wandb cannot be reached ({line}): check the network and WANDB_BASE_URL, or "
            "set WANDB_MODE=offline, and start the same command again"
        ) from error
