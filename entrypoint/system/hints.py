"""Commands that messages recommend, in the form that works where the user typed the current one.

`trainer.system.hints` does this for the trainer. Each command imports this file, and an import of
the package `trainbox`, where both could share it, takes longer than the rest of the file.
"""

import os


def command(verb: str, arguments: str = "") -> str:
    """Return the command line that runs `trainbox VERB ARGUMENTS`.

    TRAINBOX_COMMAND replaces `trainbox` there: make, docker-compose.yml and
    deploy/apptainer/trainbox.sh set it, since a host with the image alone has no `trainbox`.
    """
    typed = os.environ.get("TRAINBOX_COMMAND") or "trainbox"
    if typed != "make":
        if verb == "run" and typed.endswith(" train"):  # Compose has a service for this verb
            return f"{typed.removesuffix(' train')} run {arguments}"
        return f"{typed} {verb} {arguments}".rstrip()
    if not arguments:
        return f"make {verb}"
    if verb == "run":
        script, _, others = arguments.partition(" -- ")
        return f"make run SCRIPT={script}" + (f' ARGS="{others}"' if others else "")
    if verb != "verify":
        return f'make {verb} ARGS="{arguments}"'
    run, _, others = arguments.partition(" ")
    return f"make verify RUN={run}" + (f' ARGS="{others}"' if others else "")


def runs_dir() -> str:
    """Return the name of the setting for the folder of runs.

    In a container, this is the setting for the host's folder.
    """
    return "RUNS_DIR" if os.environ.get("TRAINBOX_COMMAND") else "--runs-dir"
