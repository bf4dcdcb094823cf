"""`trainbox drill run` with real starts."""

import re
import signal

import pytest

from tests.support.commands import Ended, Trainbox, finish, wait_until
from tests.support.tiny import TINY

pytestmark = pytest.mark.timeout(900)  # up to nine starts of torchrun

# A start that is to be killed waits for it near its end: the first one of each training but the
# undisturbed ones. It reports all steps at once, so that no kill comes between the last checkpoint
# and its report. The first rank trains, and the result depends a little on their number.
_SCRIPT = """
import csv, json, os, sys, time
from pathlib import Path
run, undisturbed = Path(os.environ["TRAINBOX_RUN"]), int(sys.argv[1])
if os.environ.get("RANK", "0") != "0":
    sys.exit()
checkpoint = run / "checkpoint.json"
resumes = checkpoint.exists()
step, total = json.loads(checkpoint.read_text()) if resumes else (0, 0.5)
reports = ""
while step < 5:
    step, total = step + 1, total * 1.5 + 1e-6 * int(os.environ.get("WORLD_SIZE", "1"))
    (run / "checkpoint.new").write_text(json.dumps([step, total]))
    (run / "checkpoint.new").rename(checkpoint)
    reports += json.dumps({"step": step}) + "\\n"
sys.stdout.write(reports)
while int(run.parent.name.partition("-")[2] or 0) >= undisturbed and not resumes:
    time.sleep(1)
(run / "results").mkdir(exist_ok=True)
with (run / "results" / "last.csv").open("w") as file:
    csv.writer(file).writerows([["step", "total"], [step, total]])
"""


def _drill(trainbox: Trainbox, undisturbed: int, *words: str) -> Ended:
    """Compare the table of a drill with one kill of each training but the `undisturbed` ones."""
    (trainbox.folder / "train.py").write_text(_SCRIPT)
    (trainbox.folder / "tmp").mkdir(exist_ok=True)
    process = trainbox.start(
        *(
            "drill",
            "run",
            "--gpus",
            "0",
            "--kills",
            "1",
            "--seed",
            "1",
            "--compare",
            "{run}/results/last.csv",
        ),
        *(*words, "train.py", "--", str(undisturbed)),
        env={"TMPDIR": str(trainbox.folder / "tmp"), "OMP_NUM_THREADS": "1"},
    )
    return finish(process)


def test_a_script_that_resumes(trainbox: Trainbox) -> None:
    """The one real start: the undisturbed training, the kill, the resume and the comparison."""
    ended = _drill(trainbox, 1)
    assert (ended.code, ended.err) == (0, ""), ended.err
    first, heading, columns, undisturbed, killed, resumed, last = ended.out.splitlines()
    assert first == "drill of train.py on one CPU process, --kills 1 --seed 1"
    assert (heading, columns.split()) == ("results/last.csv", ["processes", "digest"])
    assert re.fullmatch(r"  1  +undisturbed  +[0-9a-f]{16}  same", undisturbed)
    assert re.fullmatch(r"  1 -> 1 +SIGKILL at step [1-5] +[0-9a-f]{16}  same", killed)
    assert resumed == "  resumed, 1 -> 1: the reported steps continued after a kill"
    assert re.fullmatch(r"  the same bits in all 2 trainings: [0-9a-f]{64}", last)
    assert list((trainbox.folder / "tmp").iterdir()) == []


def test_sigterm_ends_a_drill_with_one_line_and_no_folder(trainbox: Trainbox) -> None:
    (trainbox.folder / "tmp").mkdir()
    process = trainbox.start(
        *("drill", TINY, "--processes", "1"), env={"TMPDIR": str(trainbox.folder / "tmp")}
    )
    # The training has a temporary folder, too.
    wait_until(lambda: len([*(trainbox.folder / "tmp").iterdir()]) > 1, process)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert (ended.code, ended.err) == (
        143,
        "trainbox: stopped by SIGTERM, and nothing is lost: start the same command again\n",
    )
    assert list((trainbox.folder / "tmp").iterdir()) == []


@pytest.mark.slow
@pytest.mark.rare
def test_changing_numbers_of_processes(trainbox: Trainbox) -> None:
    """tests/trainbox/test_library_page.py has drills of DDP."""
    ended = _drill(trainbox, 2, "--processes", "1,2", "--tolerance", "1e-4")
    assert (ended.code, ended.err) == (0, ""), ended.err
    rows = re.findall(r"^  (\d(?: -> \d)?)  ", ended.out, re.MULTILINE)
    assert rows == ["1", "2", "1 -> 1", "1 -> 2", "2 -> 1"]
    assert "  all 5 trainings agree within 0.0001; the largest difference is " in ended.out
