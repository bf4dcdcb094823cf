"""Misspelt TRAINBOX_ variables are refused, and variables that Trainbox sets are known."""

import re
from pathlib import Path

import pytest

from tests.support.commands import Trainbox
from tests.support.here import Here
from trainbox.commands.command_page import NOT_SETTINGS, check_names
from trainbox.disclosure.variables import LAUNCH_NAMES
from trainbox.errors import WrongUse
from trainbox.options.table import COMMANDS, PREFIX, variables
from trainbox.processes.environment import Internal, LaunchFacts

_ROOT = Path(__file__).parents[2]
_SETTINGS = {
    name for rows in COMMANDS.values() for name in variables(rows) if name.startswith(PREFIX)
}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("TRAINBOX_EPOCS", "did you mean TRAINBOX_EPOCHS?"),
        ("TRAINBOX_epochs", "did you mean TRAINBOX_EPOCHS?"),
        ("TRAINBOX_BATCHSIZE", "did you mean TRAINBOX_BATCH_SIZE?"),
        ("TRAINBOX_LEARNING_RATE", "did you mean TRAINBOX_LR?"),
        ("TRAINBOX_LEARNING_RAT", "did you mean TRAINBOX_LR?"),
        ("TRAINBOX_MAX_EPOCHS", "did you mean TRAINBOX_EPOCHS?"),
        ("TRAINBOX_CPU", "did you mean DEVICE=cpu?"),
        ("TRAINBOX_NO_CUDA", "did you mean DEVICE=cpu?"),
        ("TRAINBOX_TF32", "did you mean TRAINBOX_PRECISION=tf32?"),
        ("TRAINBOX_BF16", "did you mean TRAINBOX_PRECISION=bf16?"),
        ("TRAINBOX_AMP", "did you mean TRAINBOX_PRECISION?"),
        ("TRAINBOX_NUM_GPUS", "did you mean GPUS?"),
        ("TRAINBOX_GPUS", "use GPUS"),
        ("TRAINBOX_API_KEY", "unset it; `trainbox train --help` lists the settings"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.delenv("TRAINBOX_COMMAND", raising=False)
    with pytest.raises(WrongUse) as refused:
        check_names(["HOME", name], _SETTINGS)
    assert str(refused.value) == f"{name} is not a setting: {remedy}"


@pytest.mark.parametrize(
    "name",
    [
        "TRAINBOX_EPOCHS",
        "TRAINBOX_GRID",
        "TRAINBOX_LAUNCH",
        "TRAINBOX_PORT",
        "TRAINBOX_BOARD_PORT_6006_TCP_ADDR",
        "EPOCS",
    ],
)
def test_the_settings_of_all_commands_and_internal_variables_are_known(name: str) -> None:
    check_names([name], _SETTINGS)


def test_each_name_that_the_sources_use_is_known() -> None:
    files = [
        path
        for folder in ("entrypoint", "trainbox", "trainer", "deploy")
        for path in (_ROOT / folder).rglob("*")
        if path.is_file()
    ]
    files += [
        _ROOT / name
        for name in ("Dockerfile", "Makefile", "docker-compose.yml", "docker-compose.cpu.yml")
    ]
    texts = [
        path.read_text(encoding="utf-8")
        for path in files
        if path.suffix not in (".pyc", ".png") and path.name != "environment.py"
    ]
    used = {name for text in texts for name in re.findall(r"\bTRAINBOX_[A-Z][A-Z_]*[A-Z]\b", text)}
    assert {"TRAINBOX_COMMAND", "TRAINBOX_HEARTBEAT"} <= used
    # The first stands for any name in a help text. The sources use Internal for its names.
    assert used - {"TRAINBOX_NAME"} - _SETTINGS - NOT_SETTINGS == set()
    assert used & set(Internal) == set()


def test_there_are_at_most_eight_internal_variables() -> None:
    assert len(Internal) <= 8
    assert all(member == PREFIX + member.name for member in Internal)


def test_the_names_of_the_launchers_settings_are_those_of_its_options() -> None:
    devices = {"DEVICE", "GPUS", "GPU_IDS", "PROCESSES", "STRATEGY", "TRAINBOX_DEVICE"}
    nodes = {"NNODES", "NODE_RANK", "RDZV_ENDPOINT", "RDZV_ID", "RDZV_TIMEOUT_S"}
    assert {*devices, *nodes, "HEALTH", "HEALTH_LIMITS", "TASK"} == LAUNCH_NAMES


def test_a_run_of_a_script_refuses_a_name_that_it_would_ignore(forked: Trainbox) -> None:
    (forked.folder / "train.py").write_text("print('runs')")
    for name, cure in (
        ("GPUS", "use GPUS"),
        ("GPU", "use GPUS"),
        ("RESTARTS", "use --restarts"),
        ("HANG_MINUTE", "did you mean TRAINBOX_HANG_MINUTES?"),
    ):
        ended = forked("run", "train.py", env={f"TRAINBOX_{name}": "2"})
        assert (ended.code, ended.out) == (2, "")
        assert ended.err == f"trainbox: TRAINBOX_{name} is not a setting: {cure}\n"
    others = {"TRAINBOX_EPOCHS": "2", "TRAINBOX_RUN": "/home/me/runs/a"}
    assert forked("run", "--device", "cpu", "train.py", env=others).code == 0


@pytest.mark.parametrize("name", ["TEMPLATE", "TASK", "EPOCS", "API_KEY"])
def test_a_script_may_read_any_name_that_is_not_like_an_option(forked: Trainbox, name: str) -> None:
    (forked.folder / "train.py").write_text("import os\nprint(os.environ['TRAINBOX_" + name + "'])")
    words = ("--device", "cpu", "train.py")
    ended = forked("run", *words, env={f"TRAINBOX_{name}": "1"})
    assert (ended.code, ended.out.splitlines()[0]) == (0, "1"), ended.err
    assert forked("plan", "run", *words, env={f"TRAINBOX_{name}": "1"}).code == 0


def test_a_misspelt_name_exits_with_code_2_except_with_help(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINBOX_EPOCS", "1")
    for arguments in (["train"], ["sweep", "digits"], ["verify", "."], ["tasks"]):
        err = here.refused(*arguments, silent=True)
        assert err == "trainbox: TRAINBOX_EPOCS is not a setting: did you mean TRAINBOX_EPOCHS?\n"
    here.succeeds("train", "--help")


def test_a_command_accepts_the_settings_of_another(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINBOX_GRID", "width=1,2")  # of `sweep`
    here.succeeds("tasks")


def test_the_header_shows_the_settings_of_the_environment(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "settings" not in here.train("a", epochs=1)
    facts = LaunchFacts(settings="device cpu (from DEVICE)")
    monkeypatch.setenv(*facts.variable().popitem())
    assert "\nsettings   device cpu (from DEVICE)\n" in here.train("b", epochs=1)
