"""Pictures for `Task.figures`, as (3, H, W) uint8 tensors."""

from trainer.pictures import confusion_matrix, example_sheet, from_figure

__all__ = ["confusion_matrix", "example_sheet", "from_figure"]
