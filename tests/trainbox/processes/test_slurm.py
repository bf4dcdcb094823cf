"""The variables of SLURM that a process of a launch has."""

import pytest

from entrypoint.launch.request import Cluster, detect_cluster
from trainbox.disclosure.variables import without_launch
from trainbox.processes.slurm import as_slurm_task

JOB = {
    "SLURM_JOB_ID": "70",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_ARRAY_TASK_ID": "7",
}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "1(x4)",
}


def test_a_rank_of_several_nodes_has_what_srun_would_have_given() -> None:
    found = as_slurm_task(JOB | STEP | {"HOME": "/h"}, 5, 1, 2, 8, 2, 4)
    assert found == {
        "HOME": "/h",
        **JOB,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_NTASKS": "8",
        "SLURM_NPROCS": "8",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_TASKS_PER_NODE": "2(x4)",
        "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
        "SLURM_NNODES": "4",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_GTIDS": "4,5",
    }


def test_what_is_not_known_of_other_nodes_is_not_stated() -> None:
    found = as_slurm_task(JOB | STEP, 2, 2, 0, 4, 3, 2)
    assert "SLURM_TASKS_PER_NODE" not in found
    assert (found["SLURM_NTASKS"], found["SLURM_NTASKS_PER_NODE"]) == ("4", "3")


def test_outside_of_a_job_nothing_is_set() -> None:
    env = {"HOME": "/h", "SLURM_CONF": "/etc/slurm.conf"}
    assert as_slurm_task(env, 1, 1, 0, 2, 2) == env


@pytest.mark.parametrize("step", [STEP, {}])
def test_a_launch_inside_of_another_one_is_one_task_of_the_job(step: dict[str, str]) -> None:
    """A trial of a sweep, or a training of a drill: also in a batch script of several nodes."""
    found = without_launch(JOB | step)
    assert {name: found[name] for name in JOB} == JOB
    assert (found["SLURM_PROCID"], found["SLURM_NTASKS"]) == ("0", "1")
    assert detect_cluster(found) == Cluster("slurm", rdzv_id="70")
