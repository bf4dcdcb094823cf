"""--strategy fsdp on two and four processes.

The numbers are the same as on one process, and any number of processes resumes from a checkpoint.
"""

import contextlib
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support import sharded
from tests.support.commands import Trainbox, wait_until
from tests.support.here import Here, training_here
from tests.support.pictures import FIELDS, make_pictures
from tests.support.ranks import EndedRanks, Forks, Ranks
from trainbox.errors import OutOfMemory, WrongUse
from trainbox.options.config import Config, check_strategy
from trainer.loop.losses import LossModule
from trainer.loop.out_of_memory import all_fit
from trainer.parallel import fsdp as sharding
from trainer.parallel.fsdp import blocks, lost_writes, shard, whole
from trainer.parallel.strategy import STRATEGIES, Strategy
from trainer.parallel.world import World
from trainer.records.run_record import RunRecord
from trainer.session.default_name import default_name
from trainer.session.failures import errors_as_failures
from trainer.session.settle import _default_precision
from trainer.session.verify import _refuse_another_plan

_TASK = f"{Path(sharded.__file__)}:Sharded"
_SETTINGS: dict[str, Any] = {
    "max_steps": 30,
    # The loss falls, so the second validation ends the training after 10 steps.
    "early_stopping": "max:loss",
    "patience": 1,
    "clip_norm": 0.4,
    "accumulation": 2,
    "log_steps": 1,
    "digest_steps": 4,
    "checkpoint_steps": 4,
    "keep": 99,
    "threads": 1,
}
_LAST = 10
_PARAMETERS = sum(parameter.numel() for parameter in sharded.Sharded().build_model().parameters())
_UNTRAINED = 110 + 12  # of these, frozen and unused parameters


def _command(run: str, *words: str, **others: Any) -> list[str]:
    settings = {name: value for name, value in (_SETTINGS | others).items() if value is not None}
    options = [
        word
        for name, value in settings.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return ["train", _TASK, *options, "--device", "cpu", "--run", run, *words]


_COMPILE = "--strategy fsdp is not tested with --compile: drop one of the two options"
_LAUNCH = ("--strategy", "fsdp", "--processes", "2")
_IMAGES = ("train", "images", "--device", "cpu", "--run", "images", "--batch-size", "4")


class _Sharded(Ranks):
    """Ranks of --strategy fsdp."""

    def __call__(self, processes: int, *words: str, **options: Any) -> EndedRanks:
        return super().__call__(processes, *words, strategy="fsdp", **options)


@pytest.fixture(scope="module")
def ranks(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> _Sharded:
    return _Sharded(forks, tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def runs(ranks: Ranks) -> Trainbox:
    """Train the run `on2` on two processes, and `on4` on four from the fourth step of `on2`."""
    trainbox = Trainbox(ranks.folder)
    for processes in (2, 4):
        if processes == 4:
            _copy(trainbox.folder / "runs/on2", trainbox.folder / "runs/on4", 4)
        ended = ranks(processes, *_command(f"on{processes}", "--rehearsal"))
        assert (ended.codes, ended.errs) == ([0] * processes, [""] * processes)
        held = json.loads((trainbox.folder / f"held-{processes}-0.json").read_text())["model"]
        assert f"sharded    {held:,} of them on rank 0\n" in ended.out
        assert f"(ended early at step {_LAST})\n" in ended.out
        # FSDP does not measure the exchange.
        assert not any(
            "exchange_share" in entry for entry in trainbox.entries(f"on{processes}", "train")
        )
    return trainbox


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Here:
    """Train the run `r` on one process, which holds everything."""
    with training_here(tmp_path_factory.mktemp("alone")) as here:
        here.train(task=_TASK, **_SETTINGS)
    return here


def _state(folder: Path, run: str, step: int = _LAST) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(
        folder / "runs" / run / "checkpoints" / f"step-{step:08d}.pt", weights_only=True
    )
    return state


def _largest_difference(some: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(some) == list(other)
    return max(float((some[name] - other[name]).abs().max()) for name in some)


def _copy(source: Path, target: Path, step: int) -> None:
    """Copy the run of `source` to `target` as it was after `step`."""
    shutil.copytree(source, target)
    for path in (target / "checkpoints").iterdir():
        if path.stem != f"step-{step:08d}":
            path.unlink()


def _digests(run: Path, step: int) -> dict[str, Any]:
    entries = [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]
    return next(
        {name: entry[name] for name in ("model", "optimizer", "tensors")}
        for entry in entries
        if entry["step"] == step
    )


@pytest.mark.parametrize(("processes", "first"), [(2, 0), (4, 4)])
def test_the_numbers_and_the_end_are_those_of_one_process(
    runs: Trainbox, alone: Here, processes: int, first: int
) -> None:
    state = _state(runs.folder, f"on{processes}")
    assert _largest_difference(state["model"], alone.weights()) < 1e-6
    assert (state["progress"]["patience_used"], state["progress"]["ended_early"]) == (1, True)
    training, found = alone.entries("train"), runs.entries(f"on{processes}", "train")
    assert [entry["step"] for entry in found] == list(range(1, _LAST + 1))
    found = found[first:]  # the steps before were copied with the run
    assert min(entry["gradient_norm"] for entry in found) > 0.4, "nothing is clipped"
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert [entry[name] for entry in found] == pytest.approx(
            [entry[name] for entry in training[first:]], rel=1e-5
        )
    validations, validated = (
        alone.entries("validation"),
        runs.entries(f"on{processes}", "validation"),
    )
    for name in ("step", "words"):
        assert [entry[name] for entry in validated] == [entry[name] for entry in validations]
    assert [entry["loss"] for entry in validated] == pytest.approx(
        [entry["loss"] for entry in validations], rel=1e-5
    )


@pytest.mark.parametrize("processes", [2, 4])
def test_each_process_holds_its_share_of_weights_and_optimizer(
    runs: Trainbox, processes: int
) -> None:
    held = [
        json.loads((runs.folder / f"held-{processes}-{rank}.json").read_text())
        for rank in range(processes)
    ]
    for name, total in (("model", _PARAMETERS), ("optimizer", 2 * (_PARAMETERS - _UNTRAINED))):
        assert sum(part[name] for part in held) == total
        assert max(part[name] for part in held) < 1.15 * total / processes


def test_another_number_of_processes_resumes_from_the_same_bits(
    ranks: Ranks, runs: Trainbox, alone: Here
) -> None:
    on2, on4, target = (runs.folder / "runs" / name for name in ("on2", "on4", "4to2"))
    assert _digests(on4, 4) == _digests(on2, 4)
    _copy(on4, target, 8)
    ended = ranks(2, *_command(target.name))
    assert ended.codes == [0, 0], ended.errs
    assert "resume     from step 8" in ended.out
    assert "changed since the run's start" not in ended.out  # as two processes would report
    assert _digests(target, 8) == _digests(on4, 8)
    assert _largest_difference(_state(runs.folder, target.name)["model"], alone.weights()) < 1e-6


def test_a_stop_within_an_epoch_and_a_killed_rank_do_not_change_the_bits(
    ranks: Ranks, runs: Trainbox
) -> None:
    words = _command("stopped", "--runs-dir", str(runs.folder / "runs"))
    process = ranks.launch(*words, *_LAUNCH, env={"STOP_AT": "5"})
    wait_until(lambda: all((ranks.folder / f"waits-{rank}").exists() for rank in (0, 1)), process)
    process.send_signal(signal.SIGTERM)
    stopped = process.wait()
    assert stopped.code == 75, stopped.errs
    assert "-> torchrun FSDP over gloo, 2 processes\n" in stopped.out
    # All ranks get the signal in the sixth step, and vote in the next one.
    message = "stopped by SIGTERM at step 7 of 30, checkpoint saved: resume with the same command"
    assert stopped.errs[0].count("checkpoint saved") == stopped.errs[0].count(message) == 1

    killed = ranks(2, *words, env={"KILL_AT": "9"})
    assert "resume     from step 7, epoch 2\n" in killed.out
    assert killed.codes == [7, -signal.SIGKILL]
    assert "lost contact with another process" in killed.errs[0]

    again = ranks(2, *words)
    assert again.codes == [0, 0], again.errs
    # The save of step 8 may be incomplete.
    assert re.search("resume +from step [78],", again.out), again
    on2, found = (runs.folder / "runs" / name for name in ("on2", "stopped"))
    assert _digests(found, _LAST) == _digests(on2, _LAST)
    names = ("step", "loss", "words")
    validations = [
        [[e[name] for name in names] for e in runs.entries(run.name, "validation")]
        for run in (found, on2)
    ]
    assert validations[0] == validations[1]


def test_one_process_resumes_with_resume_anyway(runs: Trainbox, here: Here, alone: Here) -> None:
    _copy(runs.folder / "runs" / "on4", here.path("r"), 8)
    code, _, err = here.command(*_command("r"))
    assert code == 2
    assert "cannot be resumed with the same bits (plan.strategy: fsdp -> single" in err
    code, out, err = here.command(*_command("r", "--resume", "anyway"))
    assert (code, err) == (0, "")
    assert "resume     from step 8" in out
    assert _largest_difference(here.weights(), alone.weights()) < 1e-6


def test_fsdp_resumes_a_run_of_one_process_with_resume_anyway(ranks: Ranks, alone: Here) -> None:
    _copy(alone.path(), ranks.folder / "runs/1to2", 8)
    refused = ranks(2, *_command("1to2"))
    assert refused.codes[0] == 2, refused
    assert "cannot be resumed with the same bits (plan.strategy: single -> fsdp" in refused.errs[0]
    ended = ranks(2, *_command("1to2", "--resume", "anyway"))
    assert ended.codes == [0, 0], ended.errs
    assert "resume     from step 8" in ended.out
    assert _largest_difference(_state(ranks.folder, "1to2")["model"], alone.weights()) < 1e-6


def test_images_have_no_average_of_weights_under_fsdp(ranks: Ranks) -> None:
    make_pictures(ranks.folder / "data/shapes", ("cross", "disc"), 12, seed=0)
    fields = [f"--set={name}={value}" for name, value in (FIELDS | {"ema": 0.5}).items()]
    ended = ranks(2, *_IMAGES, *fields)
    assert ended.codes == [2, 2], ended.errs
    assert (
        "--set ema=0.5: the average of weights does not work with --strategy fsdp: use --strategy "
        "ddp, or --set ema=0" in ended.errs[0]
    )


def test_verify_needs_the_same_number_of_processes(
    ranks: Ranks, runs: Trainbox, here: Here
) -> None:
    run = runs.folder / "runs" / "on2"
    ended = ranks(2, "verify", str(run), "--device", "cpu", "--steps", "4")
    assert ended.codes == [0, 0], ended
    assert "SAME BITS" in ended.out
    code, _, err = here.command("verify", str(run), "--device", "cpu")
    assert code == 2
    assert (
        "was trained by fsdp on 2 process(es), but single on 1 adds in another order: "
        "verify it with --strategy fsdp" in err
    )


def test_evaluate_has_the_figures_of_the_training_on_its_own_number_of_processes(
    ranks: Ranks, runs: Trainbox, here: Here
) -> None:
    run = runs.folder / "runs" / "on2"
    ended = ranks(2, "evaluate", str(run), "--device", "cpu")
    assert (ended.codes, ended.errs) == ([0, 0], ["", ""])
    assert f"equal to the training's validation at step {_LAST}\n" in ended.out
    # The weights are whole on one process, which has the same batches.
    code, out, _ = here.command("evaluate", str(run), "--device", "cpu", "--out", "alone")
    assert code == 0
    assert "changed since the run's start: plan.strategy: fsdp -> single" in out
    on2, alone = (
        json.loads((folder / "evaluation.json").read_text())
        for folder in (run / "evaluations/best-validation", here.folder / "alone")
    )
    assert alone["batch_size"] == on2["batch_size"]
    assert alone["figures"]["loss"] == pytest.approx(on2["figures"]["loss"], rel=1e-6)


_ALONE, _DDP2, _FSDP2, _FSDP4 = (
    {"strategy": strategy, "world_size": count}
    for strategy, count in (("single", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 4))
)


@pytest.mark.parametrize(
    ("plan", "resumed", "steps", "now", "message"),
    [
        (_FSDP2, [], None, ("fsdp", 2), None),
        (
            _FSDP2,
            [],
            None,
            ("fsdp", 4),
            "was trained by fsdp on 2 process(es), but fsdp on 4 adds in another order",
        ),
        (_FSDP2, [_FSDP2], None, ("fsdp", 2), None),
        (
            _FSDP2,
            [_FSDP4],
            None,
            ("fsdp", 2),
            "was trained by fsdp on 2, then fsdp on 4 process(es)",
        ),
        (
            _FSDP2,
            [_FSDP4],
            5,
            ("fsdp", 2),
            "was trained by fsdp on 2, then fsdp on 4 process(es)",
        ),
        (_FSDP2, [_FSDP4], 4, ("fsdp", 2), None),
        (
            _DDP2,
            [],
            None,
            ("fsdp", 2),
            "was trained by ddp on 2 process(es), but fsdp on 2 adds in another order",
        ),
        (
            _DDP2,
            [_FSDP2],
            None,
            ("ddp", 2),
            "was trained by ddp on 2, then fsdp on 2 process(es)",
        ),
        (_DDP2, [_ALONE], None, ("ddp", 3), None),
    ],
)
def test_a_run_is_verified_only_by_the_same_number_of_processes(
    monkeypatch: pytest.MonkeyPatch,
    plan: dict[str, Any],
    resumed: list[dict[str, Any]],
    steps: int | None,
    now: tuple[str, int],
    message: str | None,
) -> None:
    monkeypatch.setattr("trainer.session.verify.launched_as", lambda: now)
    refused = (
        contextlib.nullcontext()
        if message is None
        else pytest.raises(WrongUse, match=re.escape(message))
    )
    manifest = {"plan": plan, "resumes": [{"step": 4, "plan": p} for p in resumed]}
    with refused:
        _refuse_another_plan(RunRecord(Path("runs/r"), {}, Config("digits"), manifest), steps)


def test_bf16_with_batch_norm_is_near_to_one_process_with_two_shards(
    ranks: Ranks, here: Here
) -> None:
    """Weights are gathered in bf16, and weights of batch norm in float32.

    The buffers of batch norm are averaged over the processes.
    """
    # The metric `words` is constant, so the second validation ends the training.
    others: dict[str, Any] = {"precision": "bf16", "clip_norm": None, "early_stopping": "words"}
    ended = ranks(2, *_command("low", "--set", "normed=true", **others))
    assert ended.codes == [0, 0], ended.errs
    here.train(task=_TASK, fields={"normed": "true"}, shards=2, **(_SETTINGS | others))
    held = [
        json.loads((ranks.folder / f"held-2-{rank}-normed.json").read_text()) for rank in (0, 1)
    ]
    assert [part["gathered"] for part in held] == ["torch.bfloat16"] * 2
    found, expected = _state(ranks.folder, "low")["model"], here.weights()
    assert {str(tensor.dtype) for tensor in found.values()} == {"torch.float32", "torch.int64"}
    assert (
        found["blocks.1.norm.num_batches_tracked"]
        == expected["blocks.1.norm.num_batches_tracked"]
        == 2 * _LAST
    )
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=5e-3, rtol=2e-2)
    entries = (Trainbox(ranks.folder).entries("low", "train"), here.entries("train"))
    for name, tolerance in (("loss", 1e-2), ("gradient_norm", 5e-2)):
        values = [[entry[name] for entry in each] for each in entries]
        assert values[0] == pytest.approx(values[1], rel=tolerance)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"shards": 2},
            "--shards 2 guarantees the same bits on 1 to 2 processes, but --strategy fsdp "
            "adds in an order that depends on their number: drop --shards, or use --strategy ddp",
        ),
        (
            {"precision": "fp16"},
            "--strategy fsdp cannot scale gradients, as --precision fp16 needs: use bf16 or fp32",
        ),
        ({"compile": True}, _COMPILE),
    ],
)
def test_options_that_fsdp_does_not_support_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(WrongUse) as refused:
        check_strategy(Config(**settings), "fsdp")
    assert str(refused.value) == message


def test_compile_is_refused_by_the_command_and_by_each_rank(
    trainbox: Trainbox, ranks: Ranks
) -> None:
    ended = trainbox(*_command("r", "--compile"), *_LAUNCH)
    assert (ended.code, ended.out, ended.err) == (2, "", f"trainbox: {_COMPILE}\n")
    assert not (trainbox.folder / "runs").exists()
    found = ranks(2, *_command("compiled", "--compile"))
    assert (found.codes, found.errs) == ([2, 2], [f"trainbox: {_COMPILE}\n"] * 2)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "keeps=rows",
            "--strategy fsdp cannot divide rows of OneARow, of shape (41,) for a parameter of "
            "(41, 10): use another optimizer",
        ),
        (
            "keeps=factors",
            "--strategy fsdp does not support this optimizer, whose step torch cannot compute on "
            "shares of tensors: use another optimizer such as AdamW, or use --strategy ddp",
        ),
        (
            "seeded=false",
            "task Sharded: build_model() returns different weights on each process, first in "
            "embedding.weight: draw random numbers only from the global generators of torch, NumPy "
            "and Python",
        ),
        (
            "moves=true",
            "task Sharded: a forward changes the parameter frozen.bias, which is not trained, and "
            "--strategy fsdp would lose the change: make it a buffer, or use --strategy ddp",
        ),
    ],
)
def test_all_ranks_refuse_a_task_that_cannot_be_sharded(
    ranks: Ranks, setting: str, message: str
) -> None:
    ended = ranks(2, *_command(setting, "--set", setting, "--rehearsal"))
    assert (ended.codes, ended.errs) == ([2, 2], [f"trainbox: {message}\n"] * 2)
    assert not list((ranks.folder / "runs" / setting).glob("checkpoints/*"))


def _strategy(device: str, name: str, rank: int = 0) -> Strategy:
    return STRATEGIES[name](name, World(rank, 1, torch.device(device)))


@pytest.mark.parametrize(("strategy", "precision"), [("single", "fp16"), ("fsdp", "fp32")])
def test_without_bf16_fsdp_trains_in_fp32(
    monkeypatch: pytest.MonkeyPatch, strategy: str, precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert _default_precision(_strategy("cuda:0", strategy)) == precision


@pytest.mark.parametrize(("strategy", "raised"), [("single", OutOfMemory), ("fsdp", MemoryError)])
def test_ranks_do_not_agree_on_used_up_memory_under_fsdp(
    strategy: str, raised: type[Exception]
) -> None:
    with pytest.raises(raised), all_fit(_strategy("cpu", strategy)):
        raise MemoryError


def test_the_default_name_of_a_run_names_fsdp(tmp_path: Path) -> None:
    single, fsdp = (
        default_name(Config(), _strategy("cpu", strategy), tmp_path)
        for strategy in ("single", "fsdp")
    )
    assert fsdp == f"{single}-fsdp"


def _names(model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in blocks(model)]


def test_blocks_are_the_items_of_lists_and_not_their_submodules() -> None:
    assert _names(sharded.Sharded().build_model()) == ["blocks.0", "blocks.1"]


def test_blocks_of_lists_in_lists_and_without_parameters() -> None:
    model = nn.Sequential(
        nn.Embedding(5, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Bilinear(2, 2, 2)
    )
    assert _names(model) == ["0", "1.0", "2"]


def test_a_dict_in_a_list_is_not_a_block_because_it_cannot_be_called() -> None:
    layers = [
        nn.ModuleDict({"one": nn.Linear(2, 2), "more": nn.Sequential(nn.Linear(2, 2))})
        for _ in range(2)
    ]
    assert _names(nn.ModuleList(layers)) == ["0.more.0", "1.more.0"]


def test_a_module_with_a_shared_parameter_is_not_a_block_and_a_repeated_one_is_a_block() -> None:
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


def test_blocks_are_gathered_in_bf16_and_norms_in_float32(
    a_group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(4, 4)  # in two lists
    norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)]
    model = nn.ModuleDict({"a": nn.Sequential(layer, *norms), "b": nn.Sequential(layer)})
    module = LossModule(sharded.Sharded(), model, "cpu", torch.bfloat16)
    names = {part: name for name, part in module.named_modules()}
    policies = {}

    def noted(part: nn.Module, **settings: Any) -> None:
        policies[names[part]] = settings["mp_policy"]
        fully_shard(part, **settings)

    monkeypatch.setattr(sharding, "fully_shard", noted)
    shard(module, torch.device("cpu"), 1, torch.bfloat16)
    low = MixedPrecisionPolicy(
        torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    assert policies == {"model.a.1": MixedPrecisionPolicy(), "model.a.0": low, "": low}


def test_only_the_first_process_has_a_copy_of_the_gathered_state(a_group_of_one: None) -> None:
    module = _Teacher(False)
    shard(module, torch.device("cpu"), 1, None)
    weight, step = module.get_parameter("student.weight"), torch.ones(())
    state = {"weight": weight, "steps": [step], "name": "AdamW"}
    found = _strategy("cpu", "fsdp").gathered(state)
    assert torch.equal(found["weight"], whole(weight).detach())
    assert type(found["weight"]) is Tensor
    step += 1  # as the training continues during the save
    assert (found["steps"], found["name"]) == ([torch.ones(())], "AdamW")
    assert _strategy("cpu", "fsdp", rank=1).gathered(state) == {
        "weight": None,
        "steps": [None],
        "name": "AdamW",
    }


class _Teacher(nn.Module):
    """A module with a frozen part whose forward changes it, as a mean teacher does."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.student, self.teacher, self.moves = (
            nn.Linear(3, 3),
            nn.Linear(3, 3).requires_grad_(False),
            moves,
        )

    def forward(self, x_B3: Tensor) -> Tensor:
        if self.moves:
            self.teacher.bias.data.add_(1)
        output: Tensor = self.teacher(self.student(x_B3))
        return output

    def inside(self) -> None: ...


@pytest.mark.parametrize("moves", [True, False])
def test_a_forward_that_changes_frozen_parameters_is_noted(
    a_group_of_one: None, moves: bool
) -> None:
    module = _Teacher(moves)
    module.inner = nn.Sequential(_Teacher(moves))  # type: ignore[assignment]
    shard(module, torch.device("cpu"), 1, None)
    with lost_writes(module) as moved:
        module.inner(module(torch.ones(2, 3)))
    assert moved == (["teacher.bias", "teacher.bias"] if moves else [])


def test_weights_used_outside_their_block_are_explained(
    a_group_of_one: None, tmp_path: Path
) -> None:
    module = LossModule(sharded.Sharded(), nn.Sequential(nn.Linear(2, 2)), "cpu", None)
    shard(module, torch.device("cpu"), 1, None)
    block_weight = module.model.get_parameter("0.weight")
    with (
        pytest.raises(WrongUse, match="gathers a block's weights only during the"),
        errors_as_failures(tmp_path),
    ):
        module.inside(lambda: nn.functional.linear(torch.ones(1, 2), block_weight))


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.zeros(()), "cannot divide scale, a single number: give it the shape (1,)"),
        (
            torch.zeros(1, dtype=torch.float64),
            "needs parameters of one type (torch.float32, torch.float64): convert them",
        ),
    ],
)
def test_parameters_that_cannot_be_sharded_are_named(parameter: Tensor, message: str) -> None:
    module = nn.Linear(2, 2)
    module.scale = nn.Parameter(parameter)  # type: ignore[assignment]
    with pytest.raises(WrongUse, match=re.escape(message)):
        shard(module, torch.device("cpu"), 1, None)
