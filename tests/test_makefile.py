"""The commands of make: `make -n` prints them, with a fake docker on PATH. Some of them run.

tests/deploy/test_host.py shows the command of each verb.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deploy import host

ROOT = Path(__file__).parents[1]
PLUGIN = "/plugins/docker-compose"
CPU_FILES = "-f docker-compose.yml -f docker-compose.cpu.yml"
NO_DOCKER, STOPPED = "none", "exit 1"
DOCKER, NVIDIA = (
    f"echo '{PLUGIN} io.containerd.runc.v2 runc'",
    f"echo '{PLUGIN} io.containerd.runc.v2 nvidia runc'",
)

_TOOLS = "make sh env id git sed awk mkdir touch true cat"

Make = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that runs make with only the tools that it needs on PATH.

    `docker info` runs the shell command `docker`, and `docker image` runs `inspect`.
    """

    def run(
        *arguments: str, docker: str = NO_DOCKER, inspect: str = "true", **env: str
    ) -> subprocess.CompletedProcess[str]:
        tools = tmp_path / "bin"
        tools.mkdir(exist_ok=True)
        for name in _TOOLS.split():
            if not (tools / name).exists():
                (tools / name).symlink_to(shutil.which(name) or pytest.skip(f"no {name} on PATH"))
        if not (tools / "python3").exists():
            (tools / "python3").symlink_to(sys.executable)
        (tools / "docker").unlink(missing_ok=True)
        if docker != NO_DOCKER:
            (tools / "docker").write_text(
                f"#!/bin/sh\ncase $1 in image) {inspect} ;; info) {docker} ;; esac\n"
            )
            (tools / "docker").chmod(0o755)
        return subprocess.run(
            ["make", "-C", str(ROOT), "--no-print-directory", *arguments],
            env={"PATH": str(tools), "HOME": str(tmp_path), "NVIDIA_DEVICE": "", **env},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    return run


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Return settings with which `make train` creates no folders in this checkout."""
    return [f"{name}={tmp_path / name}" for name in ("RUNS_DIR", "DATA_DIR", "TASKS_DIR")]


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """Return a Compose plugin that does nothing."""
    made = tmp_path / "docker-compose"
    made.write_text("#!/bin/sh\n")
    made.chmod(0o755)
    return made


def last(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last command, which follows the preparations."""
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].strip()


def plainly(command: str) -> str:
    """Return the command without quotes."""
    return " ".join(shlex.split(command))


def in_docker(files: str, settings: str, command: str) -> str:
    before = (
        f"env UID={os.getuid()} GID={os.getgid()} PWD={ROOT} IMAGE=trainbox TRAINBOX_COMMAND=make"
    )
    return " ".join(part for part in (before, settings, PLUGIN, files, command) if part)


VERBS = ["train", "plan", "sweep", "drill", "bench", "verify", "evaluate", "predict", "export"]


def test_help_is_the_default_and_lists_every_public_target(make: Make) -> None:
    targets = [
        "help",
        "train",
        "run",
        "plan",
        *VERBS[2:],
        "runs",
        "tasks",
        "compare",
        "health",
        "doctor",
        "tensorboard",
    ]
    targets += ["shell"]
    targets += [
        "build",
        "sif",
        "env",
        "test",
        "test-all",
        "test-ci",
        "test-faults",
        "test-slow",
        "test-load",
    ]
    targets += ["test-gpu", "gpu-checks", "test-image", "benchmark", "wheel", "lint", "docs"]
    targets += ["lock", "clean"]
    shown = [line.split()[0] for line in make().stdout.splitlines() if line.startswith("  ")]
    assert shown == targets


IN_VENV = "env TRAINBOX_COMMAND=make GPUS=2 .venv/bin/trainbox train --epochs 5"
TRAIN = "run --rm --no-deps train train --epochs 5"

# fmt: off
MACHINES = {
    "nvidia": (NVIDIA, in_docker("", "GPUS=2", TRAIN)),
    "docker alone": (DOCKER, in_docker(CPU_FILES, "GPUS=2", TRAIN)),
    "engine stopped": (STOPPED, IN_VENV),
    "no docker": (NO_DOCKER, IN_VENV),
}
# fmt: on


@pytest.mark.parametrize(("docker", "expected"), MACHINES.values(), ids=MACHINES.keys())
def test_train_runs_in_docker_with_gpus_or_docker_or_the_venv(
    make: Make, docker: str, expected: str
) -> None:
    settings = ["GPUS=2", "ARGS=--epochs 5", "HOST_GPUS=0000:18:00.0 0000:3b:00.0"]
    assert plainly(last(make("-n", "train", *settings, docker=docker))) == expected


@pytest.mark.parametrize(("setting", "reported"), [("V=0", 1), ("RUN_IN=venv", 0)])
def test_an_engine_that_is_not_reached_is_reported_once(
    make: Make, setting: str, reported: int
) -> None:
    message = (
        "trainbox: Docker does not reach an engine: the virtual environment .venv is used; start "
        "Docker, or set RUN_IN=venv\n"
    )
    assert make("-n", "train", setting, docker=STOPPED).stderr == message * reported


def test_each_verb_is_run_by_the_same_rule(make: Make) -> None:
    settings = ["RUN=runs/x", "FILES=a", "RUN_IN=docker-gpu", "BUILD=0"]
    others = ["runs", "tasks", "compare", "doctor", "health", "shell", "tensorboard"]
    done = make("-n", *VERBS, *others, *settings, docker=DOCKER)
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if PLUGIN in line]
    expected = [
        *(f"train {verb}" for verb in VERBS),
        "train runs",
        "train tasks",
        "train compare",
        "train doctor",
        "gpu-health health",
        "bash",
        "tensorboard",
    ]
    for command, end in zip(commands, expected, strict=True):
        assert f" {end} " in f"{command} "
    assert last(make("-n", "benchmark")) == ".venv/bin/python -P -m benchmarks"


@pytest.mark.parametrize("device", ["dev/nvidiactl", "usr/lib/wsl/lib/libcuda.so.1"])
def test_docker_without_the_runtime_is_refused_on_a_host_with_a_gpu(
    make: Make, tmp_path: Path, device: str
) -> None:
    """WSL2 has /dev/dxg, also for GPUs of other vendors, and the library only for NVIDIA's."""
    (tmp_path / device).parent.mkdir(parents=True)
    (tmp_path / device).touch()
    devices = " ".join(f"{tmp_path}{path}" for path in host.NVIDIA_DEVICE.split())
    done = make("-n", "train", f"NVIDIA_DEVICE={devices}", docker=DOCKER)
    assert done.returncode == 2
    assert f"this host has an NVIDIA GPU ({tmp_path}/{device}), and " in done.stderr


def test_values_survive_the_shell_and_come_from_the_environment_too(make: Make) -> None:
    value = """SET=width=64  name=it's "a" $HOME"""
    command = last(make("-n", "train", value.replace("$", "$$"), docker=NVIDIA, GPU_IDS="0,2"))
    assert {value, "GPU_IDS=0,2"} <= set(shlex.split(command))


def test_a_mistake_is_refused_before_the_build(make: Make) -> None:
    done = make("train", "TASK=runs/shapes.py:Shapes", docker=DOCKER)
    assert done.returncode == 2 and done.stdout == ""
    assert "trainbox: runs/shapes.py:Shapes: the container cannot mount the folder" in done.stderr


def test_the_image_is_built_first_with_its_revision(make: Make) -> None:
    done = make("-n", "train", "BASE_IMAGE=debian:12", "DOCKER_BUILD_FLAGS=--pull", docker=DOCKER)
    _, report, commands = done.stdout.split("\n", 2)
    assert report.startswith('echo "trainbox: building the image trainbox (5 GB;')
    arguments = shlex.split(commands.replace("\\\n", ""))
    assert arguments[:3] == ["docker", "build", "--pull"]
    assert {"BASE_IMAGE=debian:12", "VERSION=0.1.0"} <= set(arguments)
    assert any(text.startswith("REVISION=") for text in arguments)
    assert arguments[arguments.index("--tag") + 1] == "trainbox"
    assert not any(text.startswith("COMPILE=") for text in arguments)
    (seconds,) = (text for text in arguments if text.startswith("SOURCE_DATE_EPOCH="))
    date = datetime.fromtimestamp(int(seconds.partition("=")[2]), UTC)
    assert f"CREATED={date:%Y-%m-%dT%H:%M:%SZ}" in arguments, "the date of the commit"
    with_compiler = make("-n", "build", "COMPILE=1", docker=DOCKER).stdout
    assert "--build-arg COMPILE=1 --build-arg REVISION=" in " ".join(with_compiler.split())


@pytest.mark.parametrize(
    ("settings", "built"),
    [
        ([], True),
        (["IMAGE=trainbox:1.2"], False),
        (["BUILD=0"], False),
        (["IMAGE=mine", "BUILD=1"], True),
    ],
)
def test_only_the_tag_trainbox_is_built(make: Make, settings: list[str], built: bool) -> None:
    done = make("-n", "train", *settings, docker=DOCKER)
    assert ("docker build" in done.stdout.replace("(docker build", "")) is built
    assert ("docker image inspect" in done.stdout) is not built


def test_an_image_of_another_revision_is_used_with_a_warning(
    make: Make, plugin: Path, folders: list[str]
) -> None:
    """`docker image inspect` prints the revision label of the image, or fails."""
    at = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.strip()
    for revision, warns in ((at, False), ("0123abc", True), ("", True)):
        done = make(
            "plan",
            "IMAGE=mine",
            *folders,
            docker=f"echo '{plugin} runc'",
            inspect=f"echo {revision}",
        )
        assert done.returncode == 0, done.stderr
        warning = (
            f"the image mine contains trainbox of revision {revision or 'unknown'}, this "
            f"checkout is at {at}: build"
        )
        assert (warning in done.stderr) is warns
    done = make("plan", "IMAGE=mine", *folders, docker=f"echo '{plugin} runc'", inspect="exit 1")
    assert done.returncode == 2
    assert "Docker has no image mine: load it, build it" in done.stderr


def test_v_1_prints_the_docker_command_before_it_runs(
    make: Make, plugin: Path, folders: list[str]
) -> None:
    plugin.write_text('#!/bin/sh\necho "ran $*"\n')
    arguments = ["train", "IMAGE=mine", "TASK=mnist", "GPUS=0", *folders]
    silent, printed = (
        make(*arguments, *more, docker=f"echo '{plugin} runc'") for more in ([], ["V=1"])
    )
    ran = f"ran {CPU_FILES} run --rm --no-deps train train"
    assert (silent.returncode, silent.stdout.splitlines()) == (0, [ran]), silent.stderr
    command, ran_again = map(plainly, printed.stdout.splitlines())
    assert ran_again == ran
    assert command.startswith(f"env UID={os.getuid()} GID={os.getgid()} PWD={ROOT} IMAGE=mine ")
    assert {"GPUS=0", "TASK=mnist"} <= set(command.split())
    assert command.endswith(f" {plugin} {ran.removeprefix('ran ')}")


def test_each_user_and_checkout_has_its_own_project(make: Make, tmp_path: Path) -> None:
    """Compose names the project by USER and PWD. make sets PWD to the checkout, from any folder."""
    link = tmp_path / "link"
    link.symlink_to(ROOT)
    for pwd, seen in ((str(tmp_path), ROOT), ("", ROOT), (str(ROOT), ROOT), (str(link), link)):
        assert f"PWD={seen}" in shlex.split(last(make("-n", "train", docker=DOCKER, PWD=pwd)))


REQUIREMENTS = "REQUIREMENTS=../it's mine/my.txt"
LOCK = "deploy/extra/requirements.py lock --copy-to build/requirements -- ../it's mine/my.txt"
LOCK_IN_DOCKER = "build/requirements -- ../it's mine/my.txt"


def commands(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the commands that a dry run prints, without quotes."""
    assert done.returncode == 0, done.stderr
    lines = done.stdout.replace("\\\n", " ").splitlines()
    skipped = ("echo ", "python3 -I ")
    return [
        " ".join(" ".join(shlex.split(line)).split())
        for line in lines
        if not line.startswith(skipped)
    ]


def test_packages_are_locked_by_docker_before_the_image_is_built(make: Make) -> None:
    lock, build = commands(make("-n", "build", REQUIREMENTS, "BASE_IMAGE=b", docker=DOCKER))
    stage = "$(docker build --quiet --build-arg BASE_IMAGE=b --target uv .)"
    assert lock == f"sh deploy/extra/lock-in-docker.sh {stage} {LOCK_IN_DOCKER}"
    assert build.startswith("docker build --build-arg BASE_IMAGE=b ")
    assert build.endswith(
        " --build-arg REQUIREMENTS=requirements.txt "
        "--build-context requirements=build/requirements --tag trainbox ."
    )
    (build,) = commands(make("-n", "build", docker=DOCKER))
    assert "REQUIREMENTS" not in build and "--build-context" not in build
    trained = commands(make("-n", "train", REQUIREMENTS, docker=DOCKER))
    assert trained[0].endswith(LOCK_IN_DOCKER) and trained[1].startswith("docker build ")


def test_packages_are_added_to_the_virtual_environment(make: Make) -> None:
    done = commands(make("-n", "train", REQUIREMENTS))
    lock = done.index(f".venv/bin/python -P {LOCK}")
    install = "deploy/extra/requirements.py install -- ../it's mine/my.txt"
    assert done[lock + 1 :] == [
        f".venv/bin/python -P {install}",
        "env TRAINBOX_COMMAND=make .venv/bin/trainbox train",
    ]


def test_make_lock_writes_only_the_lock_of_the_added_packages(make: Make) -> None:
    (lock,) = commands(make("-n", "lock", REQUIREMENTS, "ARGS=--upgrade", docker=DOCKER))
    assert lock.endswith("build/requirements --upgrade -- ../it's mine/my.txt")
    *_, lock = commands(make("-n", "lock", REQUIREMENTS))
    assert lock == f".venv/bin/python -P {LOCK}"
    *_, lock = commands(make("-n", "lock"))
    assert lock.endswith("-o requirements-dev.lock")


def test_the_image_of_apptainer(make: Make) -> None:
    settings = ["SIF=x.sif", "APPTAINER_BUILD_FLAGS=--force", "BASE_IMAGE=b", "COMPILE=1"]
    done = make("-n", "sif", *settings)
    commands = done.stdout.replace("\\\n", " ").partition("\n")[2]
    build, digest = plainly(commands).split(" sha256sum ")
    build = re.sub("CREATED=[^ ]+", "CREATED=D", re.sub("REVISION=[^ ]+", "REVISION=R", build))
    assert build == (
        "apptainer build --force --build-arg BASE_IMAGE=b --build-arg COMPILE=1 "
        "--build-arg REVISION=R --build-arg VERSION=0.1.0 --build-arg CREATED=D "
        "x.sif deploy/apptainer/trainbox.def"
    )
    assert digest == "x.sif > x.sif.sha256"


def test_the_exit_code_is_shown(
    make: Make, plugin: Path, folders: list[str], tmp_path: Path
) -> None:
    plugin.write_text("#!/bin/sh\nexit 75\n")
    done = make("train", *folders, docker=f"echo '{plugin} runc'")
    assert (done.returncode, "Error 75" in done.stderr) == (2, True)
    assert (tmp_path / "RUNS_DIR").is_dir(), (
        "make did not create the folder, so the daemon would create it as root"
    )


def test_an_old_python_is_refused_with_its_path(make: Make, tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make(f"{tmp_path}/venv/bin/uv", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode == 2
    assert "Python 3.11 or newer" in done.stderr and str(old) in done.stderr


def test_the_environment_is_installed_from_the_locks_with_hashes(
    make: Make, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    lines = make("-n", "train", f"VENV={venv}").stdout.splitlines()
    installs = [line for line in lines if " install " in line]
    assert len(installs) == 3
    assert f"--require-hashes -r {venv}/uv.lock" in installs[0]
    assert installs[1].endswith("--require-hashes -r requirements.lock")
    assert installs[2].endswith("--no-build-isolation --no-deps --editable .")


@pytest.fixture
def fresh_venv(tmp_path: Path) -> Path:
    """Return a virtual environment without packages, whose pip installs a fake uv."""
    folder = tmp_path / "venv/bin"
    folder.mkdir(parents=True)
    scripts = {
        tmp_path / "python3": f'[ "$1" != -I ] || exec {sys.executable} "$@"\n',
        tmp_path / "uv": "",
        folder / "python": f"{shutil.which('cp')} {tmp_path}/uv {folder}/uv\n",
        folder / "trainbox": "echo trained\n",
    }
    for path, script in scripts.items():
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)
    return tmp_path / "venv"


def test_make_reports_the_installation_instead_of_its_commands(
    make: Make, fresh_venv: Path
) -> None:
    settings = (f"VENV={fresh_venv}", f"PYTHON={fresh_venv.parent}/python3")
    done = make("train", *settings)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert done.stderr == (
        f"trainbox: creating the virtual environment {fresh_venv} ...\n"
        f"trainbox: installing 6 GB of packages in {fresh_venv} (usually 1 to 10 minutes) ...\n"
    )
    done = make("train", *settings)
    assert (done.stdout, done.stderr) == ("trained\n", "")
    done = make("train", *settings, "V=1")
    command = f"env TRAINBOX_COMMAND=make {fresh_venv}/bin/trainbox train"
    assert [plainly(line) for line in done.stdout.splitlines()] == [command, "trained"]


def test_an_error_of_the_installation_is_shown(make: Make, fresh_venv: Path) -> None:
    (fresh_venv.parent / "uv").write_text("#!/bin/sh\necho 'error: no network' >&2\nexit 2\n")
    done = make("train", f"VENV={fresh_venv}", f"PYTHON={fresh_venv.parent}/python3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "\nerror: no network\n" in done.stderr
    assert not (fresh_venv / ".train").exists()


def test_clean_keeps_runs_data_and_tasks(make: Make) -> None:
    arguments = shlex.split(make("-n", "clean").stdout)
    assert not {"runs", "data", "my_tasks", "."} & set(arguments[: arguments.index("find")])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["trian"], "trian is not a target of make: did you mean make train?"),
        (["new"], "new is not a target of make: copy a file, as in mkdir -p my_tasks && cp entry"),
        (["nothing"], "nothing is not a target of make: `make help` lists them"),
        (["train", "sweeep"], "sweeep is not a target of make: did you mean make sweep?"),
        (
            ["train", "my_tasks/rings.py:Rings"],
            "my_tasks/rings.py:Rings is not a target of make: did you mean make train "
            "TASK=my_tasks/rings.py:Rings?",
        ),
        (
            ["train", "work/train.py"],
            "work/train.py is not a target of make: did you mean make run SCRIPT=work/train.py?",
        ),
        (["sweep", "a.toml"], "a.toml is not a target of make: did you mean make sweep CONFIG=a.t"),
        (["drill", "a.py"], "a.py is not a target of make: did you mean make drill SCRIPT=a.py?"),
        (
            ["evaluate", "runs/one"],
            "runs/one is not a target of make: did you mean make evaluate RUN",
        ),
        (
            ["export", "runs/a/"],
            "runs/a/ is not a target of make: did you mean make export RUN=",
        ),
        (
            ["predict", "data/a.jpg"],
            "data/a.jpg is not a target of make: did you mean make predict FILES=data/a.jpg?",
        ),
        (
            ["predict", "runs/a", "b.jpg"],
            "runs/a is not a target of make: did you mean make predict R",
        ),
        (
            ["predict", "RUN=runs/a", "FILES=a.jpg", "b.jpg"],
            "b.jpg is not a target of make: quote a value with spaces, as in make predict "
            'FILES="a.jpg b.jpg"',
        ),
        (
            ["train", "runs/x"],
            "runs/x is not a target of make: quote a value with spaces, as in make",
        ),
        (["runs/x"], "runs/x is not a target of make: `make help` lists them"),
        (
            ["evaluate", "a.toml"],
            "a.toml is not a target of make: quote a value with spaces, as in",
        ),
        (["train", "task=mnist"], "make train does not use task: write TASK"),
        (
            ["train", "SET=width=8", "depth=3"],
            'make train does not use depth: quote all fields of the task, as in SET="width=8 dep',
        ),
        (
            ["train", "ARGS=--epochs", "1"],
            '1 is not a target of make: quote a value with spaces, as in make train ARGS="--epochs',
        ),
    ],
)
def test_a_mistyped_command_line_of_make(make: Make, arguments: list[str], text: str) -> None:
    ended = make(*arguments, RUN_IN="venv")
    assert ended.returncode == 2
    assert f"trainbox: {text}" in ended.stderr
    assert not ended.stdout


@pytest.mark.parametrize(
    ("goals", "cure"),
    [
        (["test", "tests/deploy"], "did you mean make test PYTEST_ARGS=tests/deploy?"),
        (["test-slow", "tests/a.py"], "did you mean make test-slow PYTEST_ARGS=tests/a.py?"),
        (["test", "tests/a.py::test_b"], "did you mean make test PYTEST_ARGS=tests/a.py::test_b?"),
        (["test", "sweeep"], "did you mean make sweep?"),
        (["train", ".venvs/a"], 'quote a value with spaces, as in make train ARGS="--epochs 3"'),
    ],
)
def test_a_goal_that_is_no_target(goals: list[str], cure: str) -> None:
    with pytest.raises(host.Refusal) as refused:
        host.check_goals(goals, ["test", "test-slow", "train", "sweep"], {})
    assert str(refused.value) == f"{goals[1]} is not a target of make: {cure}"


def test_a_file_of_the_virtual_environment_is_a_goal() -> None:
    host.check_goals([".venv/.dev", "train"], ["train"], {})
    host.check_goals(["x/.dev"], [], {"VENV": "x"})


def test_the_environment_of_a_running_training_is_not_removed(make: Make, tmp_path: Path) -> None:
    (python := tmp_path / "venv/bin/python").parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    words = [python, "-S", "-c", "import time; print(flush=True); time.sleep(60)"]
    env = {"VENV": str(tmp_path / "venv")}
    for program in ("/x/bin/trainbox", "trainer", "ipykernel"):
        with subprocess.Popen([*words, program, "train"], stdout=subprocess.PIPE) as running:
            try:
                assert running.stdout is not None and running.stdout.readline()
                if program == "ipykernel":
                    host.check_clean(env)
                    continue
                with pytest.raises(host.Refusal, match=rf"process {running.pid} \(python -S -c"):
                    host.check_clean(env)
                ended = make("clean", **env)
            finally:
                running.kill()
        assert (ended.returncode, python.is_symlink()) == (2, True)
        assert "stop it before you remove its environment" in ended.stderr
