"""The run folder of a script: its lock, config.json, manifest.json and metrics.jsonl."""

import contextlib
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoint.script.target import Target
from trainbox.disclosure.secret_rule import arguments_without_secrets
from trainbox.errors import Failure, WrongUse
from trainbox.files.entries import EntryReader, is_of_script
from trainbox.folders.record_folder import CONFIG, LOGS, MANIFEST, METRICS, RecordFolder
from trainbox.processes.streams import message

KIND = "script"
_TAIL_BYTES = 2**16


class ScriptFolder(RecordFolder):
    """The folder of one run of a script. Only the first node `writes` the records."""

    def __init__(self, path: Path, target: Target, writes: bool, is_trial: bool = False) -> None:
        """Make the folder, take its lease, and write config.json with the arguments of this start.

        The folder of a trial is in the folder that --name of its sweep names.

        Raises:
            WrongUse: the folder is one of another script or task, or another process uses it.
            StorageFailure: the folder or a file in it cannot be written.
        """
        super().__init__(path, writes, (LOGS,))
        self._other = f"choose another {'--name of the sweep' if is_trial else '--run name'}"
        self._has_lost = False  # whether an entry could not be appended
        self._is_new = False
        if not writes:
            return
        try:
            self._check_config(target)
        except Failure:
            self.close()
            raise

    def close(self) -> None:
        """Release the lease. A new folder is removed if nothing was started, as in a mistake."""
        if self._is_new and not (self.path / MANIFEST).exists():
            with contextlib.suppress(OSError):
                (self.path / CONFIG).unlink()
        super().close()

    def report(self, entry: Mapping[str, Any]) -> None:
        """Append one entry of the script or of another kind to metrics.jsonl.

        A script keeps training on a full disk. So a failure is only printed, the first one.
        """
        try:
            common = {"time_unix_s": round(time.time(), 3), "kind": "train"}
            self.append(METRICS, {**common, **entry})
        except Failure as error:
            if not self._has_lost:
                self._has_lost = True
                message(f"entries are lost: {error}")

    def newest(self, name: str) -> Any:
        """Return the newest value `name` that the script has reported, or None."""
        entries = EntryReader(self.path / METRICS, last_bytes=_TAIL_BYTES).read()
        found = [entry[name] for entry in entries if name in entry and is_of_script(entry)]
        return found[-1] if found else None

    def _check_config(self, target: Target) -> None:
        """Write config.json; compare config.json of an old run with `target` before."""
        wanted = {"kind": KIND, "script": target.name, "is_module": target.is_module}
        arguments = list(target.arguments)
        if not (self.path / CONFIG).exists():
            others = [name for name in (MANIFEST, METRICS) if (self.path / name).exists()]
            # trainbox.metrics() writes this file if the script is started without us.
            if others and (self.path.name, others) != (target.run_name(), [METRICS]):
                raise WrongUse(
                    f"{self.path} is not a run, and its {' and '.join(others)} would be changed: "
                    f"{self._other}, or move the files away"
                )
            self.write_json(CONFIG, {**wanted, "arguments": arguments})
            self._is_new = True
            return
        config = self.read_json(CONFIG)
        if not config:
            raise WrongUse(
                f"{self.path / CONFIG} is damaged: {self._other}, or remove the file "
                f"and {MANIFEST} to record this run again"
            )
        if config | wanted != config:
            is_script = config.get("kind") == KIND
            raise WrongUse(
                f"{self.path} is a run of {config.get('script') if is_script else 'a task'}, not "
                f"of {target.name if is_script else 'a script'}: {self._other}"
            )
        if (before := config.get("arguments", arguments)) != arguments:
            shown = shlex.join(arguments_without_secrets(map(str, before or ())))
            message(f"the run was started with other arguments before: {shown or 'none'}")
            self.write_json(CONFIG, {**config, "arguments": arguments})
