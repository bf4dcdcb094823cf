"""Checkpoints of a script: whole or not there, verified, and never all removed."""

import enum
import errno
import http
import os
import resource
import signal
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.support.nodes import free_port
from tests.support.ranks import EndedRanks, Ranks
from trainbox import Checkpoints, StorageFailure, TrainState, WrongUse, seed_step
from trainbox.checkpoint_writer import Snapshot
from trainbox.files.regular_files import read_object
from trainbox.folders import write_failures
from trainbox.tensor_trees import tensors_in


def _state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((100,), value)}


def _value(checkpoints: Checkpoints, **options: bool) -> tuple[float, int] | None:
    found = checkpoints.load(**options)
    return None if found is None else (found[0]["weight"][0].item(), found[1])


def _save_all(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, _state(step))
    checkpoints.wait()


def _names(folder: Path) -> list[str]:
    """Return the names of the checkpoints' files."""
    return sorted(path.name for path in folder.glob("step-*"))


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(
        memory_format=torch.channels_last  # type: ignore[call-overload]
    )
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    model(torch.ones(2, 1, 5, 5)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": (3, (1, 2), None),
        "values": [1, 0.5, True, "text", b"bytes", torch.float16, torch.device("cpu")],
        "ordered": OrderedDict(a=1),
    }
    checkpoints = Checkpoints(tmp_path / "new/folder")
    assert checkpoints.load() is None
    checkpoints.save(7, state, metric=0.5)
    checkpoints.wait()
    found = Checkpoints(tmp_path / "new/folder").load()
    assert found is not None
    loaded, step = found
    assert step == 7
    assert (loaded["random"], loaded["values"], loaded["ordered"]) == (
        state["random"],
        state["values"],
        {"a": 1},
    )
    assert loaded["optimizer"]["param_groups"][0]["betas"] == (0.8, 0.9)
    other = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    other.load_state_dict(loaded["model"])
    torch.optim.Adam(other.parameters()).load_state_dict(loaded["optimizer"])
    assert all(
        torch.equal(one, two)
        for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )
    assert "requires_grad=True" not in str(loaded)


def test_a_state_without_tensors_and_with_other_tensors_can_follow(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step, state in enumerate([{"a": 1}, _state(2), {"b": torch.ones(3)}, {"c": "text"}]):
        checkpoints.save(step, state)
        found = checkpoints.load()
        assert found is not None
        assert (str(found[0]), found[1]) == (str(state), step)


def _training() -> TrainState:
    """Return all parts of a new training, each with a state of its own."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedulers = torch.optim.lr_scheduler
    warm = schedulers.LinearLR(optimizer, total_iters=3)
    return TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=schedulers.SequentialLR(
            optimizer, [warm, schedulers.MultiStepLR(optimizer, [2, 5, 5])], [4]
        ),
        plateau=schedulers.ReduceLROnPlateau(optimizer, patience=1),
        average=torch.optim.swa_utils.AveragedModel(model),
        scaler=torch.amp.GradScaler("cpu"),
        seen=0,
    )


def _train(state: TrainState, steps: range) -> None:
    for step in steps:
        seed_step(1, step)
        loss = state.model(torch.randn(8, 3)).square().mean()
        state.optimizer.zero_grad()
        state.scaler.scale(loss).backward()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.scheduler.step()
        state.plateau.step(1.0)
        state.average.update_parameters(state.model)
        state.seen += 8


def test_a_train_state_resumes_with_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    checkpoints, undisturbed = Checkpoints(tmp_path), _training()
    assert checkpoints.restore(undisturbed) == 0
    _train(undisturbed, range(4))
    checkpoints.prepare(undisturbed)
    checkpoints.save(4, undisturbed, metric=0.5)
    _train(undisturbed, range(4, 12))
    resumed = _training()  # with other weights
    _train(resumed, range(20, 22))  # and another state of everything
    _train(resumed, range(checkpoints.restore(resumed, best=True), 12))
    one, two = (Snapshot().take(state.state_dict()) for state in (undisturbed, resumed))
    assert str(one) == str(two)
    assert all(map(torch.equal, tensors_in(one), tensors_in(two)))
    assert (resumed.seen, resumed.optimizer.param_groups[0]["lr"] < 0.01) == (96, True)


def test_a_train_state_with_other_parts_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, TrainState(model=nn.Linear(1, 1), epoch=2))
    message = (
        r"^the saved parts are model, epoch, and the TrainState's parts are model, scheduler "
        r"\(different: epoch, scheduler\): use the same parts, or a new folder$"
    )
    with pytest.raises(WrongUse, match=message):
        checkpoints.restore(TrainState(model=nn.Linear(1, 1), scheduler=None))


_WRAPPED = """
import sys, torch, torch.distributed as dist, trainbox
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
state = trainbox.TrainState(model=DistributedDataParallel(model))
checkpoints = trainbox.Checkpoints(sys.argv[1])
step = checkpoints.restore(state)
print(step, model.weight.tolist() == [[step, step]])
torch.nn.init.constant_(model.weight, step + 1)
checkpoints.save(step + 1, state)
checkpoints.wait()
dist.destroy_process_group()
"""


def test_a_model_in_ddp_is_saved_and_loaded_without_it(tmp_path: Path, ranks: Ranks) -> None:
    for found in (["0 False", "0 False"], ["1 True", "1 True"]):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        module = "tests.support.program"
        started = ranks.start(2, _WRAPPED, str(tmp_path), module=module, env=env)
        assert started.wait().codes == [0, 0]
        assert "".join(started.printed("out")).splitlines() == found
    plain = TrainState(model=nn.Linear(2, 1))
    assert Checkpoints(tmp_path).restore(plain) == 2
    assert plain.model.weight.tolist() == [[2, 2]]


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    metrics = [0.1, 0.9, 0.3, 0.9, 0.2, float("nan"), 0.4, float("inf")]
    for best, expected in (("max", 2), ("min", 1)):
        folder = tmp_path / best
        checkpoints = Checkpoints(folder, keep=2, best=best)  # type: ignore[arg-type]
        for step, metric in enumerate(metrics, 1):
            checkpoints.save(step, _state(step), metric)
        checkpoints.wait()
        stems = [f"step-{step:08d}" for step in (expected, 7, 8)]
        assert _names(folder) == [
            f"{stem}{suffix}" for stem in stems for suffix in (".json", ".pt")
        ]
        again = Checkpoints(folder, keep=2, best=best)  # type: ignore[arg-type]
        assert _value(again) == (8, 8)
        assert _value(again, best=True) == (expected, expected)
    assert Checkpoints(tmp_path / "none").load(best=True) is None


def test_files_of_others_stay(tmp_path: Path) -> None:
    others = {
        "model.pt": "a",
        "step-1.pt": "b",
        "step-00000001.txt": "c",
        "notes.tmp": "d",
        "step-00000002.pt": "e",  # without a sidecar
        "step-00000003.json": '{"step": 3}',  # of another program
        "step-00000003.pt": "f",
    }
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    checkpoints = Checkpoints(tmp_path, keep=1)
    _save_all(checkpoints, 4, 5, 6)
    assert _value(checkpoints) == (6, 6)
    assert {name: (tmp_path / name).read_text() for name in others} == others
    (tmp_path / "step-00000007.pt").write_text("g")
    _save_all(checkpoints, 7)
    assert (tmp_path / "step-00000007.pt.damaged").read_text() == "g"
    assert _value(checkpoints) == (7, 7)


class _Killed(BaseException):
    """The end of a killed process, after which nothing runs."""


@pytest.mark.parametrize("calls", range(12))
def test_a_kill_at_any_moment_leaves_a_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Kill before the N-th change of a name; with keep=1, this is the hardest case."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    _save_all(checkpoints, 1)
    done = []

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Path, *arguments: Any, **options: Any) -> Any:
            if len(done) >= calls:
                done.append("killed")
                raise _Killed
            done.append(path.name)
            return original(path, *arguments, **options)

        return changed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", change(Path.replace))
        patched.setattr(Path, "unlink", change(Path.unlink))
        checkpoints.save(2, _state(2))
        checkpoints._writer.finish()
    killed = "killed" in done
    assert killed == (calls < 7), done
    found = _value(Checkpoints(tmp_path, keep=1))
    assert found in ([(1, 1), (2, 2)] if killed else [(2, 2)])
    # What a kill left behind does not stay.
    again = Checkpoints(tmp_path, keep=1)
    again.load()
    _save_all(again, 3)
    assert _names(tmp_path) == ["step-00000003.json", "step-00000003.pt"]


def test_a_failed_save_is_reported_at_once_and_raised_by_the_next_call(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The limit of a file's size acts as a full disk."""
    checkpoints = Checkpoints(tmp_path)
    _save_all(checkpoints, 1)
    earlier, limits = signal.getsignal(signal.SIGXFSZ), resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        checkpoints.save(2, _state(2))
        message = f"cannot write {tmp_path}: File too large "
        remedy = r"raise the limit of a file's size .*, or use another folder; earlier checkpoints "
        with pytest.raises(StorageFailure, match=f"^{message}.*: {remedy}"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, earlier)
    assert capfd.readouterr().err.startswith(f"trainbox: {message}")
    assert _names(tmp_path) == ["step-00000001.json", "step-00000001.pt"]
    _save_all(checkpoints, 3)
    assert _value(checkpoints) == (3, 3)


def test_the_lock_must_not_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("elsewhere")
    with pytest.raises(StorageFailure, match=r"lock: .*: remove the link, or use another folder$"):
        Checkpoints(tmp_path).load()
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_names_the_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    monkeypatch.setattr(
        write_failures.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 20)
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"weight": torch.zeros(2**19)})
    with pytest.raises(StorageFailure, match=r"\(2 MiB needed, 3 MiB free\): free some space, "):
        checkpoints.save(2, _state(2))
    monkeypatch.undo()
    _save_all(checkpoints, 2)
    assert _value(checkpoints) == (2, 2)


class _Sharded(torch.Tensor):
    def full_tensor(self) -> None: ...


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([torch.ones(1)], r"state is a list: save a TrainState or a dict"),
        ({"a": [numpy.ones(1)]}, r"state\['a'\]\[0\] is a ndarray, which cannot be loaded"),
        ({"a": {"b": range(3)}}, r"state\['a'\]\['b'\] is a range, which cannot be loaded"),
        ({"config": Path("x")}, r"state\['config'\] is a PosixPath, which cannot be loaded"),
        ({(1, 2): 3}, r"state has the key \(1, 2\), a tuple: use a string"),
        ({"a": torch.ones(2, 2).to_sparse()}, r"state\['a'\] is a sparse or quantized tensor"),
        ({"a": torch.ones(2).as_subclass(_Sharded)}, r"state\['a'\] is sharded over the ranks"),
    ],
)
def test_values_that_could_not_be_loaded_are_refused(
    tmp_path: Path, state: Any, message: str
) -> None:
    with pytest.raises(WrongUse, match=f"^{message}"):
        Checkpoints(tmp_path).save(1, state)


class _Kind(str, enum.Enum):  # noqa: UP042 - its str() is the name
    PLAIN = "plain"


def test_numbers_and_texts_of_other_classes_are_saved_as_plain_ones(tmp_path: Path) -> None:
    """torch.load would refuse NumPy's, so the checkpoint would be lost."""
    given = {
        "a": [numpy.float64(0.5), numpy.int64(2), numpy.bool_(True), numpy.str_("b")],
        "kind": _Kind.PLAIN,
        "count": http.HTTPStatus.OK,
        "counted": Counter("aab"),
        "names": {"x", "y"},
        numpy.int64(7): (torch.float32, None),
    }
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, given)
    checkpoints.wait()
    state, _ = Checkpoints(tmp_path).load() or ({}, 0)
    assert repr(state["a"]) == "[0.5, 2, True, 'b']"
    assert (type(state["kind"]), type(state["count"])) == (str, int)
    assert state == {**given, "a": [0.5, 2, True, "b"]}


def test_a_step_is_any_integer_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (numpy.int64(3), torch.tensor(4)):
        checkpoints.save(step, _state(1))
        checkpoints.wait()
    assert [type(step["step"]) for step in map(read_object, tmp_path.glob("step-*.json"))] == [
        int,
        int,
    ]
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        checkpoints.save(5.0, _state(1))  # type: ignore[arg-type]


def test_a_second_process_is_refused_in_one_line(tmp_path: Path) -> None:
    """Before the first process has a checkpoint, the second one is refused at its save."""
    program = f"""
import trainbox
try:
    checkpoints = trainbox.Checkpoints({str(tmp_path)!r})
    checkpoints.load()
    print("loaded")
    checkpoints.save(9, {{"a": 1}})
except trainbox.WrongUse as error:
    print(error)
"""
    message = (
        f"another process uses the checkpoints in {tmp_path}: wait until it ends, or use another "
        "folder\n"
    )
    checkpoints = Checkpoints(tmp_path)
    _save_all(checkpoints, 1)
    (tmp_path / "step-00000002.pt.tmp").write_bytes(b"a save that is being written")
    before = _names(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert (ended.stdout, ended.stderr) == (message, "")
    assert _names(tmp_path) == before
    assert _value(Checkpoints(tmp_path)) == (1, 1)  # this process may have several


def test_a_folder_that_has_lost_its_checkpoints_does_not_restart(tmp_path: Path) -> None:
    _save_all(Checkpoints(tmp_path), 1)
    for path in tmp_path.glob("step-*"):
        path.unlink()
    with pytest.raises(StorageFailure, match=r"\(first_checkpoint.json exists\): restore"):
        Checkpoints(tmp_path).load()


def test_checkpoints_without_sidecars_are_no_new_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save_all(Checkpoints(tmp_path), 1, 2)
    (tmp_path / "step-00000002.json").unlink()
    assert _value(Checkpoints(tmp_path)) == (1, 1)
    assert "step-00000002.pt is damaged (its sidecar step-00000002.json is missing): set aside" in (
        capsys.readouterr().err
    )
    for path in tmp_path.glob("*.json"):
        path.unlink()
    before = _names(tmp_path)
    for best in (False, True):
        lost = r"\(step-00000001.pt: its sidecar step-00000001.json is missing\): restore"
        with pytest.raises(StorageFailure, match=lost):
            Checkpoints(tmp_path).load(best=best)
    assert _names(tmp_path) == before


def test_a_first_save_that_lacks_its_last_rename_is_finished(tmp_path: Path) -> None:
    _save_all(Checkpoints(tmp_path), 1)
    (tmp_path / "first_checkpoint.json").unlink()
    (tmp_path / "step-00000001.json").rename(tmp_path / "step-00000001.json.tmp")
    assert _value(Checkpoints(tmp_path)) == (1, 1)


def test_steps_do_not_decrease(tmp_path: Path) -> None:
    _save_all(Checkpoints(tmp_path), 5)
    checkpoints = Checkpoints(tmp_path)
    _save_all(checkpoints, 5)
    with pytest.raises(WrongUse, match=r"^step 4 is before step 5 of the newest checkpoint"):
        checkpoints.save(4, _state(4))


def test_arguments_are_checked() -> None:
    with pytest.raises(WrongUse, match=r"^Checkpoints\(keep=0, best='max'\): give keep=1 or more"):
        Checkpoints(keep=0)
    with pytest.raises(WrongUse, match="best='loss'"):
        Checkpoints(best="loss")  # type: ignore[arg-type]


_ON_RANKS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import trainbox
dist.init_process_group("gloo")
rank, checkpoints = dist.get_rank(), trainbox.Checkpoints(keep=2)
try:
    print(checkpoints.load())
    checkpoints.save(1, {"by": rank})
    checkpoints.save(2, {"by": rank})
    checkpoints.wait()
    print(checkpoints.load())
    checkpoints.folder.joinpath("step-00000002.pt").write_bytes(b"")
    dist.barrier()
    print(checkpoints.load())
    checkpoints.folder.joinpath("step-00000001.pt").write_bytes(b"")
    dist.barrier()
    checkpoints.load()
except trainbox.StorageFailure as error:
    print(error)
dist.destroy_process_group()
"""


def _on(ranks: Ranks, count: int, program: str) -> EndedRanks:
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TRAINBOX_RUN": str(ranks.folder),
    }
    return ranks(count, program, module="tests.support.program", env=env)


_READS = """
import time
import torch.distributed as dist
import trainbox.stored_checkpoints
dist.init_process_group("gloo")
rank, checkpoints = dist.get_rank(), trainbox.Checkpoints(keep=1)
checkpoints.save(1, {"by": 0})
checkpoints.wait()
read = trainbox.stored_checkpoints.read_tensor_file

def slow(path, mapped):
    until_s = time.monotonic() + 2 * (rank == 3)
    while path.exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    return read(path, mapped)

trainbox.stored_checkpoints.read_tensor_file = slow
print(checkpoints.load())
checkpoints.save(2, {"by": 0})
checkpoints.wait()
dist.destroy_process_group()
"""


def test_no_checkpoint_is_removed_before_all_ranks_have_read_it(ranks: Ranks) -> None:
    """In a broadcast to 4 ranks, rank 0 does not wait for rank 3."""
    ended = _on(ranks, 4, _READS)
    assert ended.outs == ["({'by': 0}, 1)\n"] * 4, ended.errs


def test_one_rank_writes_and_all_load_the_same(ranks: Ranks) -> None:
    ended = _on(ranks, 2, _ON_RANKS)
    assert ended.codes == [0, 0], ended.errs
    first, second = (out.splitlines() for out in ended.outs)
    assert first[:3] == second[:3] == ["None", "({'by': 0}, 2)", "({'by': 0}, 1)"]
    assert first[3].startswith(f"no valid checkpoint in {ranks.folder}/checkpoints (step-00000001")
    assert second[3] == "rank 0 cannot load a checkpoint: see its message"
    assert ended.errs[1] == ""


def test_a_call_in_another_form_is_answered_with_the_right_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(WrongUse, match=r"\(Linear\): write TrainState\(model=model\)$"):
        TrainState(model)
    for state in (TrainState(model=model), {"model": 1}):
        with pytest.raises(WrongUse, match=r": write save\(step, state\)$"):
            Checkpoints(tmp_path).save(state, 1)  # type: ignore[arg-type]
