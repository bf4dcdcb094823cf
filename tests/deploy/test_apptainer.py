"""deploy/apptainer with a stand-in for Apptainer, and its definition next to the Dockerfile."""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy import host
from tests.support.commands import clean_environment

ROOT = Path(__file__).parents[2]
WRAPPER = ROOT / "deploy/apptainer/trainbox.sh"
DEFINITION = ROOT / "deploy/apptainer/trainbox.def"
PRINTS_ITS_CALL = """#!{python}
import json, os, sys
prefix = "APPTAINERENV_"
found = os.environ.items()
given = {{name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}}
print(json.dumps([sys.argv[1:], given]))
"""


@dataclass
class Call:
    """A call of Apptainer: its arguments, and the variables of the container."""

    words: list[str]
    env: dict[str, str]

    @property
    def binds(self) -> list[str]:
        return [
            value
            for word, value in zip(self.words, self.words[1:], strict=False)
            if word == "--bind"
        ]


@dataclass
class Wrapper:
    folder: Path

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the wrapper in a folder with a trainbox.sif."""
        env = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "TMPDIR": str(self.folder),
            "NVIDIA_DEVICE": "/none",
            "INFINIBAND": "/none",
        } | env
        # the variables of the developer do not count
        env = dict.fromkeys(("SIF", "RUNS_DIR", "DATA_DIR", "TASKS_DIR", "PROJECT_DIR"), "") | env
        return subprocess.run(
            [WRAPPER, *words],
            cwd=self.folder,
            env=clean_environment(**env),
            capture_output=True,
            text=True,
        )

    def __call__(self, *words: str, **env: str) -> Call:
        done = self.run(*words, **env)
        assert done.returncode == 0, done.stderr
        return Call(*json.loads(done.stdout))


@pytest.fixture
def wrapper(tmp_path: Path) -> Wrapper:
    (tmp_path / "bin").mkdir()
    tells = tmp_path / "bin/apptainer"
    tells.write_text(PRINTS_ITS_CALL.format(python=sys.executable))
    tells.chmod(0o755)
    (tmp_path / "trainbox.sif").touch()
    return Wrapper(tmp_path)


def test_the_container_is_closed_except_for_the_folders(wrapper: Wrapper) -> None:
    here = wrapper.folder
    call = wrapper("train", "digits", "--set", "name=it's $HOME")
    assert call.words == [
        *("exec", "--containall", "--no-eval"),
        *("--home", f"{here}/trainbox-{os.getuid()}:/tmp", "--pwd", "/workspace"),
        *("--bind", f"{here}/runs:/workspace/runs", "--bind", f"{here}/data:/workspace/data"),
        *("trainbox.sif", "trainbox", "train", "digits", "--set", "name=it's $HOME"),
    ]
    assert (here / "runs").is_dir() and (here / "data").is_dir()
    assert stat.S_IMODE((here / f"trainbox-{os.getuid()}").stat().st_mode) == 0o700
    assert wrapper("plan").words[-3:] == ["trainbox.sif", "trainbox", "plan"], (
        "the folder of /tmp is used again"
    )


@pytest.mark.parametrize(("device", "given"), [("/dev/null", True), ("/none", False)])
def test_the_driver_and_infiniband_are_mounted_if_the_host_has_them(
    wrapper: Wrapper, device: str, given: bool
) -> None:
    assert ("--nv" in wrapper("train", NVIDIA_DEVICE=device).words) is given
    assert (device in wrapper("train", INFINIBAND=device).binds) is given


PASSED_ON = "TRAINBOX_EPOCHS TRAINBOX_IMAGE_DIGEST SLURM_JOB_ID SLURM_STEP_NODELIST"
PASSED_ON += " PET_NNODES CUDA_VISIBLE_DEVICES NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME https_proxy"
PASSED_ON += " OMP_NUM_THREADS NCCL_DEBUG TORCH_DISTRIBUTED_DEBUG PYTORCH_ALLOC_CONF"
PASSED_ON += " CUDA_LAUNCH_BLOCKING"
OF_THE_HOST = "PYTHONPATH LD_LIBRARY_PATH TORCH_HOME TORCH_EXTENSIONS_DIR TRAINBOX_RUNS_DIR"
OF_THE_HOST += " TRAINBOX_HEARTBEAT TRAINBOX_BUILD_INFO"


def test_settings_are_passed_on_and_paths_of_the_host_are_not(wrapper: Wrapper) -> None:
    """The wrapper repeats the list of deploy/host.py."""
    settings = set(host.SETTINGS) - {"HEALTH_LIMITS"}  # a file, which is mounted
    given = dict.fromkeys([*settings, *PASSED_ON.split()], """a=1,2  name=it's "a" $HOME `id`""")
    paths = dict.fromkeys(OF_THE_HOST.split(), str(wrapper.folder / "x"))
    env = wrapper("train", **given, **paths).env
    assert given.items() <= env.items()
    assert not paths.keys() & env.keys()


def test_other_folders_are_mounted(wrapper: Wrapper) -> None:
    here = wrapper.folder
    binds = wrapper(
        "train", RUNS_DIR=f"{here}/big/runs", TRAINBOX_DATA_DIR=f"{here}/big/data"
    ).binds
    assert binds == [f"{here}/big/runs:/workspace/runs", f"{here}/big/data:/workspace/data"]
    (here / "limits.toml").touch()
    call = wrapper("health", HEALTH_LIMITS="limits.toml")
    assert call.binds[-1] == f"{here}/limits.toml:/workspace/limits.toml:ro"
    assert call.env["HEALTH_LIMITS"] == "/workspace/limits.toml"


@pytest.mark.parametrize(
    ("words", "env", "folder"),
    [
        (["train"], {}, "my_tasks"),
        (["train"], {"TASK": "examples/gestures.py:Gestures"}, "examples"),
        (["sweep", "examples/deep/gestures.py:Gestures"], {"TASK": "digits"}, "examples/deep"),
        (["train", "gestures.py:Gestures"], {"TASKS_DIR": "examples"}, "examples"),
        (["train", "{here}/elsewhere/gestures.py:Gestures"], {}, "{here}/elsewhere"),
    ],
)
def test_the_folder_of_a_task_is_mounted_read_only(
    wrapper: Wrapper, words: list[str], env: dict[str, str], folder: str
) -> None:
    *words, folder = (word.format(here=wrapper.folder) for word in (*words, folder))
    (wrapper.folder / folder).mkdir(parents=True)
    mounted = f"{wrapper.folder / folder}:{Path('/workspace', folder)}:ro"
    assert wrapper(*words, **env).binds[2:] == [mounted]


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        (["run", "a.py", "--", "-x"], ["run", "--runs-dir", "/workspace/runs", "a.py", "--", "-x"]),
        (["plan", "run", "a.py"], ["plan", "run", "--runs-dir", "/workspace/runs", "a.py"]),
        (["drill", "run", "a.py"], ["drill", "run", "a.py"]),
    ],
)
def test_the_project_of_a_script_is_mounted_read_only_except_for_its_data(
    wrapper: Wrapper, words: list[str], passed_on: list[str]
) -> None:
    project = "" if words[0] == "run" else "mine"
    folder = wrapper.folder / project
    folder.mkdir(exist_ok=True)
    call = wrapper(*words, PROJECT_DIR=project)
    assert call.binds[2:] == [
        f"{folder}:/workspace/project:ro",
        f"{folder}/data:/workspace/project/data",
    ]
    assert call.words[call.words.index("--pwd") + 1] == "/workspace/project"
    assert call.words[call.words.index("trainbox") + 1 :] == passed_on
    assert (folder / "data").is_dir()


def test_a_project_with_a_file_named_data_is_mounted(wrapper: Wrapper) -> None:
    (wrapper.folder / "mine").mkdir()
    (wrapper.folder / "mine/data").touch()
    binds = wrapper("run", "a.py", PROJECT_DIR="mine").binds
    assert binds[2:] == [f"{wrapper.folder}/mine:/workspace/project:ro"]


def test_the_digest_is_read_from_the_sha256_file(wrapper: Wrapper) -> None:
    image, digest = wrapper.folder / "trainbox.sif", wrapper.folder / "trainbox.sif.sha256"
    assert "TRAINBOX_IMAGE_DIGEST" not in wrapper("train").env
    digest.write_text(f"{'ab' * 32}  trainbox.sif\n")
    os.utime(image, (1, 1))
    assert wrapper("train").env["TRAINBOX_IMAGE_DIGEST"] == f"sif:{'ab' * 32}"
    assert (
        wrapper("train", TRAINBOX_IMAGE_DIGEST="sha256:cd").env["TRAINBOX_IMAGE_DIGEST"]
        == "sha256:cd"
    )
    digest.write_text("")
    assert "TRAINBOX_IMAGE_DIGEST" not in wrapper("train").env, "`make sif` was interrupted"
    digest.write_text("cd")
    assert wrapper("train").env["TRAINBOX_IMAGE_DIGEST"] == "sif:cd"
    os.utime(digest, (0, 0))
    assert "TRAINBOX_IMAGE_DIGEST" not in wrapper("train").env, "the digest of an older image"


def _not_mounted() -> list[str]:
    """Return a folder for each entry of the list in deploy/host.py."""
    return [entry.replace("*", "x").removesuffix("/") for entry in host.NOT_MOUNTED]


@pytest.mark.parametrize("folder", [*_not_mounted(), "runs/", "/bin/x"])
def test_a_folder_that_make_does_not_mount_is_refused(wrapper: Wrapper, folder: str) -> None:
    done = wrapper.run("train", f"{folder}/mine.py:Mine")
    assert done.returncode == 2
    assert "would hide runs/, data/ or the image: move the file" in done.stderr


def _link_to_a_colon(folder: Path) -> None:
    (folder / "a:b").mkdir()
    (folder / "linked").symlink_to(folder / "a:b")


# fmt: off
_HIDES = "the task's folder, {}, would hide runs/, data/ or the image"
_COLON = "and Apptainer cannot mount a path with a colon or a comma: set {} to another path"
_MISTAKES: dict[str, tuple[Callable[[Path], object] | None, dict[str, str], int, str]] = {
    "no image": (None, {"SIF": "none.sif"}, 2,
                 "SIF=none.sif does not exist: build it with make sif"),
    "no apptainer": (lambda folder: (folder / "bin/apptainer").unlink(), {}, 2,
                     "no apptainer on PATH"),
    "tmp of another user": (
        lambda folder: (folder / f"trainbox-{os.getuid()}").symlink_to("/"), {}, 4,
        "is not your own folder: set TMPDIR"),
    "no runs": (lambda folder: (folder / "runs").touch(), {}, 4,
                "RUNS_DIR=runs or DATA_DIR=data cannot be created"),
    **{folder: (None, {"TASK": f"{folder}/mine.py:Mine"}, 2, _HIDES.format(folder))
       for folder in (".", "..", "my_tasks/../data")},
    "TASKS_DIR": (None, {"TASKS_DIR": "."}, 2, _HIDES.format(".")),
    **{f"{name}={path}": (lambda folder: (folder / "a:b").mkdir(), {name: path}, 2,
                          _COLON.format(name))
       for name, path in (("RUNS_DIR", "a:b"), ("DATA_DIR", "big/a,b/data"), ("TASKS_DIR", "a:b"),
                          ("TMPDIR", "a:b"))},
    "a link": (_link_to_a_colon, {"DATA_DIR": "linked/data"}, 2, _COLON.format("DATA_DIR")),
    "no limits": (None, {"HEALTH_LIMITS": "none.toml"}, 2, "HEALTH_LIMITS=none.toml is not a file"),
}
# fmt: on


@pytest.mark.parametrize(
    ("before", "env", "code", "message"), _MISTAKES.values(), ids=_MISTAKES.keys()
)
def test_a_mistake_is_reported(
    wrapper: Wrapper,
    before: Callable[[Path], object] | None,
    env: dict[str, str],
    code: int,
    message: str,
) -> None:
    tools = wrapper.folder / "tools"
    tools.mkdir()
    for name in ("bash", "env", "mkdir", "realpath"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    if before:
        before(wrapper.folder)
    done = wrapper.run("train", PATH=f"{wrapper.folder}/bin:{tools}", **env)
    assert (done.returncode, message in done.stderr, done.stdout) == (code, True, ""), done.stderr


def test_a_project_that_does_not_exist_is_reported(wrapper: Wrapper) -> None:
    done = wrapper.run("run", "a.py", PROJECT_DIR="none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "trainbox.sh: PROJECT_DIR=none is not a folder: set it to the script's folder\n"
    )


# The definition and the Dockerfile.


def exports(text: str) -> dict[str, str]:
    """Return the variables that the `ENV` or `export` instructions set."""
    lines = re.findall(r"^(?:ENV|    export) (.*(?:(?<=\\)\n.*)*)", text, re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in line.replace("\\\n", " ").split())


def test_the_definition_sets_what_the_dockerfile_sets() -> None:
    docker, definition = exports((ROOT / "Dockerfile").read_text()), exports(DEFINITION.read_text())
    assert docker.pop("HOME") == "/tmp", "Apptainer sets HOME itself, so the wrapper gives it"
    for name in ("USER", "LOGNAME"):
        assert definition.pop(name) == f"${{{name}:-{docker.pop(name)}}}"
    assert definition == docker


def test_the_definition_has_the_base_image_of_the_dockerfile() -> None:
    base = re.search(r"^ARG (BASE_IMAGE=.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert base
    assert DEFINITION.read_text().count(f"    {base[1]}\n") == 2, "once in each stage"


def test_the_definition_installs_the_same_packages_by_hash() -> None:
    both = [path.read_text() for path in (ROOT / "Dockerfile", DEFINITION)]
    both = [re.sub(r"\s*\\\n\s*", " ", text) for text in both]
    packages = [re.findall(r"--no-install-recommends ([\w+ -]*\w)", text) for text in both]
    assert (
        packages[0]
        == packages[1]
        == [
            "ca-certificates python3-venv",
            "ca-certificates ibverbs-providers libibverbs1 python3 tini",
            "g++ python3-dev",
        ]
    )
    installs = [re.findall(r"pip install(.*)", text) for text in both]
    assert [len(found) for found in installs] == [2, 2]
    assert all("--require-hashes" in line for found in installs for line in found)
    for shared in (
        "/^[^ #]/ { keep = compile || !/^triton==/ } keep",
        'remove-unneeded.sh "$site"',
        "/requirements.py install --locked ",
        " -xdev -type f -perm /6000 -exec chmod ug-s {} +",
    ):
        assert all(shared in text for text in both), shared
    assert "find / " not in DEFINITION.read_text(), "it would change files of the host"


def test_the_definition_has_the_labels_of_the_dockerfile() -> None:
    docker = dict(
        re.findall(r'org\.opencontainers\.image\.(\S+)="(.*)"', (ROOT / "Dockerfile").read_text())
    )
    definition = dict(
        re.findall(r"^    org\.opencontainers\.image\.(\S+) (.*)", DEFINITION.read_text(), re.M)
    )
    assert docker.pop("base.digest"), "in the definition, the name contains the digest"
    docker["base.name"] = "${BASE_IMAGE}"
    assert {name: re.sub(r"\$\{(\w+)\}", r"{{ \1 }}", text) for name, text in docker.items()} == (
        definition
    )
