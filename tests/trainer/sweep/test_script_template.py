"""The template of a script's arguments, what it reports, and the launch of one trial."""

import contextlib
import json
import math
import shlex
from pathlib import Path

import pytest

from trainbox.errors import WrongUse
from trainbox.options.config import Config
from trainbox.options.run_name import short_digest
from trainer.records.event_file import EventFile
from trainer.sweep.grid import Range, Record, Sweep, Trial, from_identity
from trainer.sweep.reports import JsonLines, Output, Report, Reports, TensorBoard, parse
from trainer.sweep.script_template import Script, check_regex, check_template, not_reported
from trainer.sweep.trial_work import again, run_command, run_environment


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


# fmt: off
_TEMPLATES = [
    (["--lr", "{lr}", "--wd", "{wd}"], 1, "{wd} in the arguments after -- has no values: add "
     "--grid wd=A,B,C, or write {{wd}} if the script gets the braces"),
    (["--out", "{run}"], 1,
     "--grid lr=...: {lr} is missing in the arguments after --: add it, as in -- --lr {lr}"),
    (["--lr", "{lr}"], 3, "--seeds 3 would repeat the same command: add {seed} to the arguments "
     "after --, as in -- --seed {seed}"),
]
# fmt: on


@pytest.mark.parametrize(("template", "seeds", "message"), _TEMPLATES)
def test_values_and_placeholders_must_match(template: list[str], seeds: int, message: str) -> None:
    with pytest.raises(WrongUse) as refused:
        check_template(script(*template), ["lr"], [], seeds)
    assert str(refused.value) == message


def test_seed_and_run_cannot_have_other_values() -> None:
    check_template(script("{lr}", "{width}", "{seed}", "{run}"), ["lr"], ["width"], 2)
    for name, meaning in (("seed", "a seed of --seeds"), ("run", "the trial's folder")):
        with pytest.raises(WrongUse, match=rf"--range {name}=...: \{{{name}\}} is {meaning}: "):
            check_template(script(f"{{{name}}}"), [], [name], 1)


def test_a_stored_sweep_of_a_script_is_read_again() -> None:
    sweep = Sweep(
        Script("train.py", False, ("--lr", "{lr}"), seed=5),
        {"width": ["8", "16"]},
        {"lr": Range(1e-4, 0.1, log=True)},
        sampler="tpe",
        trials=3,
        metric="max:accuracy",
    )
    assert sweep.default_name == f"train-sweep-{short_digest(sweep.identity())}"
    stored = json.loads(json.dumps(sweep.identity()))
    assert from_identity(stored).config == sweep.config
    assert from_identity(stored).identity() == sweep.identity()
    assert from_identity(Sweep(Config(task="mnist")).identity()).config == Config(task="mnist")


@pytest.mark.parametrize(
    ("entry", "report"),
    [
        ({"step": 3, "loss": 0.5, "n": 2}, (3, {"loss": 0.5, "n": 2})),
        ({"step": 3, "loss": None}, (3, {"loss": pytest.approx(math.nan, nan_ok=True)})),
        ({"kind": "train", "step": 0, "time_unix_s": 1.5}, (0, {})),
        ({"step": 1, "ok": True, "name": "a", "each": [1], "huge": 10**400}, (1, {})),
        ({"kind": "health", "step": 3, "loss": 0.5}, None),
        ({"kind": "gpus", "step": 3, "gpu_utilization_percent": 0.5}, None),
        ({"loss": 0.5}, None),
        ({"step": 1.5, "loss": 0.5}, None),
        ({"step": True, "loss": 0.5}, None),
    ],
)
def test_a_report_is_an_object_with_a_step(
    entry: dict[str, object], report: tuple[int, dict[str, float]] | None
) -> None:
    assert parse(entry) == report


def reported(run: Path, metric: tuple[str, str] | None, *entries: dict[str, object]) -> Reports:
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    reports = Reports(JsonLines(run), metric)
    reports.read()
    return reports


def test_the_result_is_the_best_report_beside_the_newest_values(tmp_path: Path) -> None:
    entries: list[dict[str, object]] = [
        {"step": 1, "accuracy": 0.8, "loss": 0.3},
        {"step": 2, "accuracy": 0.9, "loss": 0.2},
        {"step": 3, "accuracy": 0.7, "loss": 0.1},
        {"step": 3, "samples": 100},
    ]
    path = tmp_path
    best = {"accuracy": 0.9, "loss": 0.2, "samples": 100}
    assert reported(path, ("max", "accuracy"), *entries).result() == best
    worst = {"accuracy": 0.7, "loss": 0.1, "samples": 100}
    assert reported(path, ("min", "accuracy"), *entries).result() == worst
    assert reported(path, None, *entries).result() == worst
    assert not reported(path, ("max", "f1"), *entries).is_found
    assert reported(path, ("max", "f1"), *entries).newest == worst


def test_a_repeated_step_replaces_its_report_and_a_lost_one_at_the_end_counts(
    tmp_path: Path,
) -> None:
    again: list[dict[str, object]] = [{"step": 1, "loss": 0.1}, {"step": 1, "loss": 0.4}]
    assert reported(tmp_path, ("min", "loss"), *again).result() == {"loss": 0.4}
    diverged: list[dict[str, object]] = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": math.nan}]
    result = reported(tmp_path, ("min", "loss"), *diverged).result()
    assert math.isnan(result["loss"])
    recovered = [*diverged, {"step": 3, "loss": 0.2}]
    assert reported(tmp_path, ("min", "loss"), *recovered).result() == {"loss": 0.1}


def test_the_last_match_in_the_output_is_the_result(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("acc: 1.0 of an earlier attempt\n")
    at = Output(log, log.stat().st_size, "acc", r"acc: (\S+)")
    reports = Reports(at, ("max", "acc"), last=True)
    assert reports.read() == []
    with log.open("a") as file:
        file.write("acc: 0.9 acc: n/a\racc: 0.8\nacc: 0.")
    assert reports.read() == [(1, {"acc": 0.9}), (2, {"acc": 0.8}), (3, {"acc": 0.0})]
    with log.open("a") as file:
        file.write("7")  # the last line has no end
    assert reports.read() == [(3, {"acc": 0.7})]
    assert reports.result() == {"acc": 0.7}
    log.write_text("acc: 0.6\n")  # the log was full
    assert reports.read() == [(3, {"acc": 0.6})]


def test_a_match_can_have_a_step(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("10/100 loss 0.5\n20/100 loss nan\n")
    for pattern in (r"(?P<step>\d+)/\d+ loss (\S+)", r"(?P<step>\d+)/\d+ loss (?P<x>\S+)"):
        reports = Reports(Output(tmp_path / "log", 0, "loss", pattern), ("min", "loss"), last=True)
        assert [step for step, _ in reports.read()] == [10, 20]
        assert math.isnan(reports.result()["loss"])
    assert Reports(Output(tmp_path / "none", 0, "a", "(a)"), ("max", "a")).read() == []


@pytest.mark.parametrize(
    ("pattern", "goal", "message"),
    [
        ("acc: (", ("max", "acc"), "--metric-regex acc: (: missing ), unterminated subpattern at "),
        ("acc", ("max", "acc"), "--metric-regex acc must have one group, which is the number: "),
        (r"(\d+)/(\d+)", ("max", "a"), r"--metric-regex (\d+)/(\d+) must have one group, which"),
        (r"(?P<step>\d+)", ("max", "a"), r"--metric-regex (?P<step>\d+) must have one group, "),
        ("acc: (.+)", None, "--metric-regex acc: (.+): the number has no name: add --metric, as "),
    ],
)
def test_a_wrong_regex_is_refused(pattern: str, goal: tuple[str, str] | None, message: str) -> None:
    with pytest.raises(WrongUse) as refused:
        check_regex(pattern, goal)
    assert str(refused.value).startswith(message)


def board(folder: Path, *values: dict[str, float]) -> None:
    with contextlib.closing(EventFile(folder)) as file:
        for step, scalars in enumerate(values, 1):
            file.scalars(scalars, step)


def read_board(run: Path, earlier: TensorBoard | None = None) -> list[Report]:
    run.mkdir(parents=True, exist_ok=True)
    return (earlier or TensorBoard(run)).read()


def test_tags_in_several_folders_have_the_name_of_their_folder(tmp_path: Path) -> None:
    run = tmp_path / "runs/trial"
    board(run / "logs/train", {"acc": 0.75, "lr": 1.0}, {"lr": 0.5})
    board(run / "work/logs/validation", {"acc": 0.5})
    assert read_board(run) == [
        (1, {"train/acc": 0.75, "validation/acc": 0.5, "lr": 1.0}),
        (2, {"lr": 0.5}),
    ]


def test_a_script_that_starts_again_may_write_to_another_folder(tmp_path: Path) -> None:
    run = tmp_path / "runs/trial"
    board(run / "version_0", {"acc": 0.75, "lr": 1.0})
    again = TensorBoard(run)
    assert read_board(run, earlier=again) == [(1, {"acc": 0.75, "lr": 1.0})]
    board(run / "version_1", {"acc": 0.5})
    assert read_board(run, earlier=again) == [(1, {"acc": 0.5, "lr": 1.0})]


def test_a_damaged_file_of_scalars_ends_at_the_damage(tmp_path: Path) -> None:
    run = tmp_path / "runs/trial"
    board(run, {"acc": 0.5}, {"acc": 0.75})
    (file,) = run.iterdir()
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)
    (run / "events.out.tfevents.1.h.1.0").write_bytes(b"x")
    assert read_board(run) == [(1, {"acc": 0.5})]


# fmt: off
_REGEXS = [
    (None, ("max", "acc"), ["f1", "loss"],
     ["the script has reported no acc (but f1, loss): print ", '"acc": 0.5}', "TensorBoard"]),
    (None, ("max", "acc"), [], ["reported no acc: ", "output with --metric-regex 'acc: ("]),
    (None, None, [], ["reported no number: ", "with --metric accuracy --metric-regex"]),
    (None, None, [], ["if the trials have no metric, add --metric none"]),
    ("a: (.)", ("max", "a"), [], ["no number in the output matches --metric-regex a: (.): "]),
]
# fmt: on


@pytest.mark.parametrize(("regex", "goal", "metrics", "parts"), _REGEXS)
def test_the_message_about_a_missing_metric_has_three_ways_to_report_it(
    regex: str | None, goal: tuple[str, str] | None, metrics: list[str], parts: list[str]
) -> None:
    message = not_reported(Script("t.py", False, (), metric_regex=regex), goal, metrics)
    assert [part for part in parts if part not in message] == []


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
    resuming = Script("train.py", False, ("{lr}",), on_resume="--resume {run}/{lr}.pt")
    command = run_command(resuming, _TRIAL, run, device)
    assert command[begin + 2 : begin + 4] == ["--on-resume", "--resume {run}/1e-3.pt"]
    assert resuming.placeholders() == {"lr", "run"}
    module = run_command(script(name="my.train", is_module=True), _TRIAL, run, device)
    assert module[-3:] == ["-m", "my.train", "--"]


def test_a_trial_has_no_settings_of_the_sweep() -> None:
    kept = {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "GPU-a", "OMP_NUM_THREADS": "2"}
    dropped = {
        "GPUS": "4",
        "GPU_IDS": "0,2",
        "PROCESSES": "4",
        "DEVICE": "cpu",
        "NNODES": "2",
        "TRAINBOX_LAUNCH": "{}",
        "TRAINBOX_FINISHED": "f",
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
