"""The parts of a run that a tracker gets."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.track.conftest import MakeRun, train_entry
from trainbox.contract.errors import WrongUse
from trainbox.contract.secret_rule import NOT_SHOWN
from trainer.track.runs import EntryRow, read_run, row, runs_in

# fmt: off
_ENTRIES = [
    (train_entry(5, loss=0.5), EntryRow(5, 1005.0, {"train/loss": 0.5})),
    ({"step": 5, "time_unix_s": 1, "loss": 2}, EntryRow(5, 1.0, {"train/loss": 2.0})),
    (train_entry(5, gpu_mib_each=[1, None, 2], note="a", loss=None, counts=[1, 2]),
     EntryRow(5, 1005.0, {"train/gpu_mib/0": 1.0, "train/gpu_mib/2": 2.0})),
    (train_entry(5, **{"acc@5": 1, "/../a": 2, "é": 3, "nan": float("nan"), "big": 10**400}),
     EntryRow(5, 1005.0, {"train/a": 2.0, "train/acc_5": 1.0, "train/_": 3.0})),
    (train_entry(5, kind="health", check="xid", gpu=0), None),
    (train_entry(5, note="only a text"), None),
    ({"step": True, "loss": 1}, None),
    ({"step": 10**30, "loss": 1}, None),
    ({"loss": 1}, None),
]
# fmt: on


@pytest.mark.parametrize(("entry", "expected"), _ENTRIES)
def test_the_finite_numbers_of_an_entry_are_its_row(
    entry: dict[str, Any], expected: EntryRow | None
) -> None:
    assert row(entry) == expected


def test_two_metrics_with_the_same_name_in_a_tracker_are_refused() -> None:
    with pytest.raises(WrongUse, match=r"would show train/acc@5 and train/acc_5 as train/acc_5: "):
        row(train_entry(1, **{"acc@5": 1, "acc_5": 2, "loss": 3}))


def test_a_long_name_is_cut() -> None:
    found = row(train_entry(1, **{"x" * 400: 1}))
    assert found is not None
    assert [len(name) for name in found.values] == [250]


def test_a_task_has_its_settings_and_fields_as_parameters(make_run: MakeRun) -> None:
    digest, revision = "a1" * 32, "9c" * 20 + "-dirty"
    folder = make_run(
        "one",
        [],
        {"task": "digits", "seed": 3, "max_steps": None, "fields": {"width": 8, "api_token": "x1"}},
        revision=revision,
        image_digest=f"sha256:{digest}",
        data={"train": digest},
        sources={"a.py": digest},
        packages={"torch": "2.15.0", "numpy": "1"},
        machine={"host": "login3", "cpu_model": "Xeon"},
        argv=["--token", "abc"],
        environment={"HOME": "/home/ada"},
        build={"lock_sha256": None},
    )
    run = read_run(folder)
    assert (run.id, run.name) == ("one", "one")
    assert run.params == {
        "task": "digits",
        "seed": 3,
        "task.width": 8,
        "task.api_token": NOT_SHOWN,
    }
    assert run.tags == {
        "revision": revision,
        "image_digest": f"sha256:{digest}",
        "data.train": digest,
        "packages.torch": "2.15.0",
        "machine.cpu_model": "Xeon",
        "plan.strategy": "single",
        "plan.world_size": "1",
        "sources_sha256": hashlib.sha256(f"a.py {digest}\n".encode()).hexdigest(),
    }


def test_a_script_has_its_options_as_parameters_without_secrets(make_run: MakeRun) -> None:
    words = ["in.txt", "--lr", "0.1", "--fast", "--api-key", "abc", "--token=d e", "-n", "-3"]
    config = {"kind": "script", "script": "train.py", "arguments": words}
    run = read_run(make_run("sweep-1/trial-00002", [], config, script="train.py"))
    assert run.name == "sweep-1/trial-00002"
    hidden = "in.txt --lr 0.1 --fast --api-key (not shown) --token=(not shown) -n -3"
    assert run.params == {
        "lr": "0.1",
        "fast": "true",
        "api-key": "(not shown)",
        "token": "(not shown)",
        "n": "-3",
        "arguments": hidden,
    }
    assert run.tags == {"script": "train.py", "sweep": "sweep-1"}


def test_a_long_option_has_a_name_that_mlflow_accepts(make_run: MakeRun) -> None:
    long = "x" * 300
    words = [f"--{long}-token", "abc", f"--y{long}=1"]
    run = read_run(make_run("one", [], {"kind": "script", "arguments": words}))
    assert run.params.pop("arguments")
    assert run.params == {"x" * 250: "(not shown)", "y" + "x" * 249: "1"}


def test_a_sweep_is_its_trials_that_have_started(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"s/trial-0000{number}", []) for number in (1, 0)]
    (tmp_path / "s/trial-00002").mkdir()
    make_run("s/trial-00001.aside-1", [])
    assert runs_in(tmp_path / "s") == [runs[1], runs[0]]
    assert runs_in(runs[0]) == [runs[0]]
    (tmp_path / "planned").mkdir()
    assert runs_in(tmp_path / "planned") is None
    (tmp_path / "planned/study.journal").touch()
    assert runs_in(tmp_path / "planned") == []


_SCRIPT = {"kind": "script", "arguments": []}


# fmt: off
_CONFIGS = [
    (None, {"run_id": "a b"}, r"manifest.json is damaged \(run_id is malformed\): restore it"),
    (_SCRIPT, {"run_id": None}, r"manifest.json is damaged \(run_id is malformed\): restore it"),
    # Only config.json states that this is a run of a script.
    (_SCRIPT, {"kind": None}, r"manifest.json is damaged \(settings is missing"),
    (None, {"kind": "script", "classes": 1}, r"manifest.json is damaged \(classes is missing"),
]
# fmt: on


@pytest.mark.parametrize(("config", "manifest", "message"), _CONFIGS)
def test_a_damaged_run_is_refused(
    make_run: MakeRun, config: Any, manifest: dict[str, Any], message: str
) -> None:
    run = make_run("one", [], **({"config": config} if config else {}), **manifest)
    with pytest.raises(WrongUse, match=message):
        read_run(run)
