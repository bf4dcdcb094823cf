"""Load the weights of another training into a model, and report which tensors are new."""

from trainbox.task_api import check_trainer

check_trainer()

from trainer.initial_weights import Match, last_layer, load, match, read_tensors  # noqa: E402

__all__ = ["Match", "last_layer", "load", "match", "read_tensors"]
