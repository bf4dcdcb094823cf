"""A training whose checkpoints are copied to a mirror, and whose folder is lost."""

import errno
import json
import re
import shutil
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.support.here import Here, StopAfter
from tests.support.ranks import Ranks
from tests.support.storages import Storages
from tests.support.tiny import TINY
from tests.support.unsafe_pickle import MakesFolder
from trainbox.contract.config import Config
from trainbox.contract.errors import Preempted, StorageFailure
from trainbox.contract.sidecar import write_checkpoint
from trainer.parallel.world import World
from trainer.run.mirror import mirrored
from trainer.run.mirror_storage import Storage
from trainer.session import agreement
from trainer.system.signals import StopRequest

URL = "faulty://bucket/prefix"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"  # noqa: S105

pytestmark = pytest.mark.usefixtures("faulty")


def _stored() -> list[str]:
    """Return the paths in the storage, relative to the run, without the checkpoint's folder."""
    return sorted({path.partition("/r/step-")[2][9:] for path in Storages.store})


def _without_times(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {"time_unix_s", "samples_per_second", "data_share"}
    return [{name: e[name] for name in e.keys() - names} for e in entries]


def test_a_lost_run_resumes_from_its_mirror_to_the_same_bits_and_records(here: Here) -> None:
    settings = {"checkpoint_steps": 4, "log_steps": 1, "keep": 1}
    here.train("undisturbed", **settings)
    here.stopped(10, mirror=URL, **settings)
    assert _stored() == [
        *("checkpoints/step-00000006.json", "checkpoints/step-00000006.pt"),
        *("checkpoints/step-00000010.json", "checkpoints/step-00000010.pt"),
        *("complete.json", "config.json", "digests.jsonl", "first_checkpoint.json"),
        *("manifest.json", "metrics.jsonl"),
    ]
    lost = here.path().rename(here.folder / "lost")
    out = here.train(mirror=URL, **settings)
    assert f"restored the checkpoint of step 10 from {URL}/r" in out
    assert "from step 10, " in out
    assert out.splitlines()[-1] == f"mirror     {URL}/r has the checkpoint of step 18"
    # The bits, the records and the identity are those of a run that was never lost.
    assert here.digest() == here.digest("undisturbed")
    for kind in ("train", "validation"):
        entries = _without_times(here.entries(kind))
        assert entries == _without_times(here.entries(kind, "undisturbed"))
    starts = [entry for entry in here.digests("r") if entry["kind"] == "resume"]
    assert [entry["step"] for entry in starts] == [10]
    manifest, old = (
        json.loads((path / "manifest.json").read_text()) for path in (here.path(), lost)
    )
    assert (manifest["run_id"], len(manifest["resumes"])) == (old["run_id"], 1)
    # Without the mirror, the same command trains a new run.
    assert "mirror" not in (here.path() / "config.json").read_text()
    assert URL not in json.dumps(manifest["settings"])


def test_a_failing_mirror_changes_nothing_but_the_log(here: Here) -> None:
    def fail(operation: str, path: str) -> None:
        if operation != "find":
            raise OSError(f"no answer with secret_key={SECRET}")

    Storages.before = staticmethod(fail)
    here.train("undisturbed", checkpoint_steps=2)
    out = here.train(mirror=URL, checkpoint_steps=2)
    assert here.digest() == here.digest("undisturbed")
    assert out.count("--mirror: a checkpoint could not be copied") == 1
    last = out.splitlines()[-1]
    assert last.startswith(f"mirror     {URL}/r has no checkpoint; ")
    assert int(last.split()[-3]) > 1 and last.endswith(" copies failed")
    log = (here.path() / "logs/rank-0.log").read_text()
    assert SECRET not in out + log and "secret_key=(not shown)" in log
    # The next start with a storage that works copies what is missing.
    Storages.work()
    assert "this run is complete" in here.train(mirror=URL, checkpoint_steps=2)
    shutil.rmtree(here.path())
    assert "this run is complete" in here.train(mirror=URL, checkpoint_steps=2)
    assert here.digest() == here.digest("undisturbed")


def test_a_stop_waits_for_the_last_copy_up_to_a_limit(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def hang(operation: str, path: str) -> None:
        if operation == "put" and "step-00000009" in path:
            assert released.wait(60)

    Storages.before = staticmethod(hang)
    log = here.path() / "logs/rank-0.log"
    with pytest.raises(Preempted, match="at step 5 of 18, checkpoint saved"):
        here.train(stop=StopAfter(5), mirror=URL)
    assert f"{URL}/r has the checkpoint of step 5\n" in log.read_text()
    monkeypatch.setattr("trainer.loop.saving.STOP_S", 2.0)
    with pytest.raises(Preempted, match="at step 9 of 18, checkpoint saved"):
        here.train(stop=StopAfter(4), mirror=URL)
    assert "step 6; the last copy was not finished in time\n" in log.read_text()
    released.set()
    assert here.steps()[-1] == 9
    # A run that is lost now resumes from the checkpoint before.
    shutil.rmtree(here.path())
    out = here.train(mirror=URL)
    assert "restored the checkpoint of step 6 " in out


def test_no_code_of_a_mirror_runs(here: Here) -> None:
    """All digests of the harmful checkpoint are correct."""
    here.stopped(4, mirror=URL)
    folder = here.path() / "checkpoints"
    run_id = json.loads((folder / "step-00000004.json").read_text())["run_id"]
    unsafe = {"model": MakesFolder(here.folder / "hacked")}
    fields = {"run_id": run_id, "step": 9, "metrics": {}, "best_step": None}
    write_checkpoint(folder, 9, lambda file: torch.save(unsafe, file), fields)
    Storage(URL, here.path()).upload(9, lambda: None)
    shutil.rmtree(here.path())
    out = here.train(mirror=URL)
    assert "the copy of step 9 in faulty://bucket/prefix/r is damaged (checkpoint " in out
    assert "checkpoints/step-00000009.pt cannot be loaded safely" in out
    assert f"restored the checkpoint of step 4 from {URL}/r" in out
    assert not (here.folder / "hacked").exists()


def test_a_damaged_copy_is_replaced(here: Here) -> None:
    here.train(mirror=URL, checkpoint_steps=4)
    digest = here.digest()
    newest = "/bucket/prefix/r/step-00000018/checkpoints/step-00000018.pt"
    before = Storages().names()[newest]
    Storages().pipe_file(newest, before[:-1])
    for text in ("step 18 in faulty://bucket/prefix/r is damaged (", "the checkpoint of step 18 "):
        shutil.rmtree(here.path())
        out = here.train(mirror=URL, checkpoint_steps=4)
        assert text in out and here.digest() == digest
        assert len(Storages().names()[newest]) == len(before)


def test_the_command_refuses_a_mirror_that_it_cannot_use(here: Here) -> None:
    words = ("train", TINY, "--device", "cpu", "--run", "r")
    for url, text in (
        ("none://bucket", "--mirror 'none://bucket' has an unknown scheme"),
        (f"ftp://me:{SECRET}@host/x", "--mirror ftp://... contains a login"),
    ):
        err = here.refused(*words, "--mirror", url, silent=True)
        assert err.startswith(f"trainbox: {text}") and SECRET not in err
    assert not here.path().exists()


def test_an_empty_url_overrides_the_environment(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bench and the drill train runs of one name, which must not restore each other."""
    monkeypatch.setenv("TRAINBOX_MIRROR", URL)
    words = ("train", TINY, "--device", "cpu", "--run", "r", "--max-steps", "2")
    here.succeeds(*words, "--mirror=")
    assert not Storages.store
    here.succeeds(*words)
    assert "mirror     faulty://bucket/prefix/r has" in here.command(*words)[1]


@pytest.mark.waits
def test_all_ranks_resume_from_the_step_of_the_mirror(ranks: Ranks) -> None:
    arguments = ("train", TINY, "--run", "r", "--checkpoint-steps", "4")
    mirror = ("--mirror", f"file://{ranks.folder}/mirror")
    first = ranks(2, *arguments, *mirror)
    assert first.codes == [0, 0], first
    (ranks.folder / "runs").rename(ranks.folder / "lost")
    # The newest copy is not complete.
    (ranks.folder / "mirror/r/step-00000018/complete.json").unlink()
    second = ranks(2, *arguments, *mirror)
    assert second.codes == [0, 0], second
    assert "from step 16, " in second.out
    assert second.digest == first.digest


def test_all_ranks_must_have_the_same_arguments_software_and_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: dict[str, Any] = {}
    monkeypatch.setattr(agreement, "refuse_difference", lambda _, found, __: compared.update(found))
    agreement.check_command(World(0, 1, torch.device("cpu")), Config(), "r", "auto", "file:///a")
    assert (compared["mirror"], compared["run"]) == ("file:///a", "r")
    assert (compared["device"], compared["torch"]) == ("cpu", torch.__version__)
    assert compared.keys() >= vars(Config()).keys() | {"resume", "trainbox"}


def test_a_training_that_fails_does_not_wait_for_its_copies(here: Here) -> None:
    run: Any = SimpleNamespace(path=here.path(), report=print)
    world = World(0, 1, torch.device("cpu"))
    with (
        pytest.raises(ZeroDivisionError),
        mirrored(URL, run, world, "auto", StopRequest()) as mirror,
    ):
        raise ZeroDivisionError
    assert mirror is not None
    mirror.saved()
    assert not any(thread.name == "mirror" for thread in threading.enumerate())


def test_a_full_disk_is_not_a_failure_of_the_storage(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train(mirror=URL)
    shutil.rmtree(here.path())
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Storages, "get_file", Mock(side_effect=full))  # raised in a library
    with pytest.raises(StorageFailure, match=r"^cannot write runs: No space left on device"):
        here.train(mirror=URL)


def test_a_restore_refuses_a_forged_checkpoint_as_a_resume_does(here: Here) -> None:
    """The marker and all other sums are those of the forged files."""
    here.train(mirror=URL, checkpoint_steps=4)
    digest = here.digest()
    # Forge the newest checkpoint of the run, and copy it to the mirror.
    folder = here.path() / "checkpoints"
    sidecar = folder / "step-00000018.json"
    state = torch.load(sidecar.with_suffix(".pt"), weights_only=True)
    for tensor in state["model"].values():
        tensor.neg_()
    described = json.loads(sidecar.read_text())
    write_checkpoint(folder, 18, lambda file: torch.save(state, file), described)
    Storage(URL, here.path()).upload(18, lambda: None)
    problem = "its weights differ from the entry of step 18 in digests.jsonl: "
    # A resume uses the checkpoint before, and so does a restore.
    out = here.train(checkpoint_steps=4)
    assert re.search(rf"checkpoint \S+step-00000018.pt is damaged \(.*{problem}", out)
    assert here.digest() == digest
    shutil.rmtree(here.path())
    out = here.train(mirror=URL, checkpoint_steps=4)
    assert re.search(rf"the copy of step 18 in {URL}/r is damaged \(.*{problem}", out)
    assert f"restored the checkpoint of step 16 from {URL}/r" in out
    assert here.digest() == digest


def test_a_run_with_other_micro_batches_is_restored(here: Here) -> None:
    """With --resume anyway, a start may choose smaller ones than the manifest has."""
    here.stopped(4, mirror=URL)
    here.edit("config.json", accumulation=2)
    here.stopped(4, mirror=URL, resume="anyway")
    shutil.rmtree(here.path())
    out = here.train(mirror=URL, resume="anyway")
    assert f"restored the checkpoint of step 8 from {URL}/r" in out
