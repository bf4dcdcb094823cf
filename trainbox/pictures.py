"""Pictures for `Task.figures`, as (3, H, W) uint8 tensors."""

from trainbox.task_api import check_trainer

check_trainer()

from trainer.pictures import Picture, confusion_matrix, example_sheet, from_figure  # noqa: E402

__all__ = ["Picture", "confusion_matrix", "example_sheet", "from_figure"]
