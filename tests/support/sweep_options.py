"""Check the options of a sweep as the launcher and the trainer do, without a start."""

from collections.abc import Mapping, Sequence

import pytest

import entrypoint.cli.training
from trainbox.options.table import config_of
from trainbox.task_names.field_texts import field_texts
from trainer.sweep.grid import Sweep
from trainer.sweep.request import of_task


def requested_sweep(words: Sequence[str], env: Mapping[str, str]) -> Sweep:
    """Return the sweep of `trainbox sweep ARGUMENTS` in this environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        with entrypoint.cli.training.sweep.make_context("sweep", list(words)) as context:
            values = context.params
            return of_task(config_of(values, field_texts(values["pairs"])), "cpu", values)
