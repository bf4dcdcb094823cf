"""What the watch of a training reads from the NVML stub, and the findings that end a training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import clean_environment
from tests.support.nvml_stub.build import stub_env, write_config

# The process must start with the stub in its library path.
PROGRAM = """
import json
from entrypoint.driver.nvml import Session
from entrypoint.health.limits import Limits
from entrypoint.health.rules.gpus import Selection, judge_gpus
from entrypoint.health.rules.table import names_to_read, rules_for
from entrypoint.health.verdict import Mode, Result
rules = rules_for(Mode.WATCH)
session = Session()
gpus = session.detect().gpus
sample = session.sample([gpu.uuid for gpu in gpus], names_to_read(rules))
found = judge_gpus([sample], Selection(gpus), rules, Limits())
ending = {rule.check for rule in rules if rule.ends_a_run}
print(json.dumps([f.check for f in found if f.result is Result.CRITICAL and f.check in ending]))
"""


@pytest.mark.parametrize(
    ("profile", "keys", "ends"),
    [
        ("h100", {}, []),
        ("h100", {"gpu1.sram.threshold_exceeded": 1}, ["sram-threshold"]),
        ("h100", {"gpu1.nvlink3.state": 0}, ["nvlink"]),
        ("h100", {"gpu1.fabric.state": 1}, ["fabric"]),
        ("t4", {}, []),
        ("t4", {"gpu1.retired_pages.single_bit": 62}, []),
        ("t4", {"gpu1.retired_pages.single_bit": 63}, ["retired-pages"]),
        ("t4", {"gpu1.retired_pages.double_bit": 63}, ["retired-pages"]),
    ],
)
def test_a_value_that_ends_a_training(
    library: Path, tmp_path: Path, profile: str, keys: dict[str, object], ends: list[str]
) -> None:
    config = write_config(tmp_path / "nvml.conf", profile, keys, count=2)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        env=clean_environment(**stub_env(library.parent, config)),
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == ends
