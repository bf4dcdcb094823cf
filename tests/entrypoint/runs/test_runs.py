"""`trainbox runs` and `trainbox clean`: what a folder of runs shows, and what can go."""

import errno
import json
import math
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from entrypoint.cli.runs import clean
from entrypoint.runs.clean import leftovers
from entrypoint.runs.read import is_named, named_arguments, stored_runs
from entrypoint.runs.table import table
from tests.support.commands import Trainbox
from tests.support.leases import kill
from trainbox.files.sidecar import sidecar_text
from trainbox.folders.lease import Lease


def _run(folder: Path, end: Any = None, steps: int = 40, done: int = 40, **config: Any) -> Path:
    """Write the files of a training with four checkpoints, the first of them the best."""
    (folder / "checkpoints").mkdir(parents=True)
    settings = {"task": "digits", "fields": {}, "best_by": "max:accuracy", "seed": 0, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    manifest = {"steps": steps, "end": end, "run_id": "a run", "settings": settings}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": "train", "step": step}) + "\n" for step in range(1, done + 1))
    )
    saved = ((10, 0.75), (20, 0.5), (25, 0.5), (30, 0.5))
    (folder / "digests.jsonl").write_text(
        "".join(
            json.dumps({"kind": "checkpoint", "step": step, "saved": {}}) + "\n"
            for step, _ in saved
        )
    )
    for step, accuracy in saved:
        sidecar = {
            "run_id": "a run",
            "step": step,
            "best_step": 10,
            "metrics": {"accuracy": accuracy},
            "bytes": 1000,
        }
        (folder / f"checkpoints/step-{step:08d}.json").write_text(
            sidecar_text({"run_id": "a run", "sha256": sha256(bytes(1000)).hexdigest(), **sidecar})
        )
        (folder / f"checkpoints/step-{step:08d}.pt").write_bytes(bytes(1000))
    return folder


COMPLETE, STOPPED = {"code": 0, "message": ""}, {"code": 75, "message": "stopped by SIGTERM"}
FAILED = {"code": 6, "message": "the loss is not finite"}


def test_the_state_of_each_run(tmp_path: Path) -> None:
    ends = {"a": COMPLETE, "b": STOPPED, "c": FAILED, "d": None, "e": None}
    for name, end in ends.items():
        _run(tmp_path / name, end)
    for records in ((tmp_path / "e").glob("*/*"), [tmp_path / "e/metrics.jsonl"]):
        for path in records:
            path.unlink()
    (tmp_path / "of_another_program").mkdir()
    found = {run.name: (run.state, run.why) for run in stored_runs(tmp_path, False)}
    assert found == {
        "a": ("complete", ""),
        "b": ("stopped", ""),
        "c": ("failed", "the loss is not finite (6)"),
        "d": ("killed", ""),
        "e": ("not trained", ""),
    }
    Lease(tmp_path / "d")
    assert [run.state for run in stored_runs(tmp_path, False)][3] == "running"


def test_a_complete_run_with_truncated_metrics_says_so(tmp_path: Path) -> None:
    _run(tmp_path / "a", COMPLETE, done=25)
    with (tmp_path / "a/metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    (run,) = stored_runs(tmp_path, False)
    assert (run.state, run.why, run.step) == ("damaged", "metrics.jsonl ends at step 25", 30)


@pytest.mark.parametrize(
    ("name", "old", "new", "why"),
    [
        ("manifest.json", "}", "", "manifest.json cannot be read"),
        ("config.json", "}", "", "config.json cannot be read"),
        ("config.json", '"seed": 0', '"seed": 1', "config.json was edited (settings.seed: 0 -> 1)"),
        ("checkpoints/step-00000030.json", "0.5", "0.6", "step-00000030.json is damaged"),
        ("checkpoints/step-00000030.json", None, "sidecar", "step-00000030.json is of another run"),
        ("manifest.json", "a run", "b", "step-00000030.json is of another run"),
        ("config.json", None, "", "config.json is missing"),
        ("metrics.jsonl", None, "", "metrics.jsonl ends at step 0"),
    ],
)
def test_a_damaged_or_foreign_file_is_shown(
    tmp_path: Path, name: str, old: str | None, new: str, why: str
) -> None:
    path = _run(tmp_path / "r", COMPLETE) / name
    (tmp_path / "r/logs").mkdir()
    text = path.read_text()
    path.write_text(text.replace(old, new) if old else sidecar_text({"run_id": "of another"}))
    if not new and not old:
        path.unlink()
    (found,) = stored_runs(tmp_path, False)
    assert (found.state, found.why) == ("damaged", why)
    assert leftovers(found, tmp_path / "r") == []


def test_the_entry_of_a_checkpoint_is_found_before_large_entries(tmp_path: Path) -> None:
    digests = _run(tmp_path / "a", COMPLETE) / "digests.jsonl"
    with digests.open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 40, "tensors": "x" * 2**19}) + "\n")
    assert [run.state for run in stored_runs(tmp_path, False)] == ["complete"]


@pytest.mark.parametrize(
    ("codes", "is_left", "state", "why"),
    [
        (["killed"], True, "killed", ""),
        ([75, "killed"], True, "killed", ""),
        (["killed"], False, "killed", ""),  # a copy without the lease
        ([], False, "not trained", ""),
        ([75], False, "stopped", ""),
        ([130], False, "stopped", ""),
        ([138], False, "stopped", ""),
        ([143], False, "stopped", ""),
        ([137], False, "failed", "exit code 137"),
        ([1, 0], False, "complete", ""),
        ([None], False, "failed", "exit code None"),
    ],
)
def test_the_state_of_a_script(
    tmp_path: Path, codes: list[int | str | None], is_left: bool, state: str, why: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.json").write_text('{"kind": "script", "script": "train.py"}')
    starts = [{} if code == "killed" else {"exit_code": code} for code in codes]
    (tmp_path / "a/manifest.json").write_text(json.dumps({"kind": "script", "starts": starts}))
    if is_left:
        Lease(tmp_path / "a")
        kill(tmp_path / "a")
    (run,) = stored_runs(tmp_path, False)
    assert (run.state, run.why, run.is_script) == (state, why, True)


def test_the_setting_that_varies_most_is_first_and_names_are_whole(tmp_path: Path) -> None:
    for number in range(8):
        varied = {f"rare{i}": int(number == i) for i in range(7)} | {"width": number}
        _run(tmp_path / f"{'a' * 58}-{number}", COMPLETE, fields=varied)
    shown = table(list(stored_runs(tmp_path, False)), now_unix_s=0.0).splitlines()
    assert shown[0].split()[:4] == ["run", "task", "width", "rare0"]
    assert [line.split()[0] for line in shown[1:9]] == [f"{'a' * 58}-{n}" for n in range(8)]


def test_runs_in_the_folder_of_runs_names_the_option(forked: Any) -> None:
    _run(forked.folder / "a", COMPLETE)
    ended = forked("runs")
    assert ended.out == (
        "no runs in runs, which does not exist: the current folder has runs, and `trainbox runs "
        "--runs-dir .` lists them\n"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nope", "does not exist"),
        ("nope/below", "does not exist"),
        ("file/below", "cannot be read (Not a directory)"),
        ("empty", None),
    ],
)
def test_a_folder_of_runs_that_cannot_be_listed_is_named(
    forked: Trainbox, name: str, reason: str | None
) -> None:
    (forked.folder / "file").touch()
    (forked.folder / "empty").mkdir()
    where = f"{name}, which {reason}" if reason else name
    for words, text in (
        (("runs",), f"no runs in {where}"),
        (("runs", "--task", "text"), f"no runs of the task text in {where}"),
        (("clean", "--yes"), f"nothing to remove in {where}"),
    ):
        ended = forked(*words, "--runs-dir", name)
        assert (ended.code, ended.out, ended.err) == (0, f"{text}\n", "")
    listed = forked("runs", "--json", "--runs-dir", name)
    said = f"trainbox: no runs in {where}\n" if reason else ""
    assert (listed.code, listed.out, listed.err) == (0, "[]\n", said)


def test_json_has_neither_infinity_nor_nan(forked: Any) -> None:
    run = _run(forked.folder / "runs/a", COMPLETE, clip=math.inf, fields={"scale": math.nan})
    (run / "metrics.jsonl").write_text('{"step": 50, "loss": Infinity}\n')
    ended = forked("runs", "--json")
    (found,) = json.loads(ended.out, parse_constant=pytest.fail)
    settings = found["settings"]
    assert (found["step"], settings["clip"], settings["scale"]) == (50, None, None)
    assert forked("runs").code == 0


def test_a_folder_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    _run(runs / "b", COMPLETE)
    (runs / "a").mkdir()
    (runs / "a/study.journal").symlink_to("x" * 300)
    unreadable, whole = stored_runs(runs, False)
    assert (unreadable.state, unreadable.why) == ("unreadable", "File name too long")
    assert (whole.name, whole.state) == ("b", "complete")
    assert leftovers(unreadable, runs / "a") == []


def test_a_run_behind_a_link_is_listed(tmp_path: Path) -> None:
    _run(tmp_path / "large disk/a", COMPLETE)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/linked").symlink_to(tmp_path / "large disk/a")
    (run,) = stored_runs(tmp_path / "runs", False)
    assert (run.name, run.state, run.step) == ("linked", "complete", 40)


def test_an_entry_before_a_long_end_is_found(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", COMPLETE)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "gpus", "gpus": "x" * 30_000}) + "\n")
    assert [each.step for each in stored_runs(tmp_path, False)] == [40]


def test_names_cannot_colour_the_terminal(tmp_path: Path) -> None:
    _run(tmp_path / "a\n\033[31m", COMPLETE)
    shown = table(list(stored_runs(tmp_path, False)), 0.0)
    assert "\033" not in shown and len(shown.splitlines()) == 2


def test_the_table_has_only_the_settings_that_differ(tmp_path: Path) -> None:
    _run(tmp_path / "a", COMPLETE, learning_rate=0.1, optimizer="adamw")
    _run(tmp_path / "b", COMPLETE, learning_rate=0.2, optimizer="adamw", fields={"width": 8})
    _run(tmp_path / "c", COMPLETE, task="text", learning_rate=0.3, epochs=9)
    head, *rows = table(list(stored_runs(tmp_path, False)), 0.0).splitlines()
    assert head.split() == [
        "run",
        "task",
        "learning_rate",
        "width",
        "metric",
        "steps",
        "state",
        "age",
        "MB",
    ]
    assert [row.split()[:9] for row in rows] == [
        ["a", "digits", "0.1", "-", "best", "accuracy", "0.75", "40/40", "complete"],
        ["b", "digits", "0.2", "8", "best", "accuracy", "0.75", "40/40", "complete"],
        ["c", "text", "0.3", "-", "best", "accuracy", "0.75", "40/40", "complete"],
    ]


def test_a_sweep_is_one_row_or_its_trials(tmp_path: Path) -> None:
    for number, end in enumerate((COMPLETE, COMPLETE, FAILED)):
        _run(tmp_path / f"s/trial-{number:05d}", end)
    (tmp_path / "s/study.journal").touch()
    (sweep,) = stored_runs(tmp_path, trials=False)
    assert (sweep.task, sweep.step, sweep.steps) == ("sweep of digits", 2, None)
    assert sweep.metric == ("accuracy", 0.75)
    assert (sweep.state, sweep.why) == ("stopped", "1 trials have failed")
    (tmp_path / "s/results.csv").write_text("trial,state\n0,done\n1,pruned\n2,done\n3,done\n")
    (sweep,) = stored_runs(tmp_path, trials=False)
    assert (sweep.state, sweep.step, sweep.steps) == ("complete", 4, 4)
    (tmp_path / "s/results.csv").write_text("trial,state\n0,done\n1,waiting\n")
    (sweep,) = stored_runs(tmp_path, trials=False)
    assert (sweep.state, sweep.step, sweep.steps) == ("stopped", 1, 2)
    assert [run.name for run in stored_runs(tmp_path, trials=True)] == [
        f"s/trial-{number:05d}" for number in range(3)
    ]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", b"\xff{"),
        ("config.json", b'{"best_by": "min:"}'),
        ("manifest.json", b"{"),
        ("manifest.json", b'{"starts": [1], "steps": "x"}'),
        ("metrics.jsonl", b"\xff{"),
        ("checkpoints/step-00000010.json", b'{"best_step": 10, "metrics": null}'),
        ("checkpoints/step-00000030.json", b'{"best_step": 10, "metrics": [1]}'),
    ],
)
def test_a_damaged_file_hides_no_other_run(tmp_path: Path, file: str, text: bytes) -> None:
    for name in ("a", "b"):
        _run(tmp_path / name, COMPLETE)
    (tmp_path / "a" / file).write_bytes(text)
    table(list(stored_runs(tmp_path, False)), 0.0)
    assert "b" in [run.name for run in stored_runs(tmp_path, False)]


def _gone(folder: Path) -> list[str]:
    (run,) = stored_runs(folder.parent, False)
    return [
        str(path.relative_to(folder)) for found in leftovers(run, folder) for path in found.paths
    ]


def test_the_best_checkpoint_and_the_last_two_stay(tmp_path: Path) -> None:
    """The last one may have other bits than the records, so the one before may be needed."""
    folder = _run(tmp_path / "a", COMPLETE)
    files = [f"checkpoints/step-00000020.{suffix}" for suffix in ("pt", "json")]
    assert _gone(folder) == files
    for damaged in (bytes(10), bytes(999) + b"1"):
        (folder / "checkpoints/step-00000030.pt").write_bytes(damaged)
        assert _gone(folder) == []
    (folder / "checkpoints/step-00000025.json").unlink()
    assert _gone(folder) == []


@pytest.mark.parametrize("recorded", [3, 2, 1, 0])
def test_a_checkpoint_without_a_record_is_no_way_to_resume(tmp_path: Path, recorded: int) -> None:
    """Older checkpoints stay unless a training could resume from two newer ones."""
    folder = _run(tmp_path / "a", COMPLETE)
    lines = (folder / "digests.jsonl").read_text().splitlines(keepends=True)
    (folder / "digests.jsonl").write_text("".join(lines[:recorded]))
    assert _gone(folder) == []
    (folder / "digests.jsonl").write_text("".join([*lines[:1], lines[3]]))
    assert _gone(folder) == []


@pytest.mark.parametrize("end", [STOPPED, FAILED, None])
def test_a_run_that_can_resume_keeps_all_checkpoints(tmp_path: Path, end: Any) -> None:
    folder = _run(tmp_path / "a", end)
    assert _gone(folder) == []
    (folder / "rehearsal/checkpoints").mkdir(parents=True)
    assert _gone(folder) == ["rehearsal"]
    Lease(folder)
    assert _gone(folder) == []


def test_a_start_that_has_trained_nothing_can_go_but_not_its_model(tmp_path: Path) -> None:
    folder = _run(tmp_path / "a", FAILED)
    for file in (folder / "checkpoints").iterdir():
        file.unlink()
    assert _gone(folder) == []  # it has trained 40 steps
    (folder / "metrics.jsonl").unlink()
    assert _gone(folder) == ["."]
    (folder / "notes.txt").touch()
    assert _gone(folder) == []


def test_a_start_that_was_killed_early_can_go(tmp_path: Path) -> None:
    for name in ("checkpoints", "logs"):
        (tmp_path / "runs/a" / name).mkdir(parents=True)
    (tmp_path / "runs/a/lock").write_text("{}")
    (run,) = stored_runs(tmp_path / "runs", False)
    assert (run.name, run.task, run.state) == ("a", "?", "not trained")
    assert _gone(tmp_path / "runs/a") == ["."]


@pytest.mark.parametrize(
    ("entries", "metric"),
    [
        ([{"kind": "train", "step": 3, "time_unix_s": 9, "loss": 0.5}], ("loss", 0.5)),
        (
            [
                {"kind": "validation", "step": 2, "epoch": 1, "accuracy": 0.75},
                {"kind": "train", "step": 3, "loss": 0.5},
                {"kind": "gpus", "gpus": 1},
            ],
            ("accuracy", 0.75),
        ),
        ([{"step": 1, "name": "a", "ok": True, "loss": None, "error": 2}], ("error", 2.0)),
        ([{"step": 1}], None),
        ([], None),
    ],
)
def test_the_metric_of_a_script_is_its_newest_validation_or_entry(
    tmp_path: Path, entries: list[dict[str, Any]], metric: tuple[str, float] | None
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"kind": "script", "script": "train.py"}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))
    (run,) = stored_runs(tmp_path, False)
    assert run.metric == metric
    assert ("last" in table([run], 0.0)) is (metric is not None)


def test_the_folder_of_a_script_is_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"kind": "script", "script": "train.py"}))
    (folder / "manifest.json").write_text(json.dumps({"starts": [{"exit_code": 1}]}))
    (run,) = stored_runs(tmp_path, False)
    assert (run.task, run.state, run.why) == ("train.py", "failed", "exit code 1")
    assert _gone(folder) == []


def test_the_commands(trainbox: Any) -> None:
    _run(trainbox.folder / "runs/one", COMPLETE)
    _run(trainbox.folder / "runs/two", STOPPED, learning_rate=0.5)
    shown = trainbox("runs", "--sort", "name")
    assert [line.split()[0] for line in shown.out.splitlines()] == ["run", "one", "two"]
    listed = json.loads(trainbox("runs", "--json", "--task", "digits").out)
    assert {run["name"]: run["state"] for run in listed} == {"one": "complete", "two": "stopped"}
    assert trainbox("runs", "--task", "text").out == (
        "no runs of the task text in runs (it has runs of digits)\n"
    )
    before = sorted((trainbox.folder / "runs").rglob("*"))
    asked = trainbox("clean")
    assert "runs/one: an older checkpoint" in asked.out and "nothing was removed" in asked.out
    assert sorted((trainbox.folder / "runs").rglob("*")) == before
    assert trainbox("clean", "--yes").code == 0
    assert len(before) - len(sorted((trainbox.folder / "runs").rglob("*"))) == 2
    assert "nothing to remove" in trainbox("clean", "--yes").out
    missing = trainbox("runs", "--runs-dir", "nope")
    assert (missing.code, missing.out) == (0, "no runs in nope, which does not exist\n")


def test_a_task_is_named_by_its_class_or_its_file() -> None:
    task = "my_tasks/rings.py:Rings"
    for name in (task, "Rings", "my_tasks/rings.py", "rings.py", "rings"):
        assert is_named(task, name), name
    assert is_named("train.py", "train") and is_named("digits", "digits")
    assert not any(is_named(task, name) for name in ("my_tasks", "ring", "", "py"))
    assert is_named("sweep of digits", "digits") and is_named(f"sweep of a.py:A, {task}", "Rings")


def test_the_arguments_of_a_script_by_their_options() -> None:
    words = ["data", "--lr", "0.1", "--opt", "a=1", "--opt", "b=2", "--n=3", "-v", "--fast"]
    assert named_arguments(words) == {
        "argument 1": "data",
        "lr": "0.1",
        "opt": "a=1 b=2",
        "n": "3",
        "v": "yes",
        "fast": "yes",
    }


def _script_run(folder: Path, arguments: list[str], *entries: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    config = {"kind": "script", "script": "train.py", "arguments": arguments}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(json.dumps({"starts": [{"exit_code": 0}]}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))


def test_runs_of_scripts_are_compared_by_arguments_and_last_metrics(forked: Trainbox) -> None:
    loss = [{"kind": "train", "step": step, "loss": 1 / step} for step in (1, 2)]
    validation = {"kind": "validation", "step": 2, "accuracy": 0.75}
    runs = forked.folder / "runs"
    _script_run(runs / "a", ["--lr", "0.1", "--fast", "--token", "s3cret"], *loss, validation)
    _script_run(runs / "b", ["--lr=0.2", "--token", "other", "data", "-0.5"], *loss)
    out = forked("compare", "runs/a", "runs/b").out
    assert [line.split() for line in out.splitlines()] == [
        ["a", "b"],
        ["arguments"],
        ["lr", "0.1", "0.2"],
        ["fast", "yes", "-"],
        ["argument", "1", "-", "data"],
        ["argument", "2", "-", "-0.5"],
        ["state", "complete", "complete"],
        ["last", "metrics"],
        ["loss", "0.5", "0.5"],
        ["validation", "accuracy", "0.75", "-"],
    ]
    _run(runs / "task", COMPLETE)
    for words, text in (
        (("runs/a", "runs/task"), "compare runs/a: this is a run of a script, and another one is"),
        (("runs/a",), "compare needs two different runs: give their folders"),
        (("runs/a", "runs/c"), "compare runs/c: the folder does not exist: "),
    ):
        ended = forked("compare", *words)
        assert (ended.code, ended.err.startswith(f"trainbox: {text}")) == (2, True), ended


def test_clean_goes_on_after_a_run_that_it_cannot_change(forked: Any) -> None:
    blocked, free = (_run(forked.folder / "runs" / name, COMPLETE) for name in ("a", "b"))
    (blocked / "lock").mkdir()
    ended = forked("clean", "--yes")
    assert ended.code == 4
    assert "cannot write runs/a/lock: Is a directory" in ended.err
    assert ended.err.endswith("; 1 of 2 are removed\n")
    assert len(sorted((blocked / "checkpoints").glob("*.pt"))) == 4
    assert len(sorted((free / "checkpoints").glob("*.pt"))) == 3


def test_clean_says_that_nothing_is_removed(forked: Any) -> None:
    (_run(forked.folder / "runs/a", COMPLETE) / "lock").mkdir()
    assert forked("clean", "--yes").err.endswith("; 0 of 1 are removed\n")


def test_clean_frees_a_disk_without_space_for_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    folder = _run(tmp_path / "a", COMPLETE)
    monkeypatch.setattr("trainbox.folders.lease.create_regular", full)
    ended = CliRunner().invoke(clean, ["--yes", "--runs-dir", str(tmp_path)])
    assert (ended.exit_code, ended.output.splitlines()[-1]) == (0, "removed")
    assert len(sorted((folder / "checkpoints").glob("*.pt"))) == 3


def test_clean_counts_no_run_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        _run(tmp_path / name, COMPLETE)
    # A training starts after the runs were listed.
    monkeypatch.setattr("entrypoint.runs.read.is_leased", lambda _: False)
    Lease(tmp_path / "a")
    ended = CliRunner().invoke(clean, ["--yes", "--runs-dir", str(tmp_path)])
    assert ended.exit_code == 0 and ended.output.splitlines()[-2:] == [
        f"{tmp_path}/a is in use now: left as it is",
        "1 of 2 are removed",
    ]


def test_a_sweep_without_results_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s/study.journal").touch()
    assert [run.state for run in stored_runs(tmp_path, False)] == ["stopped"]
    _run(tmp_path / "s/trial-00000", COMPLETE)
    assert [run.state for run in stored_runs(tmp_path, False)] == ["stopped"]
