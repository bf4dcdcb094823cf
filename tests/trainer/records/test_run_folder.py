"""The folder of a run on a full disk."""

from pathlib import Path

import pytest

from trainer.errors import StorageFailure
from trainer.records.run_folder import RunFolder


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_an_entry_that_does_not_fit_is_reported_with_its_file_and_frees_the_lock(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "r", writes=True)
    folder._metrics = Path("/dev/full").open("w")  # noqa: SIM115 - the folder closes it
    folder.append_entry({"kind": "train", "step": 1})  # into the buffer
    with pytest.raises(StorageFailure, match=r"cannot write \S+/r/metrics.jsonl: No space left"):
        folder.close()
    RunFolder(tmp_path / "r", writes=True).close()
