"""A built-in task refuses a field with a wrong value before the run starts."""

import pytest

from tests.support.here import Here
from trainbox.errors import WrongUse
from trainer.load_task import load_task

# fmt: off
_WRONG = [
    ("har", "mode=sequences", "--set mode=sequences: task har has flatten, sequence"),
    ("har", "model=gru", "--set model=gru: task har has cnn, lstm, transformer"),
    ("har", "mode=flatten model=lstm",
     "--set mode=flatten trains an MLP, not model=lstm: drop one, or use sequence"),
    ("har", "width=0", "--set width=0: use a number from 1"),
    ("har", "layers=-1", "--set layers=-1: use a number from 1"),
    ("har", "model=transformer width=30",
     "--set width=30: use a multiple of 4, the number of the transformer's heads"),
    ("digits", "dropout=1.5", "--set dropout=1.5: use a number from 0 to below 1"),
    ("digits_augmented", "width=0", "--set width=0: use a number from 1"),
    ("digits_augmented", "shift=-1", "--set shift=-1: use a number from 0"),
    ("ssvae", "num_style=0", "--set num_style=0: use a number from 1"),
    ("ssvae", "hidden=0", "--set hidden=0: use a number from 1"),
    ("ssvae", "classification_weight=-1", "--set classification_weight=-1.0: use a number from 0"),
    ("mnist", "hidden=0", "--set hidden=0: use a number from 1"),
    ("har", "dropout=1", "--set dropout=1.0: use a number from 0 to below 1"),
    ("text", "width=130", "--set width=130: use a multiple of heads=4, such as 128 or 132"),
    ("text", "width=2", "--set width=2: use a multiple of heads=4, such as 4"),
    ("text", "layers=0", "--set layers=0: use a number from 1"),
    ("text", "context=0", "--set context=0: use a number from 1"),
    ("text", "dropout=1", "--set dropout=1.0: use a number from 0 to below 1"),
    ("text", "validation_share=0", "--set validation_share=0.0: use a number between 0 and 1"),
    ("text", "endings=txt/", "--set endings=txt/: use endings as in txt/md"),
    ("video", "frames=0", "--set frames=0: use a number from 1"),
    ("video", "classes=rest/rest", "--set classes=rest/rest: use the different names of two"),
    ("video", "validation_share=1", "--set validation_share=1.0: use a number between"),
    ("ssvae", "dataset=cifar", "--set dataset=cifar: use one of mnist, fashion_mnist, digits"),
    ("ssvae", "labelled=10",
     "--set labelled=10.0: use the share of examples with a label, above 0 and up to 1"),
    ("ssvae", "labelled=0",
     "--set labelled=0.0: use the share of examples with a label, above 0 and up to 1"),
    ("images", "model=resnet17", "--set model=resnet17: torchvision has no classification model "
                                 "resnet17: did you mean resnet18 or "),
    ("images", "model=fcn_resnet50", "--set model=fcn_resnet50: torchvision has no classification"),
    ("images", "model=shufflenet_v2_x0_5 weights=IMAGENET1K", "--set weights=IMAGENET1K: "
     "torchvision has no such weights of shufflenet_v2_x0_5: did you mean IMAGENET1K_V1?"),
    ("images", "size=0", "--set size=0: use a number from 1"),
    ("images", "size=32 resize=16", "--set resize=16: use a number from size=32, or 0 for 37"),
    ("images", "validation_share=1", "--set validation_share=1.0: use a number between 0 and 1"),
    ("images", "ema=1", "--set ema=1.0: use a number from 0 to below 1"),
    ("images", "mixup=-1", "--set mixup=-1.0: use a number above 0, such as 0.2, or 0 to train"),
    ("teacher_student", "method=sgd", "--set method=sgd: use gd "),
    ("teacher_student", "size=0", "--set size=0: use a number from 1"),
]
# fmt: on


@pytest.mark.parametrize(("task", "fields", "message"), _WRONG)
def test_a_wrong_field_is_refused(task: str, fields: str, message: str) -> None:
    with pytest.raises(WrongUse) as refused:
        load_task(task, dict(field.split("=") for field in fields.split()))
    assert str(refused.value).startswith(message)


def test_a_wrong_field_is_refused_before_the_run_starts(here: Here) -> None:
    """Neither the run's folder nor the data is needed."""
    err = here.refused("train", "har", "--device", "cpu", "--set", "width=0", silent=True)
    assert err == "trainbox: --set width=0: use a number from 1\n"
    assert not (here.folder / "runs").exists()
