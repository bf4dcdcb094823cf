"""Standard streams that are closed or full, or that nobody reads, do not stop a training."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, clean_environment, finish

ROOT = Path(__file__).parents[1]
_TINY = ("train", "tests.support.tiny:Tiny", "--device", "cpu", "--max-steps", "4")


def _python(program: str, redirected: str, folder: Path, **env: str) -> int:
    """Run `program` in a shell with its streams `redirected`; return the exit code."""
    command = ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-c", program]
    return subprocess.run(
        command, cwd=folder, env=clean_environment(PYTHONPATH=str(ROOT), **env), timeout=60
    ).returncode


@pytest.mark.parametrize("redirected", ["<&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path, redirected: str) -> None:
    program = (
        "import subprocess, sys; from trainbox.processes.streams import open_streams; "
        "open_streams(); file = open('metrics', 'w');"
        "print('ä', flush=True); print('ä', file=sys.stderr); assert sys.stdin.read() == "
        "'' and file.fileno() > 2;"
        # the programs that it starts have streams as well
        "subprocess.run(['sh', '-c', 'cat && echo x && echo x >&2'], check=True)"
    )
    assert (
        _python(program, redirected if "<" in redirected else f"{redirected} </dev/null", tmp_path)
        == 0
    )
    assert (tmp_path / "metrics").read_text() == ""


def test_a_character_that_the_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    program = "import trainbox.processes.streams as s; s.open_streams();print('lauf-ä \\ud800')"
    assert _python(program, ">out", tmp_path, PYTHONIOENCODING="ascii") == 0
    assert (tmp_path / "out").read_bytes() == b"lauf-\\xe4 \\ud800\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_or_a_reader_that_left_only_loses_the_output(
    tmp_path: Path, unbuffered: str
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full does not exist")
    program = (
        "import sys; from trainbox.processes.streams import open_streams; "
        "from trainbox.processes.streams import outlive_readers; "
        "open_streams(); outlive_readers()\n"
        "for number in range(3000): print(number); print(number, file=sys.stderr)\n"
        "sys.stdout.flush(); open('end', 'w').close()"
    )
    for number, redirected in enumerate(
        (">/dev/full 2>&1", "2>&1 | head -1 >/dev/null; test -e end")
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = f'"$@" {redirected}'
        words = ["sh", "-c", command, "sh", sys.executable, "-c", program]
        env = clean_environment(PYTHONPATH=str(ROOT), PYTHONUNBUFFERED=unbuffered)
        assert subprocess.run(words, cwd=folder, env=env).returncode == 0
        assert (folder / "end").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])  # the images set it
@pytest.mark.parametrize("command", ["entrypoint plan digits", "trainer tasks"])
def test_a_command_whose_output_meets_a_full_disk_exits_with_code_4(
    tmp_path: Path, command: str, unbuffered: str
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full does not exist")
    words = [sys.executable, "-P", "-m", *command.split()]
    env = clean_environment(PYTHONUNBUFFERED=unbuffered)
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(words, cwd=tmp_path, env=env, stdout=full, stderr=subprocess.PIPE)
    assert ended.returncode == 4
    assert re.fullmatch(rb"trainbox: cannot write /dev/stdout: No space left .*\n", ended.stderr)


@pytest.mark.parametrize("verb", ["train", "sweep-run"])
def test_what_takes_long_outlives_its_reader(tmp_path: Path, verb: str) -> None:
    """If the reader has ended, the command continues and exits with its own code."""
    program = (
        "import click, runpy, sys, trainer.cli.commands\n"
        "def long(): print('x', flush=True); open('end', 'w').close(); return 8\n"
        f"trainer.cli.commands.cli.add_command(click.Command('{verb}', callback=long))\n"
        f"sys.argv = ['trainer', '{verb}']\n"
        "runpy.run_module('trainer', run_name='__main__', alter_sys=False)"
    )
    reading, writing = os.pipe()
    os.close(reading)
    words, env = [sys.executable, "-c", program], clean_environment(PYTHONPATH=str(ROOT))
    ended = subprocess.run(words, cwd=tmp_path, env=env, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (8, b"")
    assert (tmp_path / "end").exists()


@pytest.mark.parametrize(("given", "used"), [({}, "1"), ({"TORCH_DISABLE_NATIVE_JIT": "0"}, "0")])
def test_torch_compiles_no_kernels_of_its_own(
    tmp_path: Path, given: dict[str, str], used: str
) -> None:
    """torch reads the variable at its import, which the command has not done yet."""
    program = (
        "import os, runpy, sys, trainer.cli.commands\n"
        "def main(_): assert 'torch' not in sys.modules; "
        f"sys.exit(8 * (os.environ['TORCH_DISABLE_NATIVE_JIT'] == '{used}'))\n"
        "trainer.cli.commands.main, sys.argv = main, ['trainer', 'tasks']\n"
        "runpy.run_module('trainer', run_name='__main__', alter_sys=False)"
    )
    assert _python(program, ">out 2>err", tmp_path, **given) == 8


@pytest.mark.parametrize(
    "processes", [(), pytest.param(("--processes", "2"), marks=pytest.mark.slow)]
)
def test_a_training_whose_streams_are_closed_trains(
    trainbox: Trainbox, processes: tuple[str, ...]
) -> None:
    env = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    ended = finish(trainbox.start(*_TINY, "--run", "lauf-ä", *processes, env=env, inside=closed))
    assert ended.code == 0
    folder = trainbox.folder / "runs" / "lauf-ä"
    assert (folder / "model.safetensors").exists()
    assert [entry["step"] for entry in trainbox.entries("lauf-ä", "validation")] == [4]
    assert "digest     " in (folder / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert [path.name for path in trainbox.folder.iterdir()] == ["runs"]
