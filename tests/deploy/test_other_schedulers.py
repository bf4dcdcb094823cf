"""The job scripts of docs/guides/other-schedulers.md, with stand-ins for the schedulers."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import clean_environment

PAGE = Path(__file__).parents[2] / "docs/guides/other-schedulers.md"
TRAINBOX = """#!/bin/bash
trap 'exit {code}' USR2 TERM
echo ready
while :; do sleep 0.05; done
"""


def job_script(scheduler: str) -> str:
    """Return the script in the part of the page about `scheduler`."""
    part = PAGE.read_text().partition(f"\n## {scheduler}\n")[2]
    found = re.search(r"```bash\n(.*?)```", part, re.DOTALL)
    assert found is not None
    return found[1]


# 75: the training has saved. 143: nothing was saved, so the job is not started again.
@pytest.mark.parametrize(
    ("scheduler", "warning", "code", "ends", "requeued"),
    [
        ("LSF", signal.SIGUSR2, 75, 75, False),  # -Q "75" starts it again
        ("Grid Engine", signal.SIGUSR2, 75, 99, False),  # 99 starts it again
        ("Grid Engine", signal.SIGUSR2, 143, 143, False),
        ("PBS", signal.SIGTERM, 75, 75, True),
        ("PBS", signal.SIGTERM, 143, 143, False),
    ],
)
def test_a_warning_to_all_processes_starts_the_job_again_if_it_has_saved(
    tmp_path: Path,
    scheduler: str,
    warning: signal.Signals,
    code: int,
    ends: int,
    requeued: bool,
) -> None:
    (tmp_path / "bin").mkdir()
    programs = {"trainbox": TRAINBOX.format(code=code), "qrerun": "#!/bin/bash\necho again $1\n"}
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "job").write_text(job_script(scheduler))
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    job = subprocess.Popen(
        ["bash", "job"],
        cwd=tmp_path,
        env=clean_environment(PATH=path, PBS_O_WORKDIR=str(tmp_path), PBS_JOBID="7"),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    os.killpg(job.pid, warning)
    rest = job.communicate()[0]
    assert (job.returncode, rest) == (ends, "again 7\n" if requeued else "")
