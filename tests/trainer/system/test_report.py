"""The failure of a rank is read by the launcher, or printed."""

from pathlib import Path

import pytest

from trainbox.errors import Failure
from trainbox.processes.environment import Internal
from trainer.system.report import report_failure


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_failure_is_printed_if_the_folder_of_the_messages_was_removed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_removed: bool,
) -> None:
    """A cleaner of temporary files removes folders of living processes, too."""
    folder = tmp_path / "removed" if is_removed else tmp_path
    monkeypatch.setenv(Internal.MESSAGES, str(folder))
    monkeypatch.setenv("RANK", "1")
    report_failure(Failure("no space"))
    printed = capsys.readouterr().err
    if is_removed:
        assert printed == "trainbox: no space\n"
    else:
        assert (printed, (folder / "1").read_text()) == ("", "no space")
