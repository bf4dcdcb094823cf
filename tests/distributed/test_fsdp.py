"""--strategy fsdp on two and four processes: the numbers of one, from shares; a checkpoint is gone on from by any number."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.conftest import Ended, Trainbox
from tests.distributed import sharded
from tests.trainer.here import Here, training_here
from trainer.errors import WrongUse
from trainer.losses import LossModule
from trainer.session import _told_as_failures
from trainer.sharding import blocks, moves_noted, shard

_TASK = f"{Path(sharded.__file__)}:Sharded"
_SETTINGS: dict[str, Any] = {
    "max_steps": 12,
    "clip_norm": 0.4,
    "accumulation": 2,
    "log_steps": 1,
    "digest_steps": 4,
    "checkpoint_steps": 4,
    "keep": 99,
    "threads": 1,
}
_WORDS = [word for name, value in _SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
_PARAMETERS = sum(parameter.numel() for parameter in sharded.Sharded().build_model().parameters())
_UNTRAINED = 110 + 12  # of them: frozen, and unused


def _fsdp(trainbox: Trainbox, processes: int, run: str, *words: str, env: dict[str, str] | None = None) -> Ended:
    launch = ["--strategy", "fsdp", "--device", "cpu", "--processes", str(processes)]
    return trainbox("train", _TASK, *_WORDS, *launch, "--run", run, *words, env=env)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Trainbox:
    """The runs `on2` and `on4` by --strategy fsdp."""
    trainbox = Trainbox(tmp_path_factory.mktemp("fsdp"))
    for processes in (2, 4):
        ended = _fsdp(trainbox, processes, f"on{processes}")
        assert ended.code == 0, ended.err
        assert f"-> torchrun FSDP over gloo, {processes} processes\n" in ended.out
    return trainbox


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], list[dict[str, Any]], list[dict[str, Any]]]:
    """The weights, and the entries of the training and the validations, of one process that holds everything."""
    with training_here(tmp_path_factory.mktemp("alone")) as here:
        here.train(task=_TASK, **_SETTINGS)
        return here.weights(), here.entries("train"), here.entries("validation")


def _state(folder: Path, run: str, step: int = 12) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "runs" / run / "checkpoints" / f"step-{step:08d}.pt", weights_only=True)
    return state


def _largest_difference(some: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(some) == list(other)
    return max(float((some[name] - other[name]).abs().max()) for name in some)


def _copy(source: Path, target: Path, step: int) -> None:
    """A run in `target` that has come to `step` of that in `source`."""
    (target / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "manifest.json", f"checkpoints/step-{step:08d}.pt", f"checkpoints/step-{step:08d}.json"):
        shutil.copy(source / name, target / name)


def _digests(run: Path, step: int) -> dict[str, Any]:
    entries = [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]
    return next({name: entry[name] for name in ("model", "optimizer", "tensors")} for entry in entries if entry["step"] == step)


@pytest.mark.parametrize("processes", [2, 4])
def test_it_computes_what_one_process_does(
    runs: Trainbox, alone: tuple[dict[str, Tensor], list[dict[str, Any]], list[dict[str, Any]]], processes: int
) -> None:
    weights, training, validations = alone
    assert _largest_difference(_state(runs.folder, f"on{processes}")["model"], weights) < 1e-6
    found = runs.entries(f"on{processes}", "train")
    assert min(entry["gradient_norm"] for entry in found) > 0.4, "clipping has nothing to do"
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert [entry[name] for entry in found] == pytest.approx([entry[name] for entry in training], rel=1e-5)
    validated = runs.entries(f"on{processes}", "validation")
    assert [entry["words"] for entry in validated] == [entry["words"] for entry in validations]
    assert [entry["loss"] for entry in validated] == pytest.approx([entry["loss"] for entry in validations], rel=1e-5)


@pytest.mark.parametrize("processes", [2, 4])
def test_each_process_holds_its_share_of_weights_and_optimizer(runs: Trainbox, processes: int) -> None:
    held = [json.loads((runs.folder / f"held-{processes}-{rank}.json").read_text()) for rank in range(processes)]
    for name, total in (("model", _PARAMETERS), ("optimizer", 2 * (_PARAMETERS - _UNTRAINED))):
        assert sum(part[name] for part in held) == total
        assert max(part[name] for part in held) < 1.15 * total / processes


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_another_number_of_processes_goes_on_from_the_same_bits(
    runs: Trainbox, alone: tuple[dict[str, Tensor], Any, Any], before: int, after: int
) -> None:
    source, target = (runs.folder / "runs" / name for name in (f"on{before}", f"{before}to{after}"))
    _copy(source, target, 8)
    ended = _fsdp(runs, after, target.name)
    assert ended.code == 0, ended.err
    assert "resume     from step 8" in ended.out
    assert f"changed since the run's start: plan.world_size: {before} -> {after}" in ended.out
    assert _digests(target, 8) == _digests(source, 8)
    assert _largest_difference(_state(runs.folder, target.name)["model"], alone[0]) < 1e-6


def test_a_killed_rank_ends_all_and_the_same_command_ends_with_the_same_bits(runs: Trainbox) -> None:
    killed = _fsdp(runs, 2, "killed", env={"KILL_AT": "10"})
    assert killed.code not in (0, 2)
    again = _fsdp(runs, 2, "killed")
    # Whichever save was whole by then: a save waits for the one before, so at least the first was.
    assert re.search("resume +from step (4|5|8|10),", again.out), again.out + again.err
    assert _digests(runs.folder / "runs" / "killed", 12) == _digests(runs.folder / "runs" / "on2", 12)


def test_one_process_goes_on_if_told_to(runs: Trainbox, here: Here, alone: tuple[dict[str, Tensor], Any, Any]) -> None:
    _copy(runs.folder / "runs" / "on4", here.path("r"), 8)
    words = ["train", _TASK, *_WORDS, "--run", "r"]
    code, _, err = here.command(*words, "--device", "cpu")
    assert code == 2
    assert "cannot go on to the same bits, since it was started with plan.strategy: fsdp -> single" in err
    code, out, err = here.command(*words, "--device", "cpu", "--resume", "anyway")
    assert (code, err) == (0, "")
    assert "resume     from step 8" in out
    assert _largest_difference(here.weights(), alone[0]) < 1e-6


def test_verify_does_it_again_on_as_many_processes_alone(runs: Trainbox, here: Here) -> None:
    run = runs.folder / "runs" / "on2"
    ended = runs("verify", str(run), "--strategy", "fsdp", "--device", "cpu", "--processes", "2", "--steps", "4")
    assert "SAME BITS" in ended.out, ended.err
    code, _, err = here.command("verify", str(run), "--device", "cpu")
    assert code == 2
    assert "was trained by fsdp on 2 process(es), and single on 1 adds in another order: verify it with --strategy fsdp" in err


def test_bf16_with_batch_norm_is_near_to_one_process_with_two_shards(trainbox: Trainbox, here: Here) -> None:
    """Weights are gathered in bf16, and batch norm's in float32; its buffers move by the mean over the processes."""
    ended = _fsdp(trainbox, 2, "low", "--set", "normed=true", "--precision", "bf16")
    assert ended.code == 0, ended.err
    here.train(task=_TASK, fields={"normed": "true"}, precision="bf16", shards=2, **_SETTINGS)
    found, expected = _state(trainbox.folder, "low")["model"], here.weights()
    assert {str(tensor.dtype) for tensor in found.values()} == {"torch.float32", "torch.int64"}
    assert found["blocks.2.norm.num_batches_tracked"] == expected["blocks.2.norm.num_batches_tracked"] == 24
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=5e-3, rtol=2e-2)
    losses = [[entry["loss"] for entry in entries] for entries in (trainbox.entries("low", "train"), here.entries("train"))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shards", "2"], "--shards 2 promises the same bits on 1 to 2 processes, and --strategy fsdp adds in another order"),
        (["--precision", "fp16"], "--precision fp16"),
    ],
)
def test_what_it_cannot_keep_is_refused_before_anything_starts(trainbox: Trainbox, words: list[str], message: str) -> None:
    ended = _fsdp(trainbox, 2, "r", *words)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not (trainbox.folder / "runs").exists()


def _names(model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in blocks(model)]


def test_blocks_are_the_parts_of_lists_and_not_what_is_in_them() -> None:
    assert _names(sharded.Sharded().build_model()) == ["blocks.0", "blocks.1", "blocks.2"]


def test_blocks_of_lists_in_lists_and_without_parameters() -> None:
    model = nn.Sequential(nn.Embedding(5, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ModuleDict({"a": nn.Linear(2, 2)}))
    assert _names(model) == ["0", "1.0", "2"]


def test_a_part_that_shares_a_parameter_is_no_block_and_one_that_stands_twice_is_one() -> None:
    tied = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2), nn.Linear(2, 5, bias=False))
    tied[2].weight = tied[0].weight  # type: ignore[union-attr, assignment]
    assert _names(tied) == ["1"]
    layer = nn.Linear(2, 2)
    assert blocks(nn.ModuleList([layer, layer])) == [layer]


@pytest.fixture
def a_group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    yield
    dist.destroy_process_group()


class _Teacher(nn.Module):
    """A part that is not trained moves in a forward, as a mean teacher's does."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.student, self.teacher, self.moves = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False), moves

    def forward(self, x_B3: Tensor) -> Tensor:
        if self.moves:
            self.teacher.bias.data.add_(1)
        output: Tensor = self.teacher(self.student(x_B3))
        return output

    def inside(self) -> None: ...


@pytest.mark.parametrize("moves", [True, False])
def test_a_forward_that_moves_what_is_not_trained_is_noted(a_group_of_one: None, moves: bool) -> None:
    module = _Teacher(moves)
    module.inner = nn.Sequential(_Teacher(moves))  # type: ignore[assignment]
    shard(module, torch.device("cpu"), 1, None)
    with moves_noted(module) as moved:
        module.inner(module(torch.ones(2, 3)))
    assert moved == (["teacher.bias", "teacher.bias"] if moves else [])


def test_weights_used_outside_their_block_are_explained(a_group_of_one: None, tmp_path: Path) -> None:
    module = LossModule(sharded.Sharded(), nn.Sequential(nn.Linear(2, 2)), "cpu", None)
    shard(module, torch.device("cpu"), 1, None)
    block_weight = module.model.get_parameter("0.weight")
    with (
        pytest.raises(WrongUse, match="at hand in the block's own forward alone"),
        _told_as_failures(tmp_path),
    ):
        module.inside(lambda: nn.functional.linear(torch.ones(1, 2), block_weight))


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.zeros(()), "cannot share out scale, a single number: give it the shape (1,)"),
        (torch.zeros(1, dtype=torch.float64), "needs all parameters of one type, and these are torch.float32, torch.float64"),
    ],
)
def test_parameters_that_cannot_be_shared_out_are_named(parameter: Tensor, message: str) -> None:
    module = nn.Linear(2, 2)
    module.scale = nn.Parameter(parameter)  # type: ignore[assignment]
    with pytest.raises(WrongUse, match=re.escape(message)):
        shard(module, torch.device("cpu"), 1, None)
