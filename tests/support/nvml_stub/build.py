"""Build the NVML stub, and write the files that drive it; nvml_stub.c lists the keys."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FLAGS = [
    "-std=c11",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-shared",
    "-fPIC",
    "-Wl,-soname,libnvidia-ml.so.1",
]


def build_stub(folder: Path, without: Iterable[str] = ()) -> Path:
    """Compile folder/libnvidia-ml.so.1 without the symbols in `without`, like an old driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError(
            "the NVML stub needs a C compiler: cc is not on PATH (Debian: apt-get install gcc)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    library = folder.resolve() / "libnvidia-ml.so.1"
    renames = [f"-D{symbol}=absent_{symbol}" for symbol in without]
    command = [compiler, *FLAGS, *renames, "-o", str(library), str(HERE / "nvml_stub.c")]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"the NVML stub does not compile:\n{result.stderr}")
    return library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the NVML stub, compiled once for each pytest process."""
    if shutil.which("cc") is None:
        pytest.skip("the NVML stub needs a C compiler: cc is not on PATH")
    return build_stub(tmp_path_factory.mktemp("nvml"))


def stub_env(library_dir: Path, config_file: Path) -> dict[str, str]:
    """Return the variables with which a process loads the stub instead of a driver's library."""
    path = [str(library_dir.resolve()), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": ":".join(filter(None, path)),
        "NVML_STUB_CONFIG": str(config_file.resolve()),
    }


def read_profile(profile: str) -> dict[str, str]:
    """Read the keys of profiles/<profile>.conf."""
    file = HERE / "profiles" / f"{profile}.conf"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in file.parent.glob("*.conf")))
        raise ValueError(f"no NVML stub profile {profile!r}; there are: {known}")
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def write_config(
    path: Path, profile: str, keys: Mapping[str, object] | None = None, **more: object
) -> Path:
    """Write a profile with changed `keys` in one atomic step; None leaves a key out.

    write_config(path, "h100", {"gpu1.ret": 15, "gpu0.field.230": None}, count=2)
    """
    values = {
        key: value
        for key, value in {**read_profile(profile), **(keys or {}), **more}.items()
        if value is not None
    }
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    # A test may write any byte: "\udcff" is 0xFF.
    text = "".join(f"{key}={value}\n" for key, value in values.items())
    whole.write_bytes(text.encode(errors="surrogateescape"))
    whole.replace(path)
    return path
