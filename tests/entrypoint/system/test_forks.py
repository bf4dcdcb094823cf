"""A module in a fork, as the launcher's check of the training options runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import clean_environment
from tests.support.paths import ROOT

# The fork starts with an empty output, although its parent has text that it did not write yet.
PROGRAM = """
import json, sys
from entrypoint.system.forks import ForkedModule
print("text of the parent", end="")
results = {}
for module in sys.argv[1:]:
    fork = ForkedModule(module, "an argument", "--flag")
    results[module] = [fork.communicate("a line\\n"), fork.returncode]
imported = [name for name in sys.argv[1:] if name in sys.modules]
open("results.json", "w").write(json.dumps([results, imported]))
"""
MODULES = {
    "reads": "import os, sys\nprint(__name__, sys.argv[1:], repr(sys.stdin.read()), flush=True)\n"
    "os._exit(7)\n",
    "writes_first": "import os\nprint('x' * 200_000, flush=True)\nos._exit(0)\n",
    "not_utf_8": "import os\nos.write(1, b'\\xff')\nos._exit(0)\n",
    "raises": "raise ValueError('of the module')\n",
    "interrupted": "raise KeyboardInterrupt\n",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
}


@pytest.mark.parametrize("safe_path", [True, False])
def test_a_fork_runs_a_module_as_a_program(tmp_path: Path, safe_path: bool) -> None:
    for name, source in MODULES.items():
        # As trainer/__main__.py, without -P.
        drops = "import sys\nif not sys.flags.safe_path: del sys.path[0]\n"
        (tmp_path / f"{name}.py").write_text(f"{drops}assert {str(ROOT)!r} in sys.path\n{source}")
    ended = subprocess.run(
        [sys.executable, *(["-P"] if safe_path else []), "-c", PROGRAM, *MODULES],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=f"{ROOT}:{tmp_path}"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, "text of the parent")
    results, imported = json.loads((tmp_path / "results.json").read_text())
    assert results == {
        "reads": ["__main__ ['an argument', '--flag'] 'a line\\n'\n", 7],
        "writes_first": ["x" * 200_000 + "\n", 0],
        "not_utf_8": ["\ufffd", 0],
        "raises": ["", 1],
        "interrupted": ["", 130],
        "killed": ["", -9],
    }
    assert imported == []
    assert ended.stderr.endswith("\nValueError: of the module\n")
    assert "KeyboardInterrupt" not in ended.stderr
