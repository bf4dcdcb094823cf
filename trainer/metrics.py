"""Figures computed from sums: pure."""

import torch
from torch import Tensor


def accuracy(confusion_KK: Tensor) -> float:
    """The share of examples on the diagonal; rows are true classes, columns predicted ones."""
    return float(confusion_KK.diagonal().sum() / confusion_KK.sum())


def macro_f1(confusion_KK: Tensor) -> float:
    """The mean of the classes' F1 scores, over the classes that occur as a label or a prediction
    (as scikit-learn does).
    """
    hits_K = confusion_KK.diagonal()
    total_K = confusion_KK.sum(0) + confusion_KK.sum(1)
    present_K = total_K > 0
    return float((2 * hits_K[present_K] / total_K[present_K]).mean())


def confusion_matrix(labels_B: Tensor, predictions_B: Tensor, classes: int) -> Tensor:
    """(classes, classes) counts of a batch; rows are true classes, columns predicted ones.

    Deterministic on a GPU too.
    """
    true_BK = torch.nn.functional.one_hot(labels_B, classes).float()
    predicted_BK = torch.nn.functional.one_hot(predictions_B, classes).float()
    return true_BK.T @ predicted_BK
