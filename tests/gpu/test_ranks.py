"""Several ranks on one GPU: their exchange, kills, and failures (R3).

gloo moves tensors of the GPU through the host. NCCL from 2.30 on accepts several ranks on one GPU.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.gpu import shared
from tests.gpu.check import Check
from tests.gpu.digests import by_step, last

_SHARDS = ("--shards", "4", "--threads", "1", "--digest-steps", "10")
_TASK = ("digits_augmented", *_SHARDS, "--max-steps", "40", "--batch-size", "64", "--workers", "1")
_KILLED = ("--checkpoint-steps", "5", "--run", "killed")


def _runs(check: Check) -> Path:
    return check.folder / "runs"


@pytest.mark.gpu(
    step=5, seconds=26, settles="R3: 1, 2 and 4 ranks over gloo, with kills, same bits"
)
def test_ranks_over_gloo_have_the_bits_of_one_process(check: Check) -> None:
    check.needs_training()
    # One process, two and four ranks at the same time, and a run that moves between them.
    started = [shared.start(check, n, *_TASK, "--run", f"on-{n}") for n in (1, 2, 4)]
    for ranks, kill_at in ((1, 12), (4, 10)):
        last_rank = {ranks - 1: {"SHARED_KILL_AT": str(kill_at)}}
        processes = shared.start(check, ranks, *_TASK, *_KILLED, of_rank=last_rank)
        shared.killed(check, processes, ranks - 1)
    resumed = shared.run(check, 2, *_TASK, *_KILLED)[0]
    check.saw(next((x.strip() for x in resumed.out.splitlines() if "resume" in x), "not resumed"))
    for process in (process for processes in started for process in processes):
        check.finish(process)
    whole = last(_runs(check) / "on-1")
    for run in ("on-2", "on-4", "killed"):
        assert last(_runs(check) / run) == whole, run
    check.saw(f"2 ranks, 4 ranks and 1 -> 4 -> 2 ranks have the bits of one process: {whole}")


@pytest.mark.gpu(
    step=5, seconds=13, settles="a rank that uses up its memory: all ranks cut the batch"
)
def test_all_ranks_cut_the_batch_if_one_has_no_memory(check: Check) -> None:
    check.needs_training()
    small = () if check.on_gpu else ("--set", "size=8", "--set", "channels=4")
    words = ("tests.gpu.tasks:Wide", *small, "--max-steps", "4", "--shards", "2", "--threads", "1")
    words = (*words, "--precision", "fp32")
    # On the CPU, the task itself has too little room, on both ranks.
    limit = {"SHARED_LIMIT_MIB": "300"} if check.on_gpu else {}
    room = () if check.on_gpu else ("--set", "room=16")
    shared.run(check, 2, *words, *room, "--run", "cut", of_rank={1: limit})
    config = (_runs(check) / "cut" / "config.json").read_text()
    accumulation = config.partition('"accumulation": ')[2].partition(",")[0]
    check.saw(f"--accumulation {accumulation}")
    assert int(accumulation) > 1
    shared.run(check, 1, *words, "--accumulation", accumulation, "--run", "given")
    assert last(_runs(check) / "cut") == last(_runs(check) / "given")


@pytest.mark.gpu(
    step=5, seconds=20, long=True, settles="G4: a stopped rank ends the others with exit code 7"
)
def test_a_rank_that_hangs_ends_the_others_with_exit_code_7(check: Check) -> None:
    check.needs_training()
    _hangs(check, backend="gloo", env={})


@pytest.mark.gpu(
    step=5, seconds=9, settles="one NCCL rank: file store, heartbeat, group at the end"
)
def test_one_nccl_rank_has_the_bits_of_a_single_process(check: Check) -> None:
    check.needs_training()
    backend = "nccl" if check.on_gpu else "gloo"
    nccl = shared.start(check, 1, *_TASK, "--run", "nccl", backend=backend)
    alone = check.start_trainbox(*check.training("alone", *_TASK))
    ended = check.finish(nccl[0])
    check.finish(alone)
    check.saw("; ".join(line for line in ended.err.splitlines() if "Warning" in line)[:300])
    assert last(_runs(check) / "nccl") == last(_runs(check) / "alone")


@pytest.mark.gpu(
    step=6, seconds=30, long=True, settles="captured steps of two ranks: bits of one process"
)
def test_captured_steps_of_two_ranks_have_the_bits_of_one_process(check: Check) -> None:
    check.needs_training()
    steps = "210" if check.on_gpu else "5"
    words = ("digits", "--shards", "2", "--max-steps", steps, "--threads", "1")
    started = [
        *shared.start(check, 2, *words, "--run", "gloo", "--capture", "auto"),
        *shared.start(check, 1, *words, "--run", "eager", "--capture", "off"),
    ]
    for process in started:
        check.finish(process)
    manifest = json.loads((_runs(check) / "gloo" / "manifest.json").read_text())
    check.saw(f"two ranks: {manifest['rehearsal']['eager'] or 'captured'}")
    assert last(_runs(check) / "gloo") == last(_runs(check) / "eager")


@pytest.mark.gpu(step=7, seconds=16, settles="the exchange over NCCL: bits of one process")
def test_ranks_over_nccl_on_one_gpu_have_the_bits_of_one_process(check: Check) -> None:
    env = _nccl(check)
    whole = shared.start(check, 1, *_TASK, "--run", "on-1")
    ranks = shared.start(check, 2, *_TASK, "--run", "on-2", backend="nccl", env=env)
    for process in (*whole, *ranks):
        check.finish(process)
    assert last(_runs(check) / "on-2") == last(_runs(check) / "on-1")


@pytest.mark.gpu(step=7, seconds=10, settles="--strategy fsdp on GPU tensors: the same bits twice")
def test_fsdp_over_nccl_repeats_its_bits(check: Check) -> None:
    """gloo is not enough: with torch 2.11, its ranks end in a segmentation fault."""
    env = _nccl(check)
    words = ("digits", "--max-steps", "10", "--digest-steps", "5", "--threads", "1")
    started = [
        shared.start(check, 2, *words, "--run", run, backend="nccl", strategy="fsdp", env=env)
        for run in ("one", "other")
    ]
    for process in (process for processes in started for process in processes):
        check.finish(process)
    one, other = (by_step(_runs(check) / run) for run in ("one", "other"))
    check.saw(f"step {max(one)}: {one[max(one)]}")
    assert one == other


@pytest.mark.gpu(step=7, seconds=25, long=True, settles="G4: a stopped rank over NCCL: exit code 7")
def test_a_rank_that_hangs_over_nccl_ends_the_others_with_exit_code_7(check: Check) -> None:
    _hangs(check, backend="nccl", env=_nccl(check))


def _nccl(check: Check) -> dict[str, str]:
    """Return the variables of an NCCL for several ranks on one GPU, or skip the check.

    GPU_NCCL is the path of a libnccl.so.2 that replaces torch's library.
    """
    check.needs_training()
    check.needs_gpu()
    library = os.environ.get("GPU_NCCL", "")
    env = {"LD_PRELOAD": str(Path(library).resolve())} if library else {}
    version = check.results(check.start_program("nccl", env=env))["version"]
    check.saw(f"NCCL {version}")
    if not shared.nccl_shares_a_gpu(version):
        pytest.skip(f"NCCL {version} refuses several ranks on one GPU: set GPU_NCCL to the path "
                    "of a libnccl.so.2 of version 2.30 or newer")  # fmt: skip
    return env


def _hangs(check: Check, backend: str, env: Mapping[str, str]) -> None:
    """Stop a rank with SIGSTOP; the other one must exit with code 7."""
    processes = shared.start(
        *(check, 2, *_TASK, "--run", "hangs"),
        backend=backend,
        of_rank={1: {"SHARED_HANG_AT": "8"}},
        env={**env, "SHARED_TIMEOUT_S": "10"},
    )
    ended = check.finish(processes[0], codes=range(-64, 256))
    check.saw(f"exit code {ended.code}: {ended.err.strip().splitlines()[-1:]}")
    assert ended.code == 7, ended
