"""The table [launch] of exp.toml, as the launcher reads it."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.forked import ForkedTrainbox
from trainbox.processes.environment import launch_facts

Plan = Callable[..., Any]


@pytest.fixture
def plan(forked: ForkedTrainbox) -> Plan:
    """Return the launch plan of these arguments and of this text of exp.toml."""

    def call(text: str, *arguments: str, **env: str) -> Any:
        (forked.folder / "exp.toml").write_text(text)
        ended = forked("plan", "--config", "exp.toml", *arguments, env=env)
        assert (ended.code, ended.err) == (0, "")
        return json.loads(ended.out)

    return call


def test_a_plan_takes_the_launch_options_of_the_file(plan: Plan) -> None:
    text = '# CPU\n[task]\nname = "mnist"\n[launch]\nprocesses = 3\ndevice = "cpu"\n'
    shown = plan(text)
    assert (shown["nproc_per_node"], shown["strategy"]) == (3, "ddp")
    assert shown["argv"][-3:] == ["trainer", "train", "mnist"]
    assert shown["settings"] == "from exp.toml"
    digest = hashlib.sha256(text.encode()).hexdigest()
    facts = launch_facts(shown["env"])
    assert facts.config_file == {"name": "exp.toml", "sha256": digest}
    assert (facts.settings, facts.reason) == (shown["settings"], shown["reason"])


def test_the_command_line_precedes_the_environment_and_the_file(plan: Plan) -> None:
    text = '[launch]\nprocesses = 4\ndevice = "cpu"\nstrategy = "ddp"\n[train]\nlr = 1\n'
    assert plan(text, PROCESSES="3")["nproc_per_node"] == 3
    shown = plan(
        text, "digits", "--processes", "2", "--lr", "2", PROCESSES="3", TRAINBOX_EPOCHS="5"
    )
    assert shown["nproc_per_node"] == 2
    assert shown["settings"] == (
        "from exp.toml; processes, task, lr from the command line; epochs 5 (from TRAINBOX_EPOCHS)"
    )


def test_chosen_gpus_replace_the_processes_of_the_file(plan: Plan) -> None:
    shown = plan("[launch]\ngpu_ids = '0,1'\n", "--processes", "2", "--device", "cpu")
    assert (shown["nproc_per_node"], shown["gpus"]) == (2, [])
    shown = plan("[launch]\nprocesses = 4\n", GPUS="0")
    assert shown["nproc_per_node"] == 1


def test_a_chosen_cpu_replaces_the_gpus_of_the_file_but_not_its_processes(plan: Plan) -> None:
    assert plan("[launch]\ngpus = 2\n", "--device", "cpu")["gpus"] == []
    assert plan("[launch]\ngpu_ids = '0,1'\n", DEVICE="cpu")["gpus"] == []
    assert plan("[launch]\nprocesses = 3\n", "--device", "cpu")["nproc_per_node"] == 3


def test_a_file_named_by_the_environment_is_read(forked: ForkedTrainbox) -> None:
    (forked.folder / "exp.toml").write_text("[launch]\nprocesses = 2\ndevice = 'cpu'\n")
    ended = forked("plan", env={"TRAINBOX_CONFIG": "exp.toml"})
    shown = json.loads(ended.out)
    assert shown["nproc_per_node"] == 2
    settings = "from exp.toml; config exp.toml (from TRAINBOX_CONFIG)"
    assert shown["settings"] == settings


# fmt: off
_WRONG_FILES = [
    ("[launch]\ndevices = 2", "[launch] devices is unknown: did you mean gpus?"),
    ("[launch]\ngpu = 2", "[launch] gpu is unknown: did you mean gpus?"),
    ("[launch]\nlr = 2", "[launch] lr is unknown: use some of "),
    ("[launch]\ngpus = 'x'", "[launch] gpus = x: 'x' is neither a number of GPUs nor `all`"),
    ("[launch]\nprocesses = 0", "[launch] processes = 0: 0 is less than 1\n"),
    ("[launch]\nhealth = 0", "[launch] health = 0: write true or false, without quotes"),
    ("[launch]\nno_health = true", "[launch] no-health is the opposite of health: write "),
    ("[launch]\nstrategy = 'ring'", "[launch] strategy = ring: 'ring' is not one of 'ddp', "),
    ("[train]\nepochs = 0", "[train] epochs = 0: 0 is less than 1"),
]
# fmt: on


@pytest.mark.parametrize(("text", "message"), _WRONG_FILES)
def test_a_wrong_file_is_refused_with_the_key(
    forked: ForkedTrainbox, text: str, message: str
) -> None:
    (forked.folder / "exp.toml").write_text(text)
    ended = forked("plan", "--config=exp.toml", "--device", "cpu")
    assert ended.err.startswith(f"trainbox: exp.toml: {message}")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)


def test_a_sweep_reads_the_launch_table_and_per_gpu(forked: ForkedTrainbox) -> None:
    text = "[launch]\nprocesses = 2\ndevice = 'cpu'\nnnodes = 2\nstrategy = 'fsdp'\n[sweep]\n"
    for per_gpu, message in (
        (2, "--run and --resume are"),  # it got as far as the trainer's check
        (0, "exp.toml: [sweep] per-gpu = 0: 0 is less than 1\n"),
    ):
        (forked.folder / "exp.toml").write_text(f"{text}per-gpu = {per_gpu}\n")
        ended = forked("sweep", "--config", "exp.toml", "--run", "x")
        assert (ended.code, ended.err.startswith(f"trainbox: {message}")) == (2, True)


def test_help_does_not_need_the_file(forked: ForkedTrainbox) -> None:
    ended = forked("train", "--help", env={"TRAINBOX_CONFIG": "missing.toml"})
    assert ended.code == 0
    assert "--config" in ended.out
