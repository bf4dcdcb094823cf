"""`evaluate --predictions` does not replace the files of a run."""

from pathlib import Path

import pytest

from tests.support.here import Here


@pytest.mark.parametrize(
    "name", ["runs/r/config.json", "runs/r/checkpoints/new.pt", "runs/r/model.safetensors"]
)
def test_a_file_of_a_run_is_not_replaced(here: Here, name: str) -> None:
    here.train(max_steps=1)
    before = Path(name).read_bytes() if Path(name).exists() else None
    err = here.refused("evaluate", "runs/r", "--device", "cpu", "--predictions", name, code=2)
    assert f"--predictions {name} is in the folder of a run, whose files it could replace" in err
    assert (Path(name).read_bytes() if Path(name).exists() else None) == before
