"""One call of `train`: its output, the files of the run's folder, and its exit codes."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.support import tiny
from tests.support.here import Here, StopAfter, files_of
from tests.support.pictures import make_pictures
from tests.support.tiny import TINY, Tiny
from trainbox.errors import DeviceMissing, WrongUse
from trainbox.options.config import Config
from trainbox.options.strategies import STRATEGY_RULES
from trainbox.processes.environment import LaunchFacts
from trainer.loop.report import batch_equation
from trainer.parallel.device import choose_device
from trainer.parallel.strategy import STRATEGIES, Strategy
from trainer.parallel.world import World
from trainer.records.compare_runs import manifest_differences
from trainer.records.run_log import RunLog
from trainer.session.settle import settle


def _equation(
    batch: int,
    world: int,
    shards: int,
    accumulation: int = 1,
    device: str = "cpu",
    strategy: str = "ddp",
) -> str:
    divided = STRATEGIES[strategy](strategy, World(0, world, torch.device(device)))
    config = Config(batch_size=batch, accumulation=accumulation, shards=shards)
    return batch_equation(SimpleNamespace(config=config, strategy=divided))  # type: ignore[arg-type]


# fmt: off
_SETTINGS = [
    ({"batch": 384, "world": 3, "shards": 3, "device": "cuda"},
     "384 = 3 GPUs x 128 x 1 accumulation"),
    ({"batch": 64, "world": 1, "shards": 1, "device": "cuda"}, "64 = 1 GPU x 64 x 1 accumulation"),
    ({"batch": 64, "world": 3, "shards": 3}, "64 = 3 processes x 21 or 22 x 1 accumulation"),
    ({"batch": 64, "world": 3, "shards": 3, "accumulation": 2},
     "64 = 3 processes x 10 or 11 x 2 accumulation"),
    ({"batch": 64, "world": 1, "shards": 4}, "64 = 4 shards x 16 x 1 accumulation"),
    ({"batch": 64, "world": 2, "shards": 4, "accumulation": 2},
     "64 = 4 shards x 8 x 2 accumulation"),
    ({"batch": 64, "world": 1, "shards": 1, "device": "cuda", "strategy": "dp"},
     "64 = 2 GPUs x 32 x 1 accumulation"),
    ({"batch": 7, "world": 1, "shards": 1, "device": "cuda", "strategy": "dp"},
     "7 = 2 GPUs x up to 4 x 1 accumulation"),
]
# fmt: on


@pytest.mark.parametrize(("settings", "expected"), _SETTINGS)
def test_the_batch_equation(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _equation(**settings) == expected


def test_threads_follow_rank_0_and_a_batch_size_per_gpu_is_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another number of CPUs, a machine would add in another order."""
    of_rank_0 = iter([None, 7])  # no stored settings, and the threads
    monkeypatch.setattr(World, "from_first", lambda *_: next(of_rank_0))
    process, run = World(1, 3, torch.device("cpu")), RunLog(tmp_path / "r", 1)
    settled = settle(Config(batch_size_per_gpu=5), Tiny(), Strategy("ddp", process), run)
    run.close()
    assert (settled.threads, settled.precision) == (7, "fp32")
    assert (settled.batch_size, settled.batch_size_per_gpu) == (15, None)


def test_each_strategy_has_a_class_and_rules() -> None:
    assert STRATEGIES.keys() == STRATEGY_RULES.keys()


def test_a_missing_device_is_never_replaced() -> None:
    assert choose_device("cpu", 3) == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceMissing, match=r"torch .* finds 0 GPUs \(.*NVIDIA.*\): update"):
            choose_device("cuda", 0)
    if not torch.backends.mps.is_available():
        with pytest.raises(DeviceMissing, match="use --device cpu"):
            choose_device("mps", 0)


def test_a_gpu_that_torch_has_no_code_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"init": None, "device_count": 1, "get_device_name": "Tesla V100"}
    found |= {"get_device_capability": (7, 0), "get_arch_list": ["sm_75", "sm_90"]}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    with pytest.raises(DeviceMissing) as refused:
        choose_device("cuda", 0)
    assert refused.value.exit_code == 3
    assert "GPU 0, Tesla V100 (it has compute capability 7.0, and the" in str(refused.value)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_90"])
    assert choose_device("cuda", 0) == torch.device("cuda", 0)


def test_the_header_and_the_closing_table(here: Here) -> None:
    out = here.train(accumulation=2, max_steps=9)
    assert "are lost" not in out  # a new run has no records to lose
    lines = [line.split(maxsplit=1) for line in out.splitlines() if " " in line]
    table = {arguments[0]: arguments[1] for arguments in lines if len(arguments) == 2}
    assert table["run"] == "runs/r"
    assert table["plan"] == "1 process(es) on cpu"
    assert table["batch"] == "8 = 1 process x 4 x 2 accumulation"
    assert table["model"] == "Tiny, 5 parameters"
    assert table["data"] == "50 training and 20 validation examples, 0 in both, held on cpu"
    assert table["steps"] == "9, 6 an epoch"
    assert table["precision"].startswith("fp32, deterministic, ")
    assert "resume" not in table
    validation = here.entries("validation")
    assert f"epoch 1: loss {validation[0]['loss']:.4f} (best)" in out
    assert f"epoch 1.5: loss {validation[1]['loss']:.4f}" in out
    assert table["best"] == f"loss {min(e['loss'] for e in validation):.4f}, step 9"
    assert re.fullmatch(r"9 steps in \d+\.\d s, [\d,]+ samples/s", table["trained"])
    assert (
        table["weights"] == "runs/r/model.safetensors (the best), runs/r/checkpoints/ (to resume)"
    )
    assert table["digest"] == f"{here.digest()} (of the last weights)"
    assert table["metrics"] == "runs/r/metrics.jsonl; to view them: tensorboard --logdir runs"
    assert (here.path() / "logs/rank-0.log").read_text() == out
    assert load_file(here.path() / "model.safetensors").keys() == here.weights().keys()


def test_a_task_sees_its_data_before_its_model_is_built_and_can_log(here: Here) -> None:
    (here.folder / "data").mkdir()
    (here.folder / "data/inputs.txt").write_text("7")
    out = here.train(task="tests.support.tiny:Sized", max_steps=1)
    assert "\nmodel      Sized, 8 parameters\n" in out
    assert out.count("\nshapes     [[50, 7], [20, 7]]\n") == 1


def test_the_reason_of_the_plan_is_repeated(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "3 of 4 visible GPUs requested -> torchrun DDP, 3 processes"
    monkeypatch.setenv(*LaunchFacts(reason=reason).variable().popitem())
    assert f"plan       {reason}\n" in here.train(max_steps=1)
    manifest = here.json("manifest.json")
    assert manifest["plan"] == {
        "reason": reason,
        "strategy": "single",
        "world_size": 1,
    }


def test_the_manifest_has_the_command_the_software_and_the_device(here: Here) -> None:
    here.succeeds("train", TINY, "--max-steps", "1", "--device", "cpu", "--run", "r")
    manifest = here.json("manifest.json")
    assert manifest["argv"] == ["train", TINY, "--max-steps", "1", "--run", "r"]
    assert torch.__version__.startswith(manifest["packages"]["torch"])
    assert manifest["device"] == {"type": "cpu"}
    assert re.fullmatch("[0-9a-f]{40}", manifest["build"]["revision"] or "0" * 40)
    here.succeeds("train", TINY, "--max-steps", "1", "--device", "cpu", "--run", "other")
    other = here.json("manifest.json", "other")
    assert manifest_differences(manifest, other) == {}


_LOST = [
    json.dumps({"kind": "train", "step": step, "epoch": 1, "loss": -1.0}) + "\n" for step in (2, 3)
]
_TORN = '{"kind": "train", "step": 4, "ep'


@pytest.mark.parametrize(
    "junk",
    [
        [*_LOST, _TORN],
        ["\n", "[1]\n", '{"step": "x"}\n', '{"kind": [], "step": 1}\n', "\0\0\0"],
        ['{"step": 1, "kind": "\udcff"}\n', "[" * 99_999],
    ],
    ids=["lost", "entries", "text"],
)
def test_a_resume_drops_incomplete_lines_and_entries_of_lost_steps(
    here: Here, junk: list[str]
) -> None:
    here.train("undisturbed", log_steps=1)
    here.stopped(1, log_steps=1)
    with (here.path() / "metrics.jsonl").open("a", errors="surrogateescape") as file:
        file.writelines(junk)
    here.train(log_steps=1)
    for kind in ("train", "validation"):
        ours, theirs = (
            [(e["step"], e["epoch"], e["loss"]) for e in here.entries(kind, run)]
            for run in ("r", "undisturbed")
        )
        assert ours == theirs
    assert len(here.entries("train")) == 18


@pytest.mark.parametrize(
    ("name", "damage"), [("metrics.jsonl", None), ("digests.jsonl", b"\xff\0{")]
)
def test_a_resume_reports_a_record_that_is_lost(
    here: Here, name: str, damage: bytes | None
) -> None:
    here.stopped(1, log_steps=1)
    path = here.path() / name
    path.unlink() if damage is None else path.write_bytes(damage)
    out = here.train(log_steps=1, resume="anyway")  # without it, digests.jsonl is needed
    assert f"{name} is missing or damaged: its entries up to step 1 are lost" in out


@pytest.mark.parametrize("damage", [None, b"half"])
def test_a_finished_run_reports_metrics_that_are_lost(here: Here, damage: bytes | None) -> None:
    here.train(epochs=2)
    path = here.path() / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert "are lost" not in here.train(epochs=2)
    path.unlink() if damage is None else path.write_bytes(b"".join(lines[:-1]))
    assert "metrics.jsonl is missing or damaged: its entries up to step" in here.train(epochs=2)


def test_a_resume_without_a_logged_step_reports_no_loss(here: Here) -> None:
    here.stopped(1)
    assert (here.path() / "metrics.jsonl").read_bytes() == b""
    assert "lost" not in here.train()


def test_a_validation_that_is_repeated_after_a_crash_is_logged_once(here: Here) -> None:
    """The checkpoint of `--checkpoint-steps` at an epoch's end is from before the epoch's
    validation.
    """
    settings: dict[str, Any] = {"checkpoint_steps": 6, "keep": 9, "best_by": "max:loss"}
    here.train(**settings)
    assert here.state(12)["progress"]["evaluated_step"] == 6
    whole = [(e["step"], e["loss"]) for e in here.entries("validation")]
    assert [step for step, _ in whole] == [6, 12, 18]
    for path in (here.path() / "checkpoints").glob("step-00000018*"):
        path.unlink()
    here.train(**settings)
    assert [(e["step"], e["loss"]) for e in here.entries("validation")] == whole


def test_metrics_with_numpy_numbers_can_be_resumed(here: Here) -> None:
    task = "tests.support.tiny:NumpyMetrics"
    here.stopped(8, task=task)
    assert here.entries("validation")[0]["step"] == 6  # so the state holds a metric
    here.train(task=task)
    assert len(here.entries("validation")) == 3


def test_unwritable_tensorboard_files_are_logged_once_and_training_continues(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        patch.setattr("trainer.records.event_file.EventFile.scalars", full)
        out = here.train(log_steps=1)
    assert out.count("TensorBoard's files cannot be written") == 1
    assert "training continues without them, and metrics.jsonl has all values" in out
    assert len(here.entries("train")) == 18
    assert len(here.entries("validation")) == 3
    assert "digest" in out
    here.train("other", log_steps=1)
    assert here.digest() == here.digest("other")


@pytest.mark.parametrize(
    ("blocked", "remedy"),
    [
        ("runs/r", "(a file is where a folder is needed): remove that file"),
        ("runs/r/checkpoints", "(a file is where a folder is needed): remove that file"),
        ("runs/r/lock", "(a folder is where a file is needed): remove that folder"),
    ],
)
def test_an_unwritable_run_folder_is_refused_with_code_4_before_the_data_are_read(
    here: Here, blocked: str, remedy: str
) -> None:
    path = here.folder / blocked
    path.parent.mkdir(parents=True, exist_ok=True)
    if blocked.endswith("lock"):
        path.mkdir()
    else:
        path.write_text("a file instead of a folder")
    err = here.refused(*_AGAIN, code=4, silent=True)  # before any data was read
    assert err.startswith(f"trainbox: cannot write {blocked}")
    assert f"{remedy}, or choose another folder with --runs-dir" in err


@pytest.mark.parametrize("text", ["{", '{"no_such_setting": 1}', "null"])
def test_a_damaged_config_json_is_reported(here: Here, text: str) -> None:
    here.path().mkdir(parents=True)
    (here.path() / "config.json").write_text(text)
    err = here.refused("train", TINY, "--device", "cpu", "--run", "r")
    assert re.match(r"trainbox: runs/r/config.json (cannot be read|is not a configuration) \(", err)
    assert "restore it" in err


def test_the_heartbeat_file_is_touched(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINBOX_HEARTBEAT", str(here.folder / "alive"))
    here.train(max_steps=2)
    assert (here.folder / "alive").exists()


# fmt: off
_SETTINGS_AND_MESSAGE = [
    ({"batch_size": 51},
     "--batch-size 51 is larger than the training set (50 examples): use at most 50"),
    ({"batch_size": 7, "shards": 4, "accumulation": 2},
     "--batch-size 7 is smaller than 4 shards x 2 accumulation, so a micro-batch would be "),
    ({"fields": {"wide": "3"}},
     "--set wide=3: task tests.support.tiny:Tiny has no field wide: it has nan_at, noise"),
]
# fmt: on


@pytest.mark.parametrize(("settings", "message"), _SETTINGS_AND_MESSAGE)
def test_settings_that_the_task_cannot_use_are_reported(
    here: Here, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(WrongUse, match=re.escape(message)):
        here.train(**settings)


def test_the_whole_set_as_one_batch_is_fine(here: Here) -> None:
    here.train(batch_size=50, epochs=2)
    assert here.steps() == [1, 2]


def test_resume_never_refuses_a_run_that_has_a_checkpoint(here: Here) -> None:
    here.train(epochs=1, resume="never")
    with pytest.raises(WrongUse, match="runs/r has a checkpoint of step 6: choose another --run"):
        here.train(epochs=1, resume="never")


def test_a_checkpoint_of_another_model_is_refused(here: Here) -> None:
    class Wider(Tiny):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(5, 1)

    here.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "Tiny", Wider)
        with pytest.raises(WrongUse, match=r"optimizer \(forwards: shape \(\) -> missing\): undo"):
            here.train()


_AGAIN = ("train", TINY, "--device", "cpu", "--run", "r")


# fmt: off
_ENTRIES = [
    ("sources", {"tests.support.tiny": "0" * 64},
     "sources.tests.support.tiny: 000000000000... -> "),
    ("data", {"train": "a", "validation": "b"}, "data.train: a -> "),
    ("threads", 77, "threads: 77 -> "),
]
# fmt: on


@pytest.mark.parametrize(("entry", "value", "named"), _ENTRIES)
def test_a_complete_run_of_another_task_or_other_data_is_refused(
    here: Here, entry: str, value: Any, named: str
) -> None:
    here.train()
    here.edit("manifest.json", **{entry: value})
    before = files_of(here.path(), without="logs")
    err = here.refused(*_AGAIN)
    assert f"its task, data, software or hardware has changed since ({named}" in err
    assert "show the result with --resume anyway, or start a new run with another --run name" in err
    out = here.succeeds(*_AGAIN, "--resume", "anyway")
    assert f"changed since the run's start: {named}" in out
    assert "this run is complete: nothing is left to do" in out
    assert f"digest     {here.digest()}" in out
    assert files_of(here.path(), without="logs") == before


@pytest.mark.parametrize(("content", "finished"), [(None, True), (b"cut", False)])
def test_lost_best_weights_are_rewritten_from_their_checkpoint(
    here: Here, content: bytes | None, finished: bool
) -> None:
    here.train("undisturbed", best_by="max:loss")  # the first validation's
    if finished:
        here.train(best_by="max:loss")
    else:
        here.stopped(8, best_by="max:loss")
    weights = here.path() / "model.safetensors"
    weights.unlink()
    if content is not None:
        weights.write_bytes(content)
    out = here.train(best_by="max:loss")
    assert "missing, damaged or of another step: rewritten from the checkpoint of step 6" in out
    before, after = load_file(here.path("undisturbed") / "model.safetensors"), load_file(weights)
    assert {name: tensor.tolist() for name, tensor in after.items()} == {
        n: t.tolist() for n, t in before.items()
    }


def test_a_complete_run_without_its_best_weights_fails(here: Here) -> None:
    here.train(best_by="max:loss")
    (here.path() / "model.safetensors").unlink()
    for path in (here.path() / "checkpoints").glob("step-00000006.*"):
        path.unlink()
    err = here.refused(*_AGAIN, code=4)
    assert "so is the checkpoint of the best step 6 (its sidecar cannot be used: No such fi" in err


def test_a_complete_run_without_its_manifest_needs_resume_anyway(here: Here) -> None:
    here.train()
    (here.path() / "manifest.json").unlink()
    err = here.refused(*_AGAIN)
    assert "runs/r/manifest.json is missing or damaged" in err
    out = here.succeeds(*_AGAIN, "--resume", "anyway")
    assert "it is unknown what this run was trained with" in out
    assert not (here.path() / "manifest.json").exists()


def test_a_complete_run_cannot_be_extended(here: Here) -> None:
    here.train()
    for arguments, changed in (
        (("--epochs", "6"), "epochs: 3 -> 6"),
        (("--max-steps", "60"), "epochs: 3 -> None; max_steps: None -> 60"),
    ):
        err = here.refused(*_AGAIN, *arguments)
        assert f"runs/r was started with other settings ({changed}): use the old values, or" in err


@pytest.mark.parametrize(("file", "steps"), [("config.json", 5), ("manifest.json", 99)])
def test_a_setting_edited_by_hand_is_refused_with_the_difference(
    here: Here, file: str, steps: int
) -> None:
    if steps == 99:
        here.train()
    else:
        here.stopped(steps)
    edited = {"learning_rate": 0.5}
    if file == "manifest.json":
        edited = {"settings": here.json(file)["settings"] | edited}
    here.edit(file, **edited)
    before = files_of(here.path(), without="logs")
    for arguments in ((), ("--resume", "anyway")):
        err = here.refused(*_AGAIN, *arguments)
        assert "runs/r were changed after its start (settings.learning_rate: 0." in err
        assert "0.05" in err and "0.5" in err
        assert "undo the change in config.json (manifest.json has the old values)" in err
    assert files_of(here.path(), without="logs") == before


@pytest.mark.slow
def test_a_training_that_is_killed_before_any_replacement_of_a_file_resumes(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_before(number: int) -> bool:
        """Train in a fork that kills itself before it replaces file `number`."""
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        replacements, replace = itertools.count(), Path.replace

        def kill_or_replace(path: Path, target: Path) -> Path:
            if next(replacements) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return replace(path, target)

        try:
            monkeypatch.setattr(Path, "replace", kill_or_replace)
            here.train(max_steps=2, checkpoint_steps=1)
        finally:
            os._exit(0)

    here.train("clean", max_steps=2, checkpoint_steps=1)
    numbers = 0
    while killed_before(numbers):
        here.train(max_steps=2, checkpoint_steps=1)
        assert here.digest() == here.digest("clean"), numbers
        shutil.rmtree(here.path())
        numbers += 1
    assert numbers > 8


def test_a_run_without_its_config_json_resumes(here: Here) -> None:
    here.stopped(5)
    path = here.path() / "config.json"
    before = path.read_text()
    path.unlink()
    assert "resume     from step 5" in here.train()
    assert path.read_text() == before


def _stop_at_5(here: Here) -> Path:
    here.stopped(5, checkpoint_steps=1, log_steps=1)
    assert here.steps() == [3, 4, 5]
    return here.path() / "checkpoints"


def test_a_run_without_its_checkpoint_folder_does_not_restart(here: Here) -> None:
    shutil.rmtree(_stop_at_5(here))
    for arguments in ((), ("--resume", "anyway"), ("--resume", "never")):
        err = here.refused(*_AGAIN, *arguments, code=4)
        assert "but this run has saved some (first_checkpoint.json exists): restore" in err
    assert len(here.entries("train")) == 5
    here.succeeds(*_AGAIN[:-1], "other", "--resume", "never")


def test_a_missing_sidecar_is_reported_and_the_previous_checkpoint_is_used(here: Here) -> None:
    folder = _stop_at_5(here)
    (folder / "step-00000005.json").unlink()
    (folder / "step-00000099.pt.tmp").write_bytes(b"left by a crash")
    out = here.train()
    assert not list(folder.glob("*.tmp"))
    assert "(its sidecar step-00000005.json is missing): set aside, using step 4\n" in out
    assert "resume     from step 4" in out
    here.train("undisturbed")
    assert here.digest() == here.digest("undisturbed")


def test_a_run_without_a_checkpoint_restarts_and_logs_it(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SIGKILL leaves no time to save a checkpoint."""
    from trainer.loop.saving import Saving

    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Saving, "save_and_stop", killed)
        with pytest.raises(Killed):
            here.train(stop=StopAfter(4), log_steps=1)
    assert here.steps() == []
    out = here.train(log_steps=1)
    assert "stopped after step 4, before its first checkpoint: it restarts at step 0\n" in out
    assert [entry["step"] for entry in here.entries("train")] == list(range(1, 19))
    # The digests and the manifest belong to the new start, whose id the checkpoints have.
    steps = {entry["step"] for entry in here.digests()}
    assert steps == {0, 6, 12, 18}
    described = here.json("manifest.json")
    assert described["run_id"] == here.json("checkpoints/step-00000018.json")["run_id"]
    assert "resumes" not in described


@pytest.mark.parametrize(
    "name",
    ["config.json", "manifest.json", "metrics.jsonl", "digests.jsonl", "lock", "logs/rank-0.log"],
)
def test_a_fifo_in_a_runs_folder_is_an_error_at_once(here: Here, name: str) -> None:
    here.stopped(2)
    path = here.path() / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    code, _, err = here.command(*_AGAIN)
    assert code in (2, 4)
    assert name in err
    assert err.count("\n") == 1


def test_a_task_that_calls_sys_exit_has_not_trained(here: Here) -> None:
    err = here.refused(
        "train", "tests.trainer.sweep.tasks:Exits", "--device", "cpu", "--set", "how=0", code=1
    )
    assert re.search(r"called sys.exit\(0\) in build_model \(.*tasks.py, line \d+\): ", err)


def test_a_task_that_calls_sys_exit_at_import_is_reported(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(here.folder)
    (here.folder / "leaves.py").write_text("import sys\nsys.exit()\n", encoding="utf-8")
    (here.folder / "exits.py").write_text("exit()\n", encoding="utf-8")
    for name in ("leaves", "exits"):
        err = here.refused("tasks", f"{name}:Leaves", code=1, silent=True)
        assert "the task called sys.exit() in <module> (" in err
        assert f"{name}.py, line " in err


def test_a_run_and_a_sweep_do_not_share_a_folder(here: Here) -> None:
    here.train("a", max_steps=1)
    sweep = ("sweep", TINY, "--device", "cpu", "--seeds", "1", "--name", "a")
    assert here.refused(*sweep) == "trainbox: runs/a is a run: choose another --name\n"
    Path("runs/a/config.json").rename("runs/a/study.journal")
    err = here.refused("train", TINY, "--device", "cpu", "--run", "a", "--max-steps", "1")
    assert err == "trainbox: runs/a is a sweep: choose another --run name\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "digests.jsonl", "model.safetensors"])
def test_a_folder_that_is_not_a_run_keeps_its_files(here: Here, name: str) -> None:
    folder = here.folder / "runs/r"
    folder.mkdir(parents=True)
    (folder / name).write_text("mine")
    (folder / "notes.txt").write_text("mine")
    err = here.refused("train", TINY, "--device", "cpu", "--run", "r", "--max-steps", "1")
    assert f"runs/r is not a run, and its {name} would be replaced: choose another --run" in err
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        name: "mine",
        "notes.txt": "mine",
    }


@pytest.mark.slow
def test_a_training_ends_its_loader_workers(here: Here) -> None:
    """The garbage collector could free their queues first, and they would wait forever."""
    here.rehearses = True
    make_pictures(here.folder / "data/shapes", ("cross", "disc"), 30, seed=0)
    fields = {"folder": "shapes", "model": "shufflenet_v2_x0_5", "size": 32}
    here.train(task="images", fields=fields, batch_size=4, max_steps=1, workers=1)
    assert here.workers_left == []
