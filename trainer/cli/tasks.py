"""The command `tasks`: list the built-in tasks, or the fields of one task."""

import dataclasses
import json
from typing import Any

import click

from trainer.cli.invocation import Verb
from trainer.task_loading.fields import static_fields, summary
from trainer.task_loading.load import load_task, loaded_fields
from trainer.task_loading.spec import built_in_tasks


@click.command(cls=Verb)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def tasks(name: str | None, as_json: bool) -> None:
    """List the built-in tasks, or the fields of the task NAME (also file.py:Class)."""
    if name is None:
        listing = {task: summary(task) for task in built_in_tasks()}
        lines = [f"{task:<18}{text}" for task, text in listing.items()]
        click.echo(json.dumps(listing) if as_json else "\n".join(lines))
        return
    fields = static_fields(name)
    if fields is None:
        fields = loaded_fields(type(load_task(name, {})))
    values = {f.name: {"type": f.type.__name__, "default": _default(f.default)} for f in fields}
    if as_json:
        click.echo(json.dumps(values, default=str))
        return
    click.echo(f"{name}: {summary(name)}" if ":" not in name else name)
    for field, entry in values.items():
        click.echo(f"  --set {field}=...  {entry['type']}, default {entry['default']}")


def _default(value: Any) -> Any:
    return None if value is dataclasses.MISSING else value
