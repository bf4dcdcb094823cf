"""List the built-in tasks, or the fields of one task."""

import dataclasses
import json
from typing import Any

from trainbox.contract.task_fields import static_fields, summary
from trainbox.contract.task_spec import built_in_tasks
from trainer.load_task import load_task, loaded_fields


def listing(name: str | None, as_json: bool) -> str:
    """Return the built-in tasks with their summaries, or the fields of the task `name`."""
    if name is None:
        tasks = {task: summary(task) for task in built_in_tasks()}
        if as_json:
            return json.dumps(tasks)
        return "\n".join(f"{task:<18}{text}" for task, text in tasks.items())
    fields = static_fields(name)
    if fields is None:
        fields = loaded_fields(type(load_task(name, {})))
    values = {f.name: {"type": f.type.__name__, "default": _default(f.default)} for f in fields}
    if as_json:
        return json.dumps(values, default=str)
    lines = [
        f"  --set {field}=...  {entry['type']}, default {entry['default']}"
        for field, entry in values.items()
    ]
    return "\n".join([f"{name}: {summary(name)}" if ":" not in name else name, *lines])


def _default(value: Any) -> Any:
    return None if value is dataclasses.MISSING else value
