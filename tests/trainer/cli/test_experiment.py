"""The tables [task], [train] and [sweep] of exp.toml, as `train` and `sweep` read them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.here import Here
from tests.support.paths import ROOT
from trainbox.options.config import Config
from trainbox.options.optimizers import OPTIMIZERS
from trainbox.processes.environment import LaunchFacts
from trainer.sweep.grid import Range, Sweep


@pytest.fixture
def config_of(here: Here, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Return the settings that `train` with these arguments would train with."""
    seen: list[Config] = []
    monkeypatch.setattr(
        "trainer.session.train.train_task", lambda config, *_rest, **_more: seen.append(config)
    )

    def call(*arguments: str) -> Config:
        here.succeeds("train", *arguments, "--device", "cpu")
        return seen.pop()

    return call


@pytest.fixture
def sweep_of(here: Here, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sweep]:
    """Return the sweep that `sweep` with these arguments would train."""
    seen: list[Sweep] = []
    monkeypatch.setattr("trainer.sweep.call.run_sweep", lambda sweep, *_rest: seen.append(sweep))

    def call(*arguments: str) -> Sweep:
        here.succeeds("sweep", *arguments, "--device", "cpu")
        return seen.pop()

    return call


_WHOLE = """
# A comment.
[task]
name = "digits"
width = 16  # a field of the task
dropout = 0.25

[train]
epochs = 2
batch_size = 64
lr = 1e-3
checkpoint-minutes = 10
best-by = "max:accuracy"
deterministic = false
run = "base"

[launch]
processes = 1

[sweep]
seeds = 3
metric = "accuracy"
grid = {lr = [1e-3, 3e-3], width = [8, 16]}
"""
_SAME = (
    *("digits", "--set", "width=16", "--set", "dropout=0.25", "--epochs", "2", "--lr", "0.001"),
    *("--batch-size", "64", "--checkpoint-minutes", "10", "--best-by", "max:accuracy", "--fast"),
)


def test_a_file_has_the_settings_of_the_same_command_line(
    config_of: Callable[..., Config],
) -> None:
    Path("exp.toml").write_text(_WHOLE)
    config = config_of("--config", "exp.toml")
    assert config == config_of(*_SAME)
    assert config.fields == {"width": "16", "dropout": "0.25"}
    assert (config.learning_rate, config.deterministic) == (0.001, False)


def test_an_option_that_can_be_repeated_has_an_array(config_of: Callable[..., Config]) -> None:
    for value in ('"body"', '["body"]'):
        Path("exp.toml").write_text(f'[train]\ninit = "w.pt"\nfreeze = {value}\n')
        config = config_of("--config", "exp.toml")
        assert (config.init, config.freeze) == ("w.pt", ["body"])
    Path("exp.toml").write_text('[train]\nfreeze = ["body", "*.bias"]\n')
    assert config_of("--config", "exp.toml").freeze == ["body", "*.bias"]
    assert config_of("--config", "exp.toml", "--freeze", "head").freeze == ["head"]


def test_the_command_line_precedes_the_environment_and_the_file(
    config_of: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("exp.toml").write_text(
        '[task]\nname = "mnist"\nwidth = 16\ndropout = 0.1\n[train]\nlr = 1\nepochs = 1\nseed = 1'
    )
    monkeypatch.setenv("TRAINBOX_LR", "2")
    monkeypatch.setenv("TRAINBOX_EPOCHS", "2")
    monkeypatch.setenv("TRAINBOX_CONFIG", "exp.toml")
    config = config_of("digits", "--lr", "3", "--set", "width=32")
    assert (config.task, config.learning_rate, config.epochs, config.seed) == ("digits", 3, 2, 1)
    assert config.fields == {"width": "32", "dropout": "0.1"}
    assert config_of().task == "mnist"
    monkeypatch.setenv("TASK", "digits")
    monkeypatch.setenv("SET", "width=8 dropout=0.5")
    config = config_of()
    assert (config.task, config.learning_rate) == ("digits", 2)
    assert config.fields == {"width": "8", "dropout": "0.5"}


def test_an_error_in_a_field_is_one_line(here: Here) -> None:
    Path("exp.toml").write_text("[task]\nwidth = 16\n[sweep]\ngrid = {width = [8, 16]}")
    config = ("--config", "exp.toml")
    error = "trainbox: --set width=x: give a value of type int\n"
    assert here.command("train", *config, "--set", "width=x") == (2, "", error)
    Path("typo.toml").write_text("[task]\nwidht = 16\n")
    err = here.refused("train", "--config", "typo.toml")
    assert err == "trainbox: --set widht=16: task digits has no field widht: did you mean width?\n"
    # Only a field of the file gives way to the grid.
    _, _, err = here.command("sweep", *config, "--set", "width=3")
    assert "--grid width=...: width is given twice: drop one of the two" in err


def test_a_required_field_of_the_file_gives_way_to_its_grid(sweep_of: Callable[..., Sweep]) -> None:
    Path("req.py").write_text(
        "from dataclasses import dataclass\nfrom trainbox import Task\n@dataclass(frozen=True)\n"
        "class Req(Task):\n    width: int\n"
    )
    text = '[task]\nname = "req.py:Req"\nwidth = 4\n[sweep]\ngrid = {width = [8, 16]}\n'
    Path("exp.toml").write_text(text)
    assert sweep_of("--config", "exp.toml", "--resume", "auto").grid == {"width": [8, 16]}


def test_an_option_replaces_the_alternative_of_the_file(config_of: Callable[..., Config]) -> None:
    Path("exp.toml").write_text("[train]\nepochs = 2\nbatch-size = 8\n")
    config = config_of("--config", "exp.toml", "--max-steps", "4", "--batch-size-per-gpu", "2")
    assert (config.epochs, config.max_steps) == (None, 4)
    assert (config.batch_size, config.batch_size_per_gpu) == (None, 2)


def test_fields_with_the_names_of_keys_have_a_table(
    here: Here, config_of: Callable[..., Config]
) -> None:
    (here.folder / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom trainbox import Task\n@dataclass(frozen=True)\n"
        "class Mine(Task):\n    name: str = 'a'\n    set: bool = False\n    size: int = 1\n"
    )
    Path("exp.toml").write_text(
        '[task]\nname = "mine.py:Mine"\nsize = 3\n[task.set]\nname = "b"\nset = true\n'
    )
    config = config_of("--config", "exp.toml")
    assert config.task == "mine.py:Mine"
    assert config.fields == {"name": "b", "set": "true", "size": "3"}


# fmt: off
_TEXTS = [
    ("[train]\nbatchsize = 3", "[train] batchsize is unknown: did you mean batch-size?"),
    ("[train]\nBatch_Size = 3", "[train] Batch-Size is unknown: did you mean batch-size?"),
    ("[train]\nlearning_rate = 3", "[train] learning-rate is unknown: did you mean lr?"),
    ("[train]\nnum_train_epochs = 3", "[train] num-train-epochs is unknown: did you mean epochs?"),
    ("[train]\ngpu_ids = 3", "[train] gpu-ids is unknown: it belongs to [launch]"),
    ("[train]\nset = 3", "[train] set is unknown: write the task and its fields below [task]"),
    ("[train]\nconfig = 'x'", "[train] config is unknown: "),
    ("[train]\nlr = 1\n[trian]", "[trian] is unknown: did you mean [train]?"),
    ("[[train]]\nlr = 1", "train is outside of a table: write it below [task], [train], "),
    ("lr = 1", "lr is outside of a table: write it below [task], [train], [launch] or [sweep]"),
    ("[train]\nbatch-size = 1\nbatch_size = 1",
     "[train] batch_size and batch-size are the same key: drop one"),
    ("[train]\nepochs = 1.5", "[train] epochs = 1.5: '1.5' is not a whole number"),
    ("[train]\nepochs = true", "[train] epochs = true: write a value"),
    ("[train]\nepochs = [1]", "[train] epochs is an array: write one value"),
    ("[train]\noptimizer = 'lion'",
     f"[train] optimizer = lion: 'lion' is not one of {', '.join(map(repr, OPTIMIZERS))}\n"),
    ("[train]\ndeterministic = 'false'",
     '[train] deterministic = "false": write true or false, without quotes'),
    ("[train]\n'' = true", "[train] is unknown: use some of init, "),
    ("[train]\nfast = true",
     "[train] fast is the opposite of deterministic: write deterministic = true or false"),
    ("[train]\nrun = 'a\\b'\nruns-dir = \"a\\u0000\"", "[train] runs-dir = 'a\\x00' has a "),
    ("[train]\nrun = 2026-01-02T03:04:05Z", "[train] run is a date or a time: write it in quotes"),
    ("[train]\nrun = 'a-${seed}'", "[train] run = a-${seed}: the file has no variables such as "),
    ("[task]\nfolder = '${data}'", "[task] folder = ${data}: the file has no variables such as "),
    ("[launch]\ngpu-ids = '${oc.env:G}'", "[launch] gpu-ids = ${oc.env:G}: the file has no varia"),
    ("[task]\nname = 3", "[task] name is 3: write the task in quotes"),
    ("[task]\nclass = 'my.py:C'", '[task] class is unknown: write name = "my.py:C"'),
    ("[task]\nname = 'my.py:C'\nclass = 'C'", "[task] class is unknown: remove it; a name such as "
     '"my_tasks/rings.py:Rings" has the file and the class'),
    ("[task]\nclass = 'C'\nname = 'my.py'", "[task] class is unknown: remove it; a name such as "),
    ("[task]\nset = 3", "[task] set is not a table: write fields below [task.set]"),
    ("[task]\nwidth = 3\n[task.set]\nwidth = 4", "[task.set] width is also in [task]: drop"),
]
# fmt: on


@pytest.mark.parametrize(("text", "message"), _TEXTS)
def test_a_wrong_file_is_refused_with_the_key(here: Here, text: str, message: str) -> None:
    Path("exp.toml").write_text(text)
    err = here.refused("train", "--config", "exp.toml", "--lr", "1", silent=True)
    assert err.startswith(f"trainbox: exp.toml: {message}")


# fmt: off
_DATAS = [
    (b"[train]\nlr = \n", "is not TOML: Invalid value (at line 2, column 6)\n"),
    (b"[sweep]\nstorage = postgresql://u:secret@h/db\n",
     "is not TOML: Invalid value (at line 2, column 11): write the text of storage in"),
    (b"[train]\nlr = null\n",
     "is not TOML: Invalid value (at line 2, column 6): leave out the line of lr\n"),
    (b"[train]\nlr = None # default\n",
     "is not TOML: Invalid value (at line 2, column 6): leave out the line of lr\n"),
    (b"[train]\nlr = .001\n", "is not TOML: Invalid value (at line 2, column 6): write 0.001\n"),
    (b"[sweep.grid]\nlr = [.1, 1]\n",
     "is not TOML: Invalid value (at line 2, column 7): write 0.1\n"),
    (b"[train]\nlr = 1.\n", "is not TOML: Expected newline or end of document after a "
     "statement (at line 2, column 7): write 1.0\n"),
    (b"[train]\nlr = 0,1\n", "is not TOML: Expected newline or end of document after a "
     "statement (at line 2, column 7): write 0.1 with a point\n"),
    (b"[task]\nscale = -1,5e-3 # low\n", "is not TOML: Expected newline or end of document after a "
     "statement (at line 2, column 11): write -1.5e-3 with a point\n"),
    (b"[train]\nbatch_size = 1,024\n", "is not TOML: Expected newline or end of document after a "
     "statement (at line 2, column 15): write 1024 without commas\n"),
    (b"[task]\nscale = 1,024\n", "is not TOML: Expected newline or end of document after a "
     "statement (at line 2, column 10): write 1024 without commas, or 1.024 with a point\n"),
    (b"[train]\nepochs = 1,5\n", "is not TOML: Expected newline or end of document after a "
     "statement (at line 2, column 11)\n"),
    (b"[launch]\ngpu_ids = 0,2\n", "is not TOML: Expected newline or end of document after a "
     "statement (at line 2, column 12): write the text of gpu_ids in quotes\n"),
    (b"[train]\nmax-steps = 1,000,000\n", "is not TOML: Expected newline or end of document after "
     "a statement (at line 2, column 14): write 1000000 without commas\n"),
    (b"[train]\nlr = 0,001\n", "is not TOML: Expected newline or end of document after a "
     "statement (at line 2, column 7): write 0.001 with a point\n"),
    (b"[train]\nlr = 1\n[sweep.grid]\nwidth = 64,128 # both\n", "is not TOML: Expected newline or "
     "end of document after a statement (at line 4, column 11): write [64,128]\n"),
    (b"[sweep]\ngrid.optimizer = 'sgd', 'adam'\n", "is not TOML: Expected newline or end of "
     "document after a statement (at line 2, column 23): write ['sgd', 'adam']\n"),
    (b"[train]\nlr = 1\n[train]\nseed = 2\n", "is not TOML: Cannot declare ('train',) twice (at "
     "line 3, column 7): write the lines of both [train] below one of them\n"),
    (b"[task.set]\n[task.set]\n", "is not TOML: Cannot declare ('task', 'set') twice (at line 2, "
     "column 10): write the lines of both [task.set] below one of them\n"),
    (b"[train]\ncompile = True\n",
     "is not TOML: Invalid value (at line 2, column 11): write true\n"),
    (b"[sweep]\ngrid = {\n  lr = [1, 2],\n}\n",
     "is not TOML: Invalid initial character for a key part (at line 2, column 9): write grid = "
     "{...} on one line, or its lines below [sweep.grid]\n"),
    (b"[sweep]\ngrid = {lr = [1],\n  width = [8]}\n",
     "is not TOML: Invalid initial character for a key part (at line 2, column 18): write grid = "),
    (b"train = {lr = 1\n}\n", "is not TOML: Unclosed inline table (at line 1, column 16): "
     "write train = {...} on one line, or its lines below [train]\n"),
    (b"\xff", "is not TOML: 'utf-8' codec can't decode byte 0xff in position 0"),
    (b"# lr = 1\n", "has no settings: write them below [task] and [train], or give a run"),
]
# fmt: on


@pytest.mark.parametrize(("data", "message"), _DATAS)
def test_a_file_without_settings_is_refused(here: Here, data: bytes, message: str) -> None:
    Path("exp.toml").write_bytes(data)
    err = here.refused("train", "--config", "exp.toml", silent=True)
    assert err.startswith(f"trainbox: --config exp.toml {message}")


def test_a_second_file_is_refused(here: Here) -> None:
    Path("exp.toml").write_text("[train]\nlr = 1\n")
    for words in (["--config", "exp.toml"], ["--config=exp.toml"]):
        err = here.refused("train", "--config", "exp.toml", *words, silent=True)
        assert err == "trainbox: --config is given twice: write the settings into one file\n"


def test_a_file_may_start_with_a_byte_order_mark(here: Here) -> None:
    Path("exp.toml").write_bytes(b"\xef\xbb\xbf[train]\nlr = 0\n")
    _, _, err = here.command("train", "--config", "exp.toml")
    assert err == "trainbox: exp.toml: [train] lr = 0: 0 is not a finite number above 0\n"


def test_a_missing_file_is_refused(here: Here) -> None:
    Path("folder.toml").mkdir()
    err = here.refused("train", "--config", "folder.toml")
    assert err == (
        "trainbox: --config folder.toml/config.json does not exist: give an experiment or a run's "
        "config.json\n"
    )
    cure = "give an experiment or a run's config.json"
    for name, near in (("x/none.toml", cure), ("foldre.tml", "did you mean folder.toml?")):
        err = here.refused("train", "--config", name)
        assert err == f"trainbox: --config {name} does not exist: {near}\n"


def test_the_manifest_records_the_file(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    config_file = {"name": "my exp.toml", "sha256": "0123abc"}
    monkeypatch.setenv(*LaunchFacts(config_file=config_file).variable().popitem())
    here.train(max_steps=1)
    manifest = here.json("manifest.json")
    assert manifest["config_file"] == config_file
    # Another file with the same settings resumes the run.
    config_file = {"name": "other.toml", "sha256": "4567def"}
    monkeypatch.setenv(*LaunchFacts(config_file=config_file).variable().popitem())
    assert "changed" not in here.train(max_steps=1)


# Sweeps.


def test_a_sweep_uses_all_tables_but_what_is_for_one_training(
    sweep_of: Callable[..., Sweep],
) -> None:
    Path("exp.toml").write_text(_WHOLE)
    grids = ("--grid", "lr=1e-3,3e-3", "--grid", "width=8,16")
    sweep = sweep_of("--config", "exp.toml")
    same = [word for word in _SAME if word not in ("--lr", "0.001")]
    del same[1:3]  # --set width=16, which the grid replaces
    expected = sweep_of(*same, *grids, "--seeds", "3", "--metric", "accuracy")
    assert sweep.grid == {"learning_rate": [0.001, 0.003], "width": [8, 16]}
    assert (sweep.grid, sweep.seeds, sweep.metric) == (
        expected.grid,
        expected.seeds,
        expected.metric,
    )
    points = [sweep.trial_config(sweep.point(n), sweep.seed(n)) for n in range(sweep.total)]
    assert points == [expected.trial_config(expected.point(n), expected.seed(n)) for n in range(12)]


def test_a_sweep_draws_from_ranges_of_the_file(sweep_of: Callable[..., Sweep]) -> None:
    Path("exp.toml").write_text(
        '[sweep]\nsampler = "tpe"\ntrials = 5\nmetric = "min:loss"\npruner = "median"\n'
        'range = {lr = [1e-4, 0.1, "log"], width = [8, 64]}\nworker = false\n'
    )
    sweep = sweep_of("--config", "exp.toml")
    assert sweep == sweep_of(
        *("--sampler", "tpe", "--trials", "5", "--metric", "min:loss", "--pruner", "median"),
        *("--range", "lr=1e-4:1e-1:log", "--range", "width=8:64"),
    )
    assert sweep.ranges == {"learning_rate": Range(1e-4, 0.1, log=True), "width": Range(8, 64)}
    other = sweep_of("--config", "exp.toml", "--range", "lr=1:2", "--trials", "7")
    assert (other.ranges, other.trials) == ({"learning_rate": Range(1.0, 2.0)}, 7)


def test_the_example_of_the_guide_is_trained_and_swept(
    config_of: Callable[..., Config], sweep_of: Callable[..., Sweep]
) -> None:
    page = (ROOT / "docs/guides/experiment-file.md").read_text()
    Path("exp.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    config = config_of("--config", "exp.toml")
    assert (config.task, config.fields, config.epochs) == ("digits", {"width": "16"}, 5)
    assert sweep_of("--config", "exp.toml").total == 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid = {widht = [3]}", "--grid widht=3: task digits has no field widht: did you"),
        ("grid = {lr = ['x']}", "--grid lr=x: 'x' is not a number"),
        ("range = {width = [5, 1]}", "--range width=5:1 is empty: give a low end"),
        ("seed = 3", "[sweep] seed is unknown: did you mean seeds?"),
        ("grid = 3", "[sweep] grid is not a table: write {lr = [1e-4, 1e-1]}"),
        ("grid = {lr = 1}", "[sweep] grid: lr is not an array: write lr = [..., ...]"),
        ("grid = {lr = []}", "[sweep] grid: lr = []: write values that are not empty, without "),
        ("grid = {a = ['1,2']}", "[sweep] grid: a = ['1,2']: write values that are not empty, "),
        ("range = {lr = [1]}", '[sweep] range: lr = [1]: write [LOW, HIGH] or [LOW, HIGH, "log"]'),
        ("range = {lr = [1, true]}", "[sweep] range: lr = [1, True]: write [LOW, HIGH] or [LOW, "),
    ],
)
def test_a_wrong_sweep_is_refused_and_ignored_by_train(here: Here, text: str, message: str) -> None:
    Path("exp.toml").write_text(f"[sweep]\n{text}")
    err = here.refused("sweep", "--config", "exp.toml", "--device", "cpu", silent=True)
    # The trainer checks the names and values of a grid, which the file and the options share.
    source = "" if message.startswith("--") else "exp.toml: "
    assert err.startswith(f"trainbox: {source}{message}")
    here.succeeds("plan", "--config", "exp.toml")
