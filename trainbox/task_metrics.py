"""Pure functions for metrics of a task."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class TaskMetrics:
    """The metrics that tasks use as `trainbox.metrics.NAME`. A new one is a function here."""

    @staticmethod
    def accuracy(confusion_KK: "Tensor") -> float:
        """Return the share of examples on the diagonal of a confusion matrix (K, K)."""
        return float(confusion_KK.diagonal().sum() / confusion_KK.sum())

    @staticmethod
    def macro_f1(confusion_KK: "Tensor") -> float:
        """Return the mean F1 score of the classes that occur as a label or as a prediction.

        Rows of the confusion matrix (K, K) are true classes. scikit-learn computes macro-F1 in the
        same way (`f1_score(average="macro")`).
        """
        hits_K = confusion_KK.diagonal()
        total_K = confusion_KK.sum(0) + confusion_KK.sum(1)
        present_K = total_K > 0
        return float((2 * hits_K[present_K] / total_K[present_K]).mean())

    @staticmethod
    def confusion_matrix(labels_B: "Tensor", predictions_B: "Tensor", classes: int) -> "Tensor":
        """Return the counts of a batch, (classes, classes) float32.

        `labels_B` and `predictions_B` are (B,) int64 from 0. Rows are true classes, and columns are
        predicted classes. The result is deterministic on a GPU, too.
        """
        import torch  # scripts import this module without it
        from torch.nn.functional import one_hot

        true_BK = one_hot(labels_B, classes).float()
        predicted_BK = one_hot(predictions_B, classes).float()
        # A product in bf16 has no odd counts above 256.
        with torch.autocast(labels_B.device.type, enabled=False):
            return true_BK.T @ predicted_BK
