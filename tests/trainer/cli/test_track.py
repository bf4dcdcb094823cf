"""The command `track`."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from trainbox.contract.errors import WrongUse
from trainer.cli.commands import cli
from trainer.system.signals import STOP_SIGNALS
from trainer.track.send import _tracker, _until_a_signal


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_a_missing_package_is_named_with_its_installation(
    monkeypatch: pytest.MonkeyPatch, package: str, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    for name in ("MLFLOW_DISABLE_TELEMETRY", "WANDB_SILENT", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "true")
    with pytest.raises(WrongUse) as found:
        cli.main(["track", str(tmp_path), "--to", package], standalone_mode=False)
    text = str(found.value)
    assert text.startswith(f"--to {package}: ")
    assert f": install {package}: write its name to a file my.txt and run `make extra-venv" in text


def test_a_missing_package_of_a_database_is_named_by_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = ModuleNotFoundError("No module named 'MySQLdb'", name="MySQLdb")
    monkeypatch.setattr("trainer.track.to_mlflow.Target", Mock(side_effect=error))
    with pytest.raises(WrongUse, match="install the package that has the module MySQLdb: write"):
        _tracker("mlflow", None)


@pytest.fixture
def _old_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_old_handlers")
def test_a_signal_ends_the_wait_and_a_second_one_interrupts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.track.send._LOOK_EVERY_S", 0.0)
    wait = _until_a_signal()
    assert not wait()
    monkeypatch.setattr("trainer.track.send._LOOK_EVERY_S", 600.0)
    os.kill(os.getpid(), signal.SIGINT)
    assert wait()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
