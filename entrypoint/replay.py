"""The docker command that repeats a run with the same image, settings, processes and GPUs."""

import os
from pathlib import Path
from typing import Any

from trainbox.contract.errors import WrongUse
from trainbox.contract.files import read_object
from trainbox.contract.hints import command


def read_run(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and manifest.json of the run's folder.

    Raises:
        WrongUse: a file is missing or damaged, or the run was not started from an image.
    """
    config, manifest = (_object_in(run / name) for name in ("config.json", "manifest.json"))
    for name, found in (("plan", manifest.get("plan")), ("device", manifest.get("device"))):
        if not isinstance(found, dict):
            raise _refused(run, f"manifest.json is damaged (it has no {name}): restore it")
    digest = str(manifest.get("image_digest") or "")
    if digest.startswith("sif:"):
        raise _refused(
            run,
            f"the run was started from the Apptainer image {digest}: "
            f"repeat it with deploy/apptainer/trainbox.sh verify {run}",
        )
    if not digest:
        raise _refused(
            run,
            "the run was not started from an image with a known digest: "
            f"repeat it without docker with `{command('verify', str(run))}`",
        )
    return config, manifest


def _refused(run: Path, reason: str) -> WrongUse:
    return WrongUse(f"verify {run} --print-docker: {reason}")


def _object_in(path: Path) -> dict[str, Any]:
    run = path.parent
    if not path.is_file():  # a FIFO would block
        raise _refused(
            run,
            f"{path.name} is missing: give the folder of a run, such as runs/digits-7d2c1a90",
        )
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise _refused(run, f"{path.name} is damaged ({error}): restore it") from error


def docker_command(
    run: Path, config: dict[str, Any], manifest: dict[str, Any], data_dir: Path, user: str
) -> list[str]:
    """Return `docker run ...` with absolute paths, for a new run `NAME-replay` beside `run`."""
    run = run.absolute()
    command = ["docker", "run", "--rm", "--user", user, "--read-only", "--cap-drop", "ALL"]
    command += ["--tmpfs", "/tmp:exec,mode=1777"]  # noqa: S108 - in the container
    command += ["--security-opt", "no-new-privileges", "--shm-size", "8g", "--stop-timeout", "60"]
    gpus = manifest["device"].get("uuids", [])
    if gpus:
        command += ["--gpus", f'"device={",".join(gpus)}"']
    command += [
        "-v",
        f"{run.parent}:/workspace/runs",
        "-v",
        f"{data_dir.absolute()}:/workspace/data",
    ]
    file, _, _ = str(config["task"]).rpartition(":")
    if file.endswith(".py"):
        # The path in config.json is relative to the container's working folder. The mount must not
        # hide that folder.
        inside = Path(os.path.normpath(Path("/workspace") / file))
        outside = Path(os.path.abspath(file))  # noqa: PTH100 - pathlib's own leaves `..` in
        if inside.parent not in (Path("/workspace"), Path("/")):
            inside, outside = inside.parent, outside.parent
        command += ["-v", f"{outside}:{inside}:ro"]
    digest = manifest["image_digest"]
    command += [
        "-e",
        f"TRAINBOX_IMAGE_DIGEST={digest}",
        digest,
        "train",
        "--config",
        f"/workspace/runs/{run.name}/config.json",
    ]
    command += ["--run", f"{run.name}-replay"]
    plan = manifest["plan"]
    if plan["strategy"] not in ("single", "ddp"):  # the launch plan's own choices
        command += ["--strategy", plan["strategy"]]
    on_gpus = gpus or plan["strategy"] == "dp"
    return (
        command
        if on_gpus
        else [*command, "--device", "cpu", "--processes", str(plan["world_size"])]
    )
