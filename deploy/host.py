"""Run a verb of make: in Docker with GPUs, in Docker on the CPU, or in a virtual environment.

    make train GPUS=3        runs python3 -I deploy/host.py train
    make -n train GPUS=3     prints the commands

The settings are environment variables, and make also passes on the settings of its command line.
Pure functions of the settings and of the machine decide what is run. Python 3.9 and its standard
library are enough.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

# What trainbox reads. TRAINBOX_<OPTION> is passed on as well.
SETTINGS = (
    "GPUS GPU_IDS STRATEGY PROCESSES DEVICE NNODES NODE_RANK RDZV_ENDPOINT RDZV_ID RDZV_TIMEOUT_S "
    "TASK SET HEALTH HEALTH_LIMITS"
).split()
_OF_COMPOSE = "RUNS_DIR DATA_DIR TASKS_DIR PROJECT_DIR TENSORBOARD_PORT HEALTH_PORT".split()
# The container gets these, except for paths of this machine.
_HANDED_ON = (
    "TRAINBOX_* NCCL_* GLOO_* TORCH_* PYTORCH_* CUDA_LAUNCH_BLOCKING OMP_NUM_THREADS".split()
)
_OF_THIS_MACHINE = (
    "*_DIR TORCH_HOME TRAINBOX_HEARTBEAT TRAINBOX_BUILD_INFO TRAINBOX_IMAGE_DIGEST TRAINBOX_COMMAND"
).split()
# Folders whose mount would hide runs/, data/ or the image's own files. deploy/apptainer/trainbox.sh
# has the same list.
NOT_MOUNTED = (
    "/ ./ runs/ data/ /workspace/ /workspace/runs/ /workspace/data/ /tmp/ /opt/ /bin/ /sbin/ /lib/ "
    "/lib64/ /usr/* /etc/* /proc/* /sys/* /dev/* /opt/venv/* /opt/trainbox/*"
).split()
# What this file, the Makefile, Docker and docker-compose.yml read besides.
_OF_MAKE = (
    "ARGS CONFIG SCRIPT MODULE RUN_OPTIONS RUN FILES RUN_IN IMAGE BUILD BASE_IMAGE COMPILE "
    "REQUIREMENTS PYTHON VENV SHELL V HOST_GPUS INFINIBAND NVIDIA_DEVICE DOCKER_* COMPOSE_* "
    "BUILDKIT_* MEMORY SHM_SIZE TMP_SIZE GPU_COUNT NETWORK_MODE"
).split()
_DEVELOPMENT = "deploy/development.mk"
_SIMILAR = 0.8  # TASKS and TASK
KINDS = ("docker-gpu", "docker-cpu", "venv")
_OF_RUN = ("verify", "evaluate", "predict", "export")  # these need RUN
_LISTS = ("FILES", "PYTEST_ARGS")  # settings with several values
_WITH_CONFIG = ("train", "plan", "sweep")  # of a task
# Their output is for other programs or for pasting, so V=1 does not print their command.
_FOR_PROGRAMS = ("plan", "predict", "runs", "tasks", "health", "doctor")
_DOCKER_ANSWERS_S = 60.0
_SHOWN_AFTER_S, _LOOK_EVERY_S = 2.0, 0.1  # of the log of a build
# Only a machine with an NVIDIA GPU has one of these. WSL2 has /dev/dxg for the GPUs of all vendors,
# and the library only for NVIDIA's.
NVIDIA_DEVICE = "/dev/nvidiactl /usr/lib/wsl/lib/libcuda.so.1"


class Refusal(Exception):
    """A mistake of the user, with its remedy."""


@dataclass(frozen=True)
class Machine:
    """What the decision depends on, besides the settings.

    Attributes:
        folder: the checkout, as the user has named it.
        compose: the path of Compose's plugin, or "" without it or without an engine.
        has_nvidia: whether Docker has the NVIDIA runtime.
        gpu: a path that only a machine with an NVIDIA GPU has, or "".
        gpus: the number of its GPUs.
    """

    folder: str = "."
    compose: str = ""
    has_nvidia: bool = False
    gpu: str = ""
    gpus: int = 0
    has_infiniband: bool = False
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class Command:
    """A command, with the variables that it gets, in `folder` or here."""

    argv: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""

    def __str__(self) -> str:
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        line = shlex.join([*(["env", *variables] if variables else []), *self.argv])
        return f"cd {shlex.quote(self.folder)} && exec {line}" if self.folder else line


def words(text: str) -> list[str]:
    """Return the arguments in a setting, as a shell would split it."""
    try:
        return [os.path.expanduser(word) for word in shlex.split(text)]
    except ValueError as error:
        raise Refusal(f"{text!r}: {error}: close the quotes") from error


def place(env: Mapping[str, str], machine: Machine) -> str:
    """Return where to run.

    A GPU that Docker cannot use is an error, and not a training on the CPU.
    """
    kind, on_cpu = env.get("RUN_IN", ""), env.get("GPUS") == "0"
    if not kind and not machine.compose:
        kind = "venv"
    elif not kind and machine.has_nvidia:
        kind = "docker-gpu"
    elif not kind and machine.gpu and not on_cpu:
        raise Refusal(
            f"this host has an NVIDIA GPU ({machine.gpu}), and Docker has no NVIDIA runtime: "
            "install nvidia-container-toolkit, or set RUN_IN=docker-gpu (CDI, Docker Desktop), "
            "RUN_IN=venv, or GPUS=0 for the CPU"
        )
    kind = kind or "docker-cpu"
    if kind not in KINDS:
        raise Refusal(f"RUN_IN={kind} is unknown: set RUN_IN=docker-gpu, docker-cpu or venv")
    return "docker-cpu" if on_cpu and kind == "docker-gpu" else kind


def is_of_script(verb: str, env: Mapping[str, str]) -> bool:
    """Return whether the verb is about a user's script and not about a task."""
    named = env.get("SCRIPT") or env.get("MODULE")
    return verb == "run" or bool(named and verb in ("plan", "sweep", "drill"))


def targets(makefiles: Iterable[str]) -> list[str]:
    """Return the names that are left of a colon in the texts of the makefiles."""
    found = re.findall(r"^([a-z][a-z -]*):(?!=)", "\n".join(makefiles), re.MULTILINE)
    return list(dict.fromkeys(" ".join(found).split()))


def setting_of(verb: str, value: str) -> str:
    """Return the setting of the verb that takes a value which is written without it, or ""."""
    ending, is_path = os.path.splitext(value)[1], "/" in value
    if verb.startswith("test"):
        return "PYTEST_ARGS" if is_path or ending == ".py" else ""
    if ".py:" in value:
        return "TASK"
    if verb in _OF_RUN and value.removeprefix("./").startswith("runs/"):
        return "RUN"
    if verb == "predict" and (is_path or ending):
        return "FILES"
    if ending == ".toml" and verb in _WITH_CONFIG:
        return "CONFIG"
    return "SCRIPT" if ending == ".py" else ""


def check_goals(goals: Sequence[str], known: Sequence[str], env: Mapping[str, str]) -> None:
    """Check the targets of make's command line; those in the virtual environment are files.

    Raises:
        Refusal: one of them does not exist.
    """
    venv = env.get("VENV") or ".venv"
    for goal in goals:
        if goal in known or goal.startswith(f"{venv}/"):
            continue
        if goal == "new":  # a container cannot write to the folder of tasks
            raise Refusal(
                "new is not a target of make: copy a file, as in mkdir -p my_tasks && cp "
                "entrypoint/templates/classification.py.txt my_tasks/mine.py, and train it with "
                "make train TASK=my_tasks/mine.py:Gestures"
            )
        near = [] if "/" in goal else difflib.get_close_matches(goal, known, n=1)
        verb = goals[0]
        if verb in known and (setting := setting_of(verb, goal)):
            if setting in _LISTS and env.get(setting):
                raise Refusal(
                    f"{goal} is not a target of make: quote a value with spaces, as in make "
                    f'{verb} {setting}="{env[setting]} {goal}"'
                )
            if setting == "SCRIPT" and not is_of_script(verb, {setting: goal}):
                verb = "run"
            raise Refusal(
                f"{goal} is not a target of make: did you mean make {verb} {setting}={goal}?"
            )
        if goals.index(goal) and goals[0] in known and not near:
            raise Refusal(
                f"{goal} is not a target of make: quote a value with spaces, as in make "
                f'{goals[0]} ARGS="--epochs 3"'
            )
        cure = f"did you mean make {near[0]}?" if near else "`make help` lists them"
        raise Refusal(f"{goal} is not a target of make: {cure}")


def check_clean(env: Mapping[str, str]) -> None:
    """Check that no process of Trainbox uses the environment that `make clean` removes.

    Raises:
        Refusal: a process uses it.
    """
    programs = os.path.abspath(env.get("VENV") or ".venv") + "/bin/"
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            with open(path, "rb") as file:
                words = file.read().decode(errors="replace").rstrip("\0").split("\0")
            if words[0].startswith(programs) and _is_ours(words[1:]):
                shown = " ".join([os.path.basename(words[0]), *words[1:]])[:100]
                raise Refusal(
                    f"process {path.split('/')[2]} ({shown}) uses "
                    f"{os.path.dirname(programs[:-1])}: stop it before you remove its environment"
                )


def _is_ours(words: Sequence[str]) -> bool:
    """Return whether a command of Python runs a program of Trainbox."""
    return any(os.path.basename(word) in ("trainbox", "trainer", "entrypoint") for word in words)


def check_settings(verb: str, env: Mapping[str, str]) -> None:
    """Check that the verb uses each setting of make's command line.

    A script may read other variables, and exported ones may be for other programs.

    Raises:
        Refusal: it does not use one of them.
    """
    of_script = is_of_script(verb, env)
    for name in re.findall(r"(?<!\\) ([A-Za-z_]\w*)=(?=\S)", env.get("MAKEFLAGS", "")):
        if name == "CONFIG" and (of_script or verb not in _WITH_CONFIG):
            what = f"{verb} of a script" if of_script else verb
            raise Refusal(f"make {what} does not use CONFIG: drop it")
        known = (*SETTINGS, *_OF_COMPOSE, *_HANDED_ON, *_OF_MAKE)
        if of_script or _matches(name, known):
            continue
        cure = (
            "write options of trainbox in ARGS, as in ARGS='--epochs 5' (`make help` lists the "
            "settings)"
        )
        near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=_SIMILAR)
        if _matches(name.upper(), known):
            cure = f"write {name.upper()}"
        elif near:
            cure = f"write {near[0]}"
        elif env.get("SET"):
            cure = f'quote all fields of the task, as in SET="{env["SET"]} {name}=..."'
        raise Refusal(f"make {verb} does not use {name}: {cure}")


def project(env: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the folder of the script, or "" for this one, and the arguments that name it."""
    script, module, folder = (env.get(n, "") for n in ("SCRIPT", "MODULE", "PROJECT_DIR"))
    if script and module:
        raise Refusal("SCRIPT and MODULE are set: name only one of them")
    if module:
        return folder, ["-m", module]
    if not script:
        raise Refusal("SCRIPT is not set: name a script, as in make run SCRIPT=train.py")
    if script.startswith(("/", "../")):
        path = os.path.abspath(script)
        folder = folder or os.path.dirname(path)
        inside = os.path.relpath(path, os.path.abspath(folder))
        return folder, [path if inside.startswith("..") else inside]
    return folder, [script]


def task_folder(env: Mapping[str, str]) -> str:
    """Return the folder of the file of the task in TASK or ARGS, or "" without one.

    Raises:
        Refusal: its mount would hide other files of the container.
    """
    named = [env.get("TASK", ""), *words(env.get("ARGS", ""))]
    file = next((word for word in named if ".py:" in word), None)
    if file is None:
        return ""
    folder = os.path.join(os.path.dirname(file), "").removeprefix("./") or "./"
    if any(fnmatchcase(folder, pattern) for pattern in NOT_MOUNTED):
        raise Refusal(
            f"{file}: the container cannot mount the folder of this file: move the file into a "
            f"folder of its own, such as my_tasks/{os.path.basename(file)}"
        )
    return folder.rstrip("/")


def config_words(verb: str, env: Mapping[str, str], kind: str) -> tuple[list[str], list[str]]:
    """Return trainbox's arguments for CONFIG, and Docker's arguments that mount the file."""
    config = env.get("CONFIG", "")
    if not config or is_of_script(verb, env) or verb not in _WITH_CONFIG:
        return [], []
    if kind == "venv":
        return ["--config", config], []
    if not os.path.exists(config):
        raise Refusal(f"CONFIG={config} does not exist: name the file of an experiment")
    inside = os.path.basename(config) if config.startswith(("/", "../")) else config
    mounted = f"{os.path.realpath(config)}:/workspace/{inside}:ro"
    return ["--config", inside], ["-v", mounted]


def arguments(verb: str, env: Mapping[str, str], kind: str) -> list[str]:
    """Return the arguments of trainbox."""
    given, config = words(env.get("ARGS", "")), config_words(verb, env, kind)[0]
    if is_of_script(verb, env):
        runs = ["--runs-dir", "/workspace/runs"] if kind != "venv" and verb != "drill" else []
        after = ["--", *given] if given else []
        begin = ["run"] if verb == "run" else [verb, "run", *runs]
        return [*begin, *words(env.get("RUN_OPTIONS", "")), *project(env)[1], *after]
    if verb in _OF_RUN:
        example = f"make {verb} RUN=runs/NAME"
        if not (run := env.get("RUN")):
            raise Refusal(f"RUN is not set: name a run, as in {example}")
        if verb != "predict":
            return [verb, run, *given]
        named = [sorted(glob.glob(word)) or [word] for word in words(env.get("FILES", ""))]
        if not named:
            raise Refusal(
                f"FILES is not set: name files or folders, as in {example} FILES=data/new"
            )
        return [verb, *given, "--", run, *(file for files in named for file in files)]
    return [verb, *config, *given]


def in_venv(verb: str, env: Mapping[str, str]) -> Command:
    """Return the command of a verb in the virtual environment."""
    venv = env.get("VENV") or ".venv"
    runs, data = (env.get(n) or env.get(f"TRAINBOX_{n}", "") for n in ("RUNS_DIR", "DATA_DIR"))
    if verb == "shell":
        path = f"{os.path.abspath(venv)}/bin:{env.get('PATH', '')}"
        return Command([env.get("SHELL") or "sh"], {"PATH": path})
    if verb == "tensorboard":
        port = env.get("TENSORBOARD_PORT") or "6006"
        shown = ["--logdir", runs or "runs", "--host", "127.0.0.1", "--port", port]
        return Command([f"{venv}/bin/tensorboard", *shown])
    variables = {"TRAINBOX_COMMAND": "make", **_given(env, SETTINGS)}
    called = arguments(verb, env, "venv")
    folder = project(env)[0] if is_of_script(verb, env) else ""
    if folder:
        variables["TRAINBOX_RUNS_DIR"] = os.path.abspath(runs or "runs")
        return Command([f"{os.path.abspath(venv)}/bin/trainbox", *called], variables, folder)
    variables |= {f"TRAINBOX_{n}": v for n, v in (("RUNS_DIR", runs), ("DATA_DIR", data)) if v}
    return Command([f"{venv}/bin/trainbox", *called], variables)


def in_docker(verb: str, env: Mapping[str, str], machine: Machine, kind: str) -> Command:
    """Return the command of a verb in a container.

    With `run` instead of `up`, the exit code is trainbox's own, and two trainings do not replace
    each other. Compose's plugin is called by its path, because `docker compose run` without a
    terminal exits at SIGTERM and leaves the container running.
    """
    files = ["docker-compose.yml", "docker-compose.cpu.yml"] if kind == "docker-cpu" else []
    on_nodes = env.get("NNODES", "") not in ("", "1")
    # Not on one node, because Docker without root cannot lift the limit of locked memory.
    if on_nodes and machine.has_infiniband:
        files = [*(files or ["docker-compose.yml"]), "docker-compose.infiniband.yml"]
    settings, gpus = _given(env, SETTINGS), env.get("GPUS", "")
    folders = {**folders_of(verb, env), **_given(env, _OF_COMPOSE)}
    # Compose names the project by user and PWD.
    variables = {"UID": str(machine.uid), "GID": str(machine.gid), "PWD": machine.folder}
    variables |= {"IMAGE": env.get("IMAGE") or "trainbox", "TRAINBOX_COMMAND": "make"}
    if on_nodes:
        variables["NETWORK_MODE"] = "host"
    # If more GPUs are requested than the host has, Docker would fail with its own message. The
    # container therefore gets all GPUs, and trainbox checks the number.
    if env.get("GPU_IDS") or (gpus and gpus not in map(str, range(1, machine.gpus + 1))):
        variables["GPU_COUNT"] = "all"
    if folders.get("TASKS_DIR", "").startswith("/"):
        variables["TASKS_AT"] = folders["TASKS_DIR"]
    variables |= {name: folders[name] for name in _OF_COMPOSE if name in folders} | settings
    begin = [*([machine.compose] if machine.compose else ["docker", "compose"])]
    begin += [word for file in files for word in ("-f", file)]
    if verb == "tensorboard":
        return Command([*begin, "up", "--no-deps", "tensorboard"], variables)
    run = [*begin, "run", "--rm", "--no-deps"]
    if verb == "shell":
        return Command([*run, "train", "bash"], variables)
    options = [word for name in _handed_on(env) for word in ("-e", name)]
    called = arguments(verb, env, kind)
    if verb == "run":  # the service `run` has the entrypoint `trainbox run`
        return Command([*run, *options, "run", *called[1:]], variables)
    if is_of_script(verb, env):
        entrypoint = ["--entrypoint", "tini -s -- trainbox"]
        return Command([*run, *entrypoint, *options, "run", *called], variables)
    service = "gpu-health" if verb == "health" else "train"
    mounts = config_words(verb, env, kind)[1]
    return Command([*run, *mounts, *options, service, *called], variables)


def folders_of(verb: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the folders that are not the default ones, by the names that Compose has for them."""
    found = {name: env.get(f"TRAINBOX_{name}", "") for name in ("RUNS_DIR", "DATA_DIR")}
    found["TASKS_DIR"] = task_folder(env)
    if is_of_script(verb, env):
        found["PROJECT_DIR"] = project(env)[0]
    return {
        name: env.get(name) or folder for name, folder in found.items() if env.get(name) or folder
    }


def made_folders(verb: str, env: Mapping[str, str]) -> list[str]:
    """Return the folders to make, because folders that the daemon makes belong to root.

    A script may download its data to `data` of its project, which is mounted read-only otherwise.
    """
    folders = folders_of(verb, env)
    names = (("RUNS_DIR", "runs"), ("DATA_DIR", "data"), ("TASKS_DIR", "my_tasks"))
    made = [folders.get(name, default) for name, default in names]
    of_project = os.path.join(folders.get("PROJECT_DIR", "."), "data")
    return [*made, of_project] if is_of_script(verb, env) else made


def _given(env: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: env[name] for name in names if env.get(name)}


def _handed_on(env: Mapping[str, str]) -> list[str]:
    return sorted(n for n in env if _matches(n, _HANDED_ON) and not _matches(n, _OF_THIS_MACHINE))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# Effects: what the machine has, and what runs.


def look(env: Mapping[str, str]) -> Machine:
    """Return what this machine has."""
    folder, pwd = os.getcwd(), env.get("PWD", "")  # after `make -C`, PWD is the caller's folder
    answer = [] if env.get("RUN_IN") == "venv" else _docker_answer(env)
    return Machine(
        folder=pwd if pwd and os.path.realpath(pwd) == folder else folder,
        compose=next((word for word in answer if word.endswith("docker-compose")), ""),
        has_nvidia="nvidia" in answer,
        gpu=next(filter(os.path.exists, env.get("NVIDIA_DEVICE", NVIDIA_DEVICE).split()), ""),
        gpus=len(env.get("HOST_GPUS", "").split() or glob.glob("/proc/driver/nvidia/gpus/*")),
        has_infiniband=bool(env.get("INFINIBAND", glob.glob("/dev/infiniband"))),
        uid=os.getuid(),
        gid=os.getgid(),
    )


def _docker_answer(env: Mapping[str, str]) -> list[str]:
    """Return the path of Compose's plugin and the engine's runtimes, if there is an engine."""
    template = (
        '{{range .ClientInfo.Plugins}}{{if eq .Name "compose"}}{{.Path}}{{end}}{{end}} '
        "{{range $name, $_ := .Runtimes}}{{$name}} {{end}}"
    )
    try:
        return _printed("docker", "info", "--format", template).split()
    except FileNotFoundError:
        return []
    except (OSError, subprocess.SubprocessError):
        if not env.get("RUN_IN"):
            report(
                "Docker does not reach an engine: the virtual environment "
                f"{env.get('VENV') or '.venv'} is used; start Docker, or set RUN_IN=venv"
            )
        return []


def report(text: str) -> None:
    print(f"trainbox: {text}", file=sys.stderr, flush=True)


def make(env: Mapping[str, str], target: str) -> None:
    """Let make make a target, which it only prints with -n. If this fails, exit with its code."""
    silent = [] if is_dry(env) else ["--silent"]
    argv = [env.get("MAKE") or "make", "--no-print-directory", *silent, target]
    if target != "build" or sys.stderr.isatty() or is_dry(env):
        code = subprocess.call(argv, close_fds=False)  # make -j has opened pipes for its own calls
    elif (code := _built(argv)) == 0:
        report(f"the image {env.get('IMAGE') or 'trainbox'} is ready")
    if code:
        if target == "build":
            report("the image was not built: correct the error above, or do without: RUN_IN=venv")
        sys.exit(code)


def _built(argv: Sequence[str]) -> int:
    """Build an image, and return the exit code.

    The log has a hundred lines, also if nothing is built. It is shown if this takes some time or
    fails.
    """
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, close_fds=False) as build:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if build.wait(_SHOWN_AFTER_S) == 0:
                    return 0
            shown, is_last = 0, False
            while not is_last:
                is_last = build.poll() is not None
                while data := os.pread(log.fileno(), 2**16, shown):
                    shown += len(data)
                    os.write(2, data)
                time.sleep(_LOOK_EVERY_S)
        return build.returncode


def is_dry(env: Mapping[str, str]) -> bool:
    """Return whether make was called with -n, and prints commands only."""
    return "n" in f"{env.get('MAKEFLAGS', '')} ".split(" ", 1)[0].partition("-")[0]


def ready(verb: str, env: Mapping[str, str], kind: str) -> None:
    """Make what the verb needs: the environment, or the image and the folders to mount."""
    if kind == "venv":
        make(
            env, "extra-venv" if env.get("REQUIREMENTS") else f"{env.get('VENV') or '.venv'}/.train"
        )
        return
    # Only this repository's own tag is built. BUILD=0 uses the existing image, for example without
    # a network. BUILD=1 builds any tag.
    is_own = (env.get("IMAGE") or "trainbox") in ("trainbox", "trainbox:latest")
    make(env, "build" if (env.get("BUILD") or str(int(is_own))) != "0" else "image")
    folders = made_folders(verb, env)
    if is_dry(env):
        print(Command(["mkdir", "-p", *folders]), flush=True)
        return
    for folder in folders:
        os.makedirs(folder, exist_ok=True)


def main(verb: str) -> None:
    """Make everything ready for a verb, and become its command, which has the exit code."""
    env = dict(os.environ)
    goals = env.pop("MAKECMDGOALS", "").split()
    with open("Makefile", encoding="utf-8") as one, open(_DEVELOPMENT, encoding="utf-8") as other:
        known = targets((one.read(), other.read()))
    check_goals(goals, known, env)
    if verb == "clean":
        check_clean(env)
        return
    machine = look(env)
    kind = place(env, machine)
    if verb == "lock":
        make(env, "lock-venv" if kind == "venv" else "lock-docker")
        return
    # A mistake is found before the image is built.
    check_settings(verb, env)
    command = in_venv(verb, env) if kind == "venv" else in_docker(verb, env, machine, kind)
    ready(verb, env, kind)
    variables = {**env, **command.variables}
    if kind != "venv" and not is_dry(env):  # for the manifest
        asked = ["docker", "image", "inspect", "--format", "{{.Id}}", variables["IMAGE"]]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            variables["TRAINBOX_IMAGE_DIGEST"] = _printed(*asked)
    if verb == "tensorboard" and not is_dry(env):
        report(
            f"TensorBoard is at http://localhost:{env.get('TENSORBOARD_PORT') or '6006'} (if the "
            "port is taken: make tensorboard TENSORBOARD_PORT=7007)"
        )
    if is_dry(env) or (env.get("V") == "1" and verb not in _FOR_PROGRAMS):
        print(command, flush=True)
    if not is_dry(env):
        os.chdir(command.folder or ".")
        os.execvpe(command.argv[0], list(command.argv), variables)


def _printed(*argv: str) -> str:
    return subprocess.run(
        argv,
        timeout=_DOCKER_ANSWERS_S,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ).stdout.strip()


if __name__ == "__main__":
    if sys.version_info < (3, 9):
        report(f"make needs Python 3.9 or newer, and {sys.executable} is older: add PYTHON=PATH")
        sys.exit(2)
    try:
        main(sys.argv[1])
    except Refusal as refusal:
        report(str(refusal))
        sys.exit(2)
    except OSError as error:
        report(
            f"{error.filename} cannot be used ({error.strerror}): README.md lists what make needs"
        )
        sys.exit(2)
