"""The examples train, and the README shows the same code."""

import importlib.util
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest

from tests.support.commands import Trainbox, finish, logged, wait_until
from tests.support.here import Here

_ROOT = Path(__file__).parents[2]


def test_rings_reaches_the_accuracy_of_its_page(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "rings", raising=False)
    task = f"{_ROOT}/examples/rings/rings.py:Rings"
    here.succeeds("train", task, "--device", "cpu", "--run", "r")
    assert max(entry["accuracy"] for entry in here.entries("validation")) > 0.98


@pytest.mark.slow
def test_plain_resumes_after_sigterm_and_kills(trainbox: Trainbox) -> None:
    script = f"{_ROOT}/examples/plain/train.py"
    run = ("run", "--device", "cpu", "--run", "r", script, "--", "--steps", "2000")
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(trainbox.folder)}
    process = trainbox.start(*run, env=env)
    wait_until(lambda: bool(logged(trainbox.folder / "runs/r", "train")), process)
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 75
    (stopped_at,) = {entry["step"] for entry in logged(trainbox.folder / "runs/r", "train")[-1:]}
    assert finish(trainbox.start(*run, env=env)).code == 0
    steps = [entry["step"] for entry in logged(trainbox.folder / "runs/r", "train")]
    assert steps == list(range(20, 2001, 20)) and stopped_at < 2000

    drill = ("drill", "run", script, "--compare", "model.pt", "--gpus", "0", *run[-3:])
    ended = finish(trainbox.start(*drill, env=env))
    assert (ended.code, ended.err) == (0, "")
    assert "  the same bits in all 2 trainings: " in ended.out


@pytest.mark.slow
def test_forgetful_is_found(trainbox: Trainbox) -> None:
    script = f"{_ROOT}/examples/forgetful/train.py"
    drill = ("drill", "run", script, "--compare", "model.pt", "--gpus", "0")
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(trainbox.folder)}
    process = trainbox.start(*drill, "--", "--steps", "2000", env=env)
    ended = finish(process)
    assert ended.code == 8
    assert "differs from the undisturbed one: tensor 0.weight: (float32, 32x2)" in ended.err


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
@pytest.mark.filterwarnings("default")  # MLflow's own, such as about its store of files
def test_mlflow_stores_the_settings_and_metrics_of_a_run(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train(task="digits", max_steps=20, fields={"width": 4})
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # since MLflow 3.13
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (Path.cwd() / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(sys, "argv", ["send.py", str(here.path())])
    runpy.run_path(f"{_ROOT}/examples/mlflow/send.py", run_name="__main__")
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("r", "FINISHED")
    assert (run.data.params["task.width"], run.data.params["max_steps"]) == ("4", "20")
    (entry,) = here.entries("validation")
    (stored,) = client.get_metric_history(run.info.run_id, "validation/accuracy")
    assert (stored.step, stored.value) == (20, entry["accuracy"])
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [m.value for m in losses] == [entry["loss"] for entry in here.entries("train")]


def test_readme_shows_the_example_as_it_is() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (_ROOT / "README.md").read_text(), re.DOTALL)
    assert shown == (_ROOT / "examples/rings/rings.py").read_text()


def test_each_example_has_a_page_that_the_list_links() -> None:
    folders = sorted(path.name for path in (_ROOT / "examples").iterdir() if path.is_dir())
    page = (_ROOT / "examples/README.md").read_text()
    assert re.findall(r"\]\((\w+)/README\.md\)", page) == folders
    assert all((_ROOT / "examples" / name / "README.md").is_file() for name in folders)
