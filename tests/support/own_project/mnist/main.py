"""A script that stores data beside its project, and its model in the run folder."""

import argparse
import json
import os
import sys
from pathlib import Path

from network import CODE

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
epochs = parser.parse_args().epochs
error = None
for folder in ("data", "../data"):
    Path(folder, "images").write_text("0")
try:
    Path("model").touch()
except OSError as failed:
    error = failed.strerror
Path(os.environ["TRAINBOX_RUN"], "model").touch()
found = {"step": 1, "epochs": epochs, "uid": os.getuid(), "cwd": str(Path.cwd()), "error": error}
print(json.dumps(found))
sys.exit(CODE)
