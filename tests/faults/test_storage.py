"""Files that are damaged, missing or hostile, and disks that are full or read-only."""

import hashlib
import os
import pickle
import random
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import Ended, clean_environment, wait_until
from tests.support.faults import (
    GATED,
    Gate,
    checkpoints,
    in_a_mount_namespace,
    messages,
    needs_root,
    trainer,
)
from tests.support.here import Here, StopAfter
from tests.support.ranks import Ranks
from tests.support.tiny import TINY
from tests.support.unsafe_pickle import MakesFolder
from trainbox.errors import Preempted
from trainbox.files.sidecar import read_sidecar, sidecar_text
from trainer.records.checkpoint import RunCheckpoints

_EACH_STEP: dict[str, Any] = {"checkpoint_steps": 1, "keep": 99, "log_steps": 1}


def _stopped_at_10(here: Here) -> list[Path]:
    """Make checkpoints of steps 1 to 10, and a clean run; return the files of tensors."""
    here.train("clean")
    with pytest.raises(Preempted):
        here.train(stop=StopAfter(10), **_EACH_STEP)
    assert here.steps() == list(range(1, 11))
    return [here.path() / f"checkpoints/step-{step:08d}.pt" for step in range(1, 11)]


def _check_resumed(here: Here, out: str, step: int) -> None:
    assert f"resume     from step {step}, " in out
    assert here.digest() == here.digest("clean")
    assert [entry["step"] for entry in here.entries("train")] == list(range(1, 19))


def test_row_11_the_newest_checkpoint_truncated(here: Here) -> None:
    newest = _stopped_at_10(here)[-1]
    os.truncate(newest, newest.stat().st_size // 2)
    out = here.train(**_EACH_STEP)
    assert (
        len(
            re.findall(
                r"step-00000010\.pt is damaged \(\d+ bytes instead of \d+\): set aside, "
                r"using step 9\n",
                out,
            )
        )
        == 1
    )
    assert newest.with_name("step-00000010.pt.damaged").exists()
    _check_resumed(here, out, 9)


def test_row_12_a_page_zeroed_fifty_times(tmp_path: Path) -> None:
    reports: list[str] = []
    saved = RunCheckpoints(tmp_path, 3, True, reports.append, run_id="0123")
    for step in (1, 2):
        state = {
            "model": {"weight": torch.randn(100_000)},
            "progress": {"step": step, "best_step": None},
        }
        saved.save(step, state, {}, None)
    saved.wait()
    tensors, sidecar = tmp_path / "step-00000002.pt", tmp_path / "step-00000002.json"
    whole, words = tensors.read_bytes(), sidecar.read_text()
    draw = random.Random(0)  # noqa: S311
    for time_ in range(1, 51):
        page = 4096 * draw.randrange(1, len(whole) // 4096 - 1)
        tensors.write_bytes(whole[:page] + bytes(4096) + whole[page + 4096 :])
        sidecar.write_text(words)
        assert saved.files.newest() == 1
        assert len(reports) == time_


def test_row_14_empty_and_strange_files_and_broken_links(here: Here) -> None:
    _stopped_at_10(here)
    folder = here.path() / "checkpoints"
    (folder / "latest").symlink_to("step-00000099.pt")
    (folder / "step-00000097.pt").symlink_to("nowhere")
    (folder / "step-00000098.json").symlink_to("nowhere")
    for name in (
        "step-00000096.pt",
        "step-00000096.json",
        "step-00000095.pt",
        "notes.txt",
        "step-5.json",
    ):
        (folder / name).touch()
    (folder / "a folder").mkdir()
    os.mkfifo(folder / "step-00000094.pt")
    os.mkfifo(folder / "step-00000093.json")
    (folder / "step-00000092.json").write_text("[" * 100_000)
    out = here.train(**_EACH_STEP)
    assert sorted(re.findall(r"(step-\d+)\.pt is damaged", out)) == [
        f"step-{step:08d}" for step in range(92, 99)
    ]
    assert (
        len(re.findall(r"its sidecar step-\d+.json is missing\): set aside, using step 10", out))
        == 3
    )
    _check_resumed(here, out, 10)
    assert {"latest", "notes.txt", "step-5.json", "a folder"} <= {
        path.name for path in folder.iterdir()
    }


_FULL = """
mkdir -p runs
mount -t tmpfs -o size=4m tmpfs runs
head -c 2900k /dev/zero > runs/filler
"""
_FREED = """
find runs -name '*.tmp'
rm runs/filler
"""


@needs_root
def test_row_15_the_disk_full_while_saving(ranks: Ranks, clean: str) -> None:
    """The training ends; with more space, the same command resumes from the last checkpoint."""
    words = (*GATED, "--checkpoint-steps", "10", "--keep", "40")
    ended = in_a_mount_namespace(ranks, [_FULL, _FREED], *words)
    _, _, second = ended.out.partition("exit code 4\n")
    assert second, ended
    assert not second.startswith("runs")  # no temporary file
    assert len(messages(ended)) == 1
    # A step's entries are written before the digests and the tensors of a save. Any of the three
    # may be what does not fit.
    assert re.match(
        r"trainbox: cannot write runs/r/(checkpoints: No space left on device \(1 MiB needed, |"
        r"(digests|metrics).jsonl: No space left on device \()0 MiB free\): free some space",
        messages(ended)[0],
    )
    assert "Traceback" not in ended.errs[0]
    match = re.search(r"^resume +from step (\d+)0, ", second, re.MULTILINE)
    assert match and 5 <= int(match[1]) < 40
    assert "damaged" not in second
    assert ended.code == 0
    assert f"digest     {clean} " in second


_NO_INODES = "mkdir -p runs && mount -t tmpfs -o nr_inodes={} tmpfs runs"


@needs_root
@pytest.mark.parametrize(
    ("inodes", "reason"),
    # Enough for all but the file of TensorBoard, or for all but the first checkpoint.
    [(10, "no inodes left"), (13, "no inodes or quota left: see `df -i` and `quota -s`")],
)
def test_row_15_no_inodes_left(ranks: Ranks, inodes: int, reason: str) -> None:
    script = _NO_INODES.format(inodes)
    ended = in_a_mount_namespace(ranks, [script], *GATED, "--no-rehearsal")
    assert ended.code == 4
    remedy = "delete some files, or choose another folder with --runs-dir"
    assert f"{reason}): {remedy}" in ended.errs[0]
    assert ended.errs[0].count("\n") == 1
    lost = "TensorBoard's files cannot be written (No space left on device): training continues"
    assert (lost in ended.out) == (inodes == 10)


_READ_ONLY = "mkdir -p runs && mount -t tmpfs tmpfs runs && mount -o remount,ro runs"


@needs_root
def test_row_16_a_read_only_disk(ranks: Ranks) -> None:
    ended = in_a_mount_namespace(ranks, [_READ_ONLY], *GATED)
    assert ended.code == 4
    assert re.fullmatch(
        r"trainbox: cannot write runs/r(/checkpoints)?: Read-only file system: mount the "
        r"file system for writing, "
        r"or choose another folder with --runs-dir\n",
        ended.errs[0],
    )
    assert not (ranks.folder / "data was read").exists()


def test_row_17_the_checkpoints_deleted_under_a_training(ranks: Ranks, clean: str) -> None:
    words = (*GATED, "--checkpoint-steps", "60", "--keep", "1", "--eval-every", "10")
    gate = Gate(ranks.folder, 150)
    training = ranks.start(1, "train", *words)
    gate.wait_for(training)
    folder = ranks.folder / "runs/r/checkpoints"
    # The save of step 120 ends when it has removed the checkpoint before.
    only = ["step-00000120.pt"]
    wait_until(lambda: [path.name for path in folder.glob("*.pt")] == only, training)
    shutil.rmtree(folder)
    gate.release()
    ended = training.wait()
    assert ended.codes == [0], ended
    warning = (
        "runs/r/checkpoints was removed with all its checkpoints: created again for the checkpoint "
        "of step 180\n"
    )
    assert ended.out.count(warning) == 1
    assert ended.digest == clean
    assert "step-00000400.json" in checkpoints(ranks.folder)
    again = ranks.train(1, *words)
    assert "this run is complete" in again.out
    assert again.digest == clean


def test_the_folder_of_a_run_moved_under_a_training(ranks: Ranks) -> None:
    gate = Gate(ranks.folder, 150)
    training = ranks.start(1, "train", *GATED, "--checkpoint-steps", "60")
    gate.wait_for(training)
    (ranks.folder / "runs/r").rename(ranks.folder / "runs/moved")
    gate.release()
    ended = training.wait()
    assert ended.codes == [4], ended
    assert "cannot write runs/r/" in ended.errs[0] and "its folder is missing" in ended.errs[0]
    assert not (ranks.folder / "runs/r").exists()
    (ranks.folder / "runs/moved").rename(ranks.folder / "runs/r")
    ranks.train(1, *GATED, "--checkpoint-steps", "60")


def _as_user(folder: Path, uid: int, *words: str) -> Ended:
    """Train as a user without a name, a home or rights.

    The user may read all files, because the interpreter may be in root's home.
    """
    may_read = [
        f"--{kind}=-all,+dac_read_search" for kind in ("inh-caps", "ambient-caps", "bounding-set")
    ]
    env = clean_environment(OMP_NUM_THREADS="1", HOME="/nowhere")
    done = subprocess.run(
        [
            "setpriv",
            f"--reuid={uid}",
            "--regid=0",
            "--clear-groups",
            *may_read,
            "--no-new-privs",
            *trainer(*words),
        ],
        cwd=folder,
        env={name: value for name, value in env.items() if name not in ("USER", "LOGNAME")},
        capture_output=True,
        text=True,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@needs_root
@pytest.mark.slow
def test_row_18_a_user_without_a_name(tmp_path: Path, clean: str) -> None:
    for folder in (tmp_path, tmp_path / "runs"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o775)  # the group 0 may write, as OpenShift has it
    ended = _as_user(tmp_path, 12345, *GATED)
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert ended.digest == clean
    assert {
        (path.stat().st_uid, path.stat().st_gid) for path in (tmp_path / "runs/r").rglob("*")
    } == {(12345, 0)}


@needs_root
def test_row_19_a_disk_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o755)
    ended = _as_user(tmp_path, 1000, *GATED)
    assert ended.code == 4
    assert ended.err.startswith(
        "trainbox: cannot write runs/r: Permission denied (runs belongs to root (uid 0), "
        "and this process runs as "
    )
    assert ": take the folder over with `sudo chown -R 1000:0 runs`, or choose another" in ended.err
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "data was read").exists()


def test_row_41_a_clock_that_jumps(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the process jumps by an hour, and the files have old times."""
    saved = _stopped_at_10(here)
    for age, path in enumerate(saved):  # the newest looks like the oldest
        for file in (path, path.with_suffix(".json")):
            os.utime(file, (1e9 - 3600 * age, 1e9 - 3600 * age))
    now, draw = time.time, random.Random(0)  # noqa: S311
    monkeypatch.setattr(time, "time", lambda: now() + draw.choice((-3600, 0, 3600)))
    _check_resumed(here, here.train(**_EACH_STEP), 10)


@pytest.mark.parametrize("name", ["logs/rank-0.log", "lock"])
def test_a_link_in_a_run_is_refused_and_its_target_is_not_written(here: Here, name: str) -> None:
    reason = (
        "Too many levels of symbolic links (a symbolic link is where a file is needed): remove "
        "the link"
    )
    Path("precious").write_text("precious\n")
    Path("runs/r/logs").mkdir(parents=True)
    (here.path() / name).symlink_to(here.folder / "precious")
    Path("train.py").write_text("print('trained')")
    for command in (("train", TINY), ("run", "train.py")):
        code, _, err = here.command(*command[:1], "--device", "cpu", "--run", "r", *command[1:])
        assert code == 4
        assert f"runs/r/{name}: {reason}, or choose another folder with --runs-dir\n" in err
    assert Path("precious").read_text() == "precious\n"


def test_the_runs_may_be_on_another_disk(here: Here) -> None:
    """The folder of the runs is a link, and so is the folder of one run."""
    (here.folder / "disk").mkdir()
    Path("runs").symlink_to("disk")
    here.train()
    (here.folder / "disk/r").rename(here.folder / "moved")
    here.path().symlink_to(here.folder / "moved")
    assert here.command("train", TINY, "--device", "cpu", "--run", "r")[0] == 0
    assert Path("moved/logs/rank-0.log").is_file()


def test_row_43_a_checkpoint_with_code_in_it(here: Here) -> None:
    newest = _stopped_at_10(here)[-1]
    marker = here.folder / "it ran"
    newest.write_bytes(pickle.dumps({"model": MakesFolder(marker)}))
    sidecar = read_sidecar(newest.with_suffix(".json"))
    sidecar |= {
        "sha256": hashlib.sha256(newest.read_bytes()).hexdigest(),
        "bytes": newest.stat().st_size,
    }
    newest.with_suffix(".json").write_text(sidecar_text(sidecar))
    code, _, err = here.command("train", TINY, "--device", "cpu", "--run", "r")
    assert code == 4
    assert err.startswith(
        "trainbox: checkpoint runs/r/checkpoints/step-00000010.pt cannot be loaded safely ("
    )
    assert err.count("\n") == 1
    assert not marker.exists()
