"""Load the weights of another training into a model, and report which tensors are new."""

from trainbox.task_api import check_trainer

check_trainer()

from trainer.initial_weights import (  # noqa: E402
    Match,
    averaged_first,
    last_layer,
    load,
    match,
    read_tensors,
    unwrapped,
)

__all__ = [
    "Match",
    "averaged_first",
    "last_layer",
    "load",
    "match",
    "read_tensors",
    "unwrapped",
]
