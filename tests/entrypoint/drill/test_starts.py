"""How the trainings of a drill start."""

from entrypoint.drill.starts import environment
from trainbox.contract.variables import HEALTH_NAMES, LAUNCH_NAMES


def test_a_training_has_no_settings_of_another_launch() -> None:
    kept = {"HOME": "/h", "TRAINBOX_BATCH_SIZE": "8", **dict.fromkeys(HEALTH_NAMES, "no")}
    dropped = {
        **dict.fromkeys(LAUNCH_NAMES - HEALTH_NAMES, "2"),
        "SLURM_JOB_NUM_NODES": "2",
        "TRAINBOX_DEVICE": "cuda",
        "TRAINBOX_EPOCHS": "9",
    }
    assert environment(kept | dropped) == kept
