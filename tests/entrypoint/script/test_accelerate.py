"""The settings of Accelerate, which only `accelerate launch` passes to a script."""

from pathlib import Path

import pytest

from tests.support.commands import Trainbox

# As `accelerate config` writes it.
_FILE = """compute_environment: LOCAL_MACHINE
distributed_type: {plugin}
downcast_bf16: 'no'
mixed_precision: {precision}
num_processes: 2
use_cpu: {cpu}
"""
_SCRIPT = "from accelerate import Accelerator\n"


def _run(
    forked: Trainbox, script: str = _SCRIPT, config: str = "", **env: str
) -> tuple[int, list[str]]:
    """Run a script; return the exit code and the lines about Accelerate's file."""
    (forked.folder / "train.py").write_text(script)
    (forked.folder / "accelerate.py").write_text("class Accelerator: pass\n")
    folder = forked.folder / "hf/accelerate"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "default_config.yaml").write_text(config)
    env = {"HF_HOME": str(forked.folder / "hf"), **env}
    ended = forked("run", "--run", "r", "--device", "cpu", "train.py", env=env)
    return ended.code, [line for line in ended.err.splitlines() if "accelerate launch" in line]


@pytest.mark.parametrize(
    ("precision", "cpu", "plugin", "cures"),
    [
        ("bf16", "false", "NO", "set ACCELERATE_MIXED_PRECISION=bf16"),
        ("'no'", "true", "NO", "set ACCELERATE_USE_CPU=true"),
        (
            "fp16",
            "true",
            "MULTI_CPU",
            "set ACCELERATE_MIXED_PRECISION=fp16 ACCELERATE_USE_CPU=true",
        ),
        ("'no'", "false", "FSDP", "give the settings of FSDP to Accelerator()"),
    ],
)
def test_settings_without_effect_are_named_with_the_form_that_keeps_them(
    forked: Trainbox, precision: str, cpu: str, plugin: str, cures: str
) -> None:
    config = _FILE.format(precision=precision, cpu=cpu, plugin=plugin)
    code, (line,) = _run(forked, config=config)
    path = forked.folder / "hf/accelerate/default_config.yaml"
    keeps = f"trainbox: only `accelerate launch` reads {path}: to keep its settings, {cures}"
    assert (code, line) == (0, keeps)


def test_nothing_is_printed_if_nothing_is_lost(forked: Trainbox) -> None:
    bf16 = _FILE.format(precision="bf16", cpu="false", plugin="NO")
    usual = _FILE.format(precision="'no'", cpu="false", plugin="MULTI_GPU")
    assert _run(forked, config=usual) == (0, [])
    assert _run(forked, config=bf16, ACCELERATE_MIXED_PRECISION="fp16") == (0, [])
    assert _run(forked, script="print('accelerate')", config=bf16) == (0, [])


@pytest.mark.parametrize(
    ("words", "form"),
    [
        (
            "--mixed_precision bf16 train.py --lr 1",
            "ACCELERATE_MIXED_PRECISION=bf16 trainbox run train.py -- --lr 1` instead",
        ),
        (
            "--cpu --num_processes=2 --mixed-precision=bf16 train.py",
            "ACCELERATE_MIXED_PRECISION=bf16 ACCELERATE_USE_CPU=true trainbox run --processes 2 "
            "train.py` instead",
        ),
        (
            "--config_file acc.yaml --num_processes 3 train.py",
            "ACCELERATE_MIXED_PRECISION=bf16 ACCELERATE_USE_CPU=true trainbox run --processes 3 "
            "train.py` instead",
        ),
        (
            "--multi_gpu --num_processes 4 --use_fsdp src/train.py",
            "trainbox run --gpus 4 src/train.py` instead; give --use_fsdp to Accelerator() in the "
            "script",
        ),
    ],
)
def test_the_launcher_of_accelerate_is_refused_with_the_command_that_keeps_its_options(
    forked: Trainbox, words: str, form: str
) -> None:
    Path(forked.folder / "train.py").touch()
    config = _FILE.format(precision="'bf16'", cpu="true", plugin="NO") + "num_processes: 2\n"
    (forked.folder / "acc.yaml").write_text(config)
    ended = forked("run", "accelerate", "launch", *words.split())
    text = "trainbox: accelerate launch starts processes, and so does this command: use `"
    assert (ended.code, ended.err) == (2, f"{text}{form}\n")
