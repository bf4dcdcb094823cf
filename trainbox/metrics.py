"""Metrics from a confusion matrix."""

from trainer.metrics import accuracy, confusion_matrix, macro_f1

__all__ = ["accuracy", "confusion_matrix", "macro_f1"]
