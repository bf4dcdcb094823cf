"""Which files of a script's run folder count as saved."""

import os
from pathlib import Path

import pytest

from trainbox.folders.record_folder import has_saved, saved_files


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("last.pt", True),
        ("checkpoint-100/model.safetensors", True),
        ("model.json", True),  # of XGBoost
        ("state", True),
        ("train.log", False),
        ("history/Metrics.CSV", False),
        ("lightning_logs/version_3/hparams.yaml", False),
        ("events.out.tfevents.1795375966.host.1.0", False),
        ("loss.png", False),
        ("last.pt.tmp", False),
        ("pid.pid", False),
        ("wandb/run-1/run.wandb", False),
        ("__pycache__/a.pyc", False),
        ("metrics.jsonl", False),
        ("logs/rank-0.log", False),
        ("manifest.json", False),
    ],
)
def test_a_new_file_counts_as_saved_if_a_script_may_resume_from_it(
    tmp_path: Path, name: str, counts: bool
) -> None:
    before = saved_files(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    assert has_saved(tmp_path, before) is counts


def test_a_replaced_file_counts_as_saved_and_a_removed_one_does_not(tmp_path: Path) -> None:
    for name in ("old.pt", "last.pt"):
        (tmp_path / name).touch()
    os.utime(tmp_path / "old.pt", (2e9, 2e9))  # a clock that was wrong
    before = saved_files(tmp_path)
    (tmp_path / "old.pt").unlink()
    assert not has_saved(tmp_path, before)
    (tmp_path / "last.pt").write_bytes(b"1")
    assert has_saved(tmp_path, before)


def test_a_small_file_counts_by_its_content_and_a_large_one_by_its_time(tmp_path: Path) -> None:
    for name, content in (("args.json", b"{}"), ("last.pt", bytes(2**17))):
        (tmp_path / name).write_bytes(content)
        before = saved_files(tmp_path)
        os.utime(tmp_path / name, (1e9, 1e9))
        assert has_saved(tmp_path, before) is (name == "last.pt")
