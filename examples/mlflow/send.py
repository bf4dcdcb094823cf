"""Send the settings and metrics of run folders to MLflow."""

import json
import math
import sys
from pathlib import Path

import mlflow
from mlflow.entities import Metric, Param

LARGEST_REQUEST = 1000  # metrics, which MLflow's server accepts in one request


def metrics_of(path: Path) -> list[Metric]:
    """Return the finite numbers of metrics.jsonl, with the names of TensorBoard."""
    metrics = []
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # a copy may end within a line
            continue
        kind, step = entry.pop("kind"), entry.pop("step")
        time_ms = int(1000 * entry.pop("time_unix_s"))
        for name, value in entry.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and kind != "health" and math.isfinite(value):
                metrics.append(Metric(f"{kind}/{name}", float(value), time_ms, step))
    return metrics


def send(run: Path) -> None:
    """Send one run. The experiment is the task, or the script."""
    config = json.loads((run / "config.json").read_text())
    fields = {f"task.{name}": value for name, value in config.pop("fields", {}).items()}
    mlflow.set_experiment(config.get("task") or config["script"])
    with mlflow.start_run(run_name=run.name) as started:
        client, run_id = mlflow.MlflowClient(), started.info.run_id
        client.log_batch(run_id, params=[Param(n, str(v)) for n, v in (config | fields).items()])
        metrics = metrics_of(run / "metrics.jsonl")
        for first in range(0, len(metrics), LARGEST_REQUEST):
            client.log_batch(run_id, metrics[first : first + LARGEST_REQUEST])


for argument in sys.argv[1:]:
    send(Path(argument))
