"""The template of a script's arguments, what it reports, and the launch of one trial."""

import json
import math
import shlex
from pathlib import Path

import pytest

from trainbox.contract.config import Config
from trainbox.contract.errors import WrongUse
from trainer.sweep.grid import Range, Sweep, from_identity
from trainer.sweep.reports import Reports, parse
from trainer.sweep.results import figure, rows
from trainer.sweep.script import Script, check_template
from trainer.sweep.trials import Record, Trial
from trainer.sweep.work import again, run_command, run_environment, script_work, task_work


def script(*template: str, name: str = "train.py", is_module: bool = False) -> Script:
    return Script(name, is_module, template)


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        (["--lr", "{lr}", "--seed={seed}"], ["--lr", "1e-3", "--seed=7"]),
        (["{lr}{lr}-{seed}"], ["1e-31e-3-7"]),
        (["--out", "{run}/out"], ["--out", "{run}/out"]),
        (["ckpt-{{epoch}}", "${{hydra.job}}"], ["ckpt-{epoch}", "${hydra.job}"]),
        (['{"a": {"b": 1}}', "{}", "{ lr }", "{0}"], ['{"a": {"b": 1}}', "{}", "{ lr }", "{0}"]),
    ],
)
def test_placeholders_are_replaced_and_other_braces_stay(
    template: list[str], arguments: list[str]
) -> None:
    assert script(*template).arguments({"lr": "1e-3", "seed": 7}) == arguments


@pytest.mark.parametrize(
    ("template", "seeds", "message"),
    [
        (
            ["--lr", "{lr}", "--wd", "{wd}"],
            1,
            "{wd} in the arguments after -- has no values: add --grid wd=A,B,C, or write {{wd}} "
            "if the script gets the braces",
        ),
        (
            ["--out", "{run}"],
            1,
            "--grid lr=...: {lr} is missing in the arguments after --: add it, as in -- --lr {lr}",
        ),
        (
            ["--lr", "{lr}"],
            3,
            "--seeds 3 would repeat the same command: add {seed} to the arguments after --, as in "
            "-- --seed {seed}",
        ),
    ],
)
def test_values_and_placeholders_must_match(template: list[str], seeds: int, message: str) -> None:
    with pytest.raises(WrongUse) as refused:
        check_template(script(*template), ["lr"], [], seeds)
    assert str(refused.value) == message


def test_seed_and_run_cannot_have_other_values() -> None:
    check_template(script("{lr}", "{width}", "{seed}", "{run}"), ["lr"], ["width"], 2)
    for name, meaning in (("seed", "a seed of --seeds"), ("run", "the trial's folder")):
        with pytest.raises(WrongUse, match=rf"--range {name}=...: \{{{name}\}} is {meaning}: "):
            check_template(script(f"{{{name}}}"), [], [name], 1)


@pytest.mark.parametrize(
    ("name", "is_module", "label"),
    [
        ("project/train.py", False, "train"),
        ("my_package.train", True, "train"),
        ("./run it!.sh", False, "run-it"),
        (".py", False, "py"),
        ("äö.py", False, "script"),
    ],
)
def test_the_folder_has_the_name_of_the_script(name: str, is_module: bool, label: str) -> None:
    sweep = Sweep(script(name=name, is_module=is_module))
    assert sweep.default_name == f"{label}-sweep-{sweep.fingerprint()}"


def test_a_stored_sweep_of_a_script_is_read_again() -> None:
    sweep = Sweep(
        Script("train.py", False, ("--lr", "{lr}"), seed=5),
        {"width": ["8", "16"]},
        {"lr": Range(1e-4, 0.1, log=True)},
        sampler="tpe",
        trials=3,
        metric="max:accuracy",
    )
    stored = json.loads(json.dumps(sweep.identity()))
    assert from_identity(stored).config == sweep.config
    assert from_identity(stored).identity() == sweep.identity()
    assert from_identity(Sweep(Config(task="mnist")).identity()).config == Config(task="mnist")


@pytest.mark.parametrize(
    ("entry", "report"),
    [
        ({"step": 3, "loss": 0.5, "n": 2}, (3, {"loss": 0.5, "n": 2})),
        ({"kind": "train", "step": 0, "time_unix_s": 1.5}, (0, {})),
        ({"step": 1, "ok": True, "name": "a", "each": [1], "huge": 10**400}, (1, {})),
        ({"kind": "health", "step": 3, "loss": 0.5}, None),
        ({"kind": "gpus", "step": 3, "energy_kwh": 0.5}, None),
        ({"loss": 0.5}, None),
        ({"step": 1.5, "loss": 0.5}, None),
        ({"step": True, "loss": 0.5}, None),
    ],
)
def test_a_report_is_an_object_with_a_step(
    entry: dict[str, object], report: tuple[int, dict[str, float]] | None
) -> None:
    assert parse(entry) == report


def reported(path: Path, metric: tuple[str, str] | None, *entries: dict[str, object]) -> Reports:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    reports = Reports(path, metric)
    reports.read()
    return reports


def test_the_result_is_the_best_report_beside_the_newest_values(tmp_path: Path) -> None:
    entries: list[dict[str, object]] = [
        {"step": 1, "accuracy": 0.8, "loss": 0.3},
        {"step": 2, "accuracy": 0.9, "loss": 0.2},
        {"step": 3, "accuracy": 0.7, "loss": 0.1},
        {"step": 3, "samples": 100},
    ]
    path = tmp_path / "m"
    best = {"accuracy": 0.9, "loss": 0.2, "samples": 100}
    assert reported(path, ("max", "accuracy"), *entries).result() == best
    worst = {"accuracy": 0.7, "loss": 0.1, "samples": 100}
    assert reported(path, ("min", "accuracy"), *entries).result() == worst
    assert reported(path, None, *entries).result() == worst
    assert reported(path, ("max", "f1"), *entries).result() is None
    assert reported(path, ("max", "f1"), *entries).names() == ["accuracy", "loss", "samples"]


def test_a_repeated_step_replaces_its_report_and_a_lost_one_at_the_end_counts(
    tmp_path: Path,
) -> None:
    again: list[dict[str, object]] = [{"step": 1, "loss": 0.1}, {"step": 1, "loss": 0.4}]
    assert reported(tmp_path / "m", ("min", "loss"), *again).result() == {"loss": 0.4}
    diverged: list[dict[str, object]] = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": math.nan}]
    result = reported(tmp_path / "m", ("min", "loss"), *diverged).result()
    assert result is not None
    assert math.isnan(result["loss"])
    recovered = [*diverged, {"step": 3, "loss": 0.2}]
    assert reported(tmp_path / "m", ("min", "loss"), *recovered).result() == {"loss": 0.1}


def test_only_new_and_complete_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reports = Reports(path, ("min", "loss"))
    assert reports.read() == []
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo')
    assert reports.read() == [(1, {"loss": 2})]
    assert reports.read() == []
    with path.open("a") as file:
        file.write('ss": 1}\n')
    assert reports.read() == [(2, {"loss": 1})]
    path.write_text('{"step": 9, "loss": 4}\n')  # the script has replaced the file
    assert reports.read() == [(9, {"loss": 4})]


_TRIAL = Trial(0, 12, {"lr": "1e-3"}, 7, 0)


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cuda", ["--gpus", "1"]),
        ("cpu", ["--device", "cpu"]),
        ("mps", ["--device", "mps"]),
    ],
)
def test_a_trial_is_one_process_on_the_device_of_its_slot(device: str, options: list[str]) -> None:
    run = Path("runs/s/trial-00012")
    command = run_command(script("--lr", "{lr}", "--seed", "{seed}"), _TRIAL, run, device)
    assert command[1:6] == ["-P", "-m", "entrypoint", "run", "--trial"]
    begin = command.index("--nnodes") + 2
    assert command[begin : begin + 2] == options
    assert command[begin + 2 :] == [
        *("--runs-dir", "runs/s", "--run", "trial-00012", "train.py"),
        *("--", "--lr", "1e-3", "--seed", "7"),
    ]
    module = run_command(script(name="my.train", is_module=True), _TRIAL, run, device)
    assert module[-3:] == ["-m", "my.train", "--"]


def test_the_order_has_the_log_of_the_script_and_the_limits() -> None:
    sweep = Sweep(script("{seed}"), metric="max:accuracy", pruner="median")
    order = script_work(sweep, "cpu", 1.5).order(_TRIAL, Path("runs/s/t"))
    assert order.pop("command")
    assert order == {
        "run": "runs/s/t",
        "log": "runs/s/t/logs/rank-0.log",
        "metric": "max:accuracy",
        "pruned": True,
        "trial_minutes": 1.5,
    }
    assert script_work(sweep, "cpu", None).worker != task_work(Sweep(Config()), Path(), True).worker


def test_a_trial_has_no_settings_of_the_sweep_and_of_the_scheduler() -> None:
    kept = {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "GPU-a", "OMP_NUM_THREADS": "2"}
    dropped = {
        "GPUS": "4",
        "GPU_IDS": "0,2",
        "PROCESSES": "4",
        "DEVICE": "cpu",
        "NNODES": "2",
        "TRAINBOX_LAUNCH": "{}",
        "TRAINBOX_FINISHED": "f",
        "SLURM_PROCID": "1",
    }
    assert run_environment(kept | dropped) == kept


def test_the_best_trial_is_repeated_by_a_command_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRAINBOX_COMMAND", raising=False)
    sweep = Sweep(script("--lr", "{lr}", "--seed", "{seed}", "--out", "{run}"))
    record = Record(3, "done", {"lr": "1e-3"}, 7)
    arguments = ["--lr", "1e-3", "--seed", "7", "--out", "{run}"]
    for gpus, device in ((None, []), (1, ["--gpus", "1"]), (0, ["--device", "cpu"])):
        line = again(sweep, record, Path("runs/s"), gpus)
        run = ["trainbox", "run", *device, "--run", "s-best", "train.py", "--", *arguments]
        assert shlex.split(line) == run


def test_values_that_are_numbers_in_text_have_a_number_axis() -> None:
    records = [
        Record(n, "done", {"lr": lr}, 0, {"loss": 1.0}) for n, lr in enumerate(("1e-3", "0.1"))
    ]
    for drawn in (False, True):
        (axes,) = figure(rows(records, "loss"), records, "loss", drawn).axes
        low, high = axes.dataLim.intervalx
        assert (low, high) == pytest.approx((1e-3, 0.1))
