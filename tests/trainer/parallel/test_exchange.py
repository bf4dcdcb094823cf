"""The order of additions is the same, whichever rank owns a shard."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainbox.errors import WrongUse
from trainer.data.schedule import micro_batches
from trainer.parallel.exchange import Reduction
from trainer.parallel.shard_sums import Exchange
from trainer.parallel.tree import TreeSum, subtrees
from trainer.parallel.world import World

CPU = torch.device("cpu")


def _tree(shards: int) -> TreeSum[str]:
    return TreeSum(shards, lambda left, right: f"({left}+{right})")


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_the_tree(shards: int, expected: str) -> None:
    tree = _tree(shards)
    for shard in range(shards):
        tree.push((0, shard), str(shard))
    ((_root, total),) = tree.waiting
    assert total == expected


@pytest.mark.parametrize(
    ("shards", "world_size"),
    [(v, w) for v in (1, 2, 3, 4, 5, 7, 8, 9, 16, 21) for w in range(1, 10) if w <= v],
)
def test_the_order_of_additions_is_the_same_for_every_number_of_processes(
    shards: int, world_size: int
) -> None:
    alone, together = _tree(shards), _tree(shards)
    for shard in range(shards):
        alone.push((0, shard), str(shard))
    for rank in range(world_size):
        own = _tree(shards)
        owned = World(rank, world_size, CPU).owned(shards)
        for shard in owned:
            own.push((0, shard), str(shard))
        assert [node for node, _ in own.waiting] == subtrees(owned, shards)
        for node, value in own.waiting:
            together.push(node, value)
    assert [value for _, value in together.waiting] == [value for _, value in alone.waiting]
    assert len(together.waiting) == 1


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.used, self.unused = nn.BatchNorm1d(3), nn.Linear(3, 1), nn.Linear(3, 1)
        self.register_buffer("constant", torch.tensor([0.1]))
        self.register_buffer("missing", None)

    def forward(self, inputs_B3: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.used(self.norm(inputs_B3)) * self.constant
        return output


def test_gradients_are_the_trees_sum_and_buffers_the_mean_over_shards() -> None:
    torch.manual_seed(0)
    net, inputs_B3 = _Net(), torch.randn(12, 3)
    shards, accumulation = 3, 2
    micros = micro_batches(12, shards, accumulation, range(shards))
    reduction = Reduction(World(0, 1, CPU), shards, accumulation, net, list(net.parameters()))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    gradients, buffers = [], []
    for shard in range(shards):
        other = _Net()
        other.load_state_dict(net.state_dict())
        for micro in micros[shard * accumulation :][:accumulation]:
            other(inputs_B3[micro.start : micro.stop]).sum().backward()
        gradients.append([p.grad for p in (*other.norm.parameters(), *other.used.parameters())])
        buffers.append(dict(other.named_buffers()))
    for _step in range(2):
        for micro in micros:
            with reduction.of(micro):
                net(inputs_B3[micro.start : micro.stop]).sum().backward()
        reduction.finish()
        found = [p.grad for p in (*net.norm.parameters(), *net.used.parameters())]
        for grad, (a, b, c) in zip(found, zip(*gradients, strict=True), strict=True):
            assert grad is not None
            assert a is not None and b is not None and c is not None
            assert torch.equal(grad, (a + b) + c)
        assert net.unused.weight.grad is not None
        assert not net.unused.weight.grad.any()  # no shard's loss depends on it
        a, b, c = (each["norm.running_var"] for each in buffers)
        assert torch.equal(net.norm.running_var, ((a + b) + c) / 3)  # type: ignore[arg-type]
        assert int(net.norm.num_batches_tracked) == accumulation  # type: ignore[arg-type]
        assert torch.equal(net.constant, before["constant"])  # type: ignore[arg-type]
        net.zero_grad()
        for name, buffer in net.named_buffers():
            buffer.copy_(before[name])


def test_one_shard_is_not_copied() -> None:
    net = _Net()
    reduction = Reduction(World(0, 1, CPU), 1, 1, net, list(net.parameters()))
    (micro,) = micro_batches(4, 1, 1, range(1))
    with reduction.of(micro):
        net(torch.randn(4, 3)).sum().backward()
    reduction.finish()
    assert net.unused.weight.grad is None  # the reduction did not set it
    assert int(net.norm.num_batches_tracked) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_gradient_that_is_computed_several_times_is_refused(
    monkeypatch: pytest.MonkeyPatch, use_reentrant: bool
) -> None:
    """The first gradient would be sent before it is complete."""
    layer, inputs_B3 = nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True)
    # This process has the hooks of one of several ranks, but no other rank exists.
    reduction = Reduction(World(0, 2, CPU), 2, 1, layer, list(layer.parameters()))
    monkeypatch.setattr("trainer.parallel.shard_sums.Exchange.start", lambda _self: None)
    (micro,) = micro_batches(8, 2, 1, range(1))
    with contextlib.ExitStack() as stack:
        stack.enter_context(reduction.of(micro))
        outputs_B3 = inputs_B3
        for _ in range(2):
            outputs_B3 = checkpoint(layer, outputs_B3, use_reentrant=use_reentrant)
        if use_reentrant:
            stack.enter_context(pytest.raises(WrongUse, match="use use_reentrant=False"))
        outputs_B3.sum().backward()


def test_sums_are_sent_back_during_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket has one parameter. The backward computes the last parameter first."""
    monkeypatch.setattr("trainer.parallel.exchange._BUCKET_BYTES", 1)
    net = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(5)))
    reduction = Reduction(World(0, 2, CPU), 2, 1, net, list(net.parameters()))
    numbers = {id(bucket.exchange): number for number, bucket in enumerate(reduction._buckets)}
    calls: list[str] = []
    for name in ("start", "add"):

        def noted(exchange: Exchange, name: str = name) -> None:
            calls.append(f"{name} {numbers[id(exchange)]}")

        monkeypatch.setattr(Exchange, name, noted)
    monkeypatch.setattr(
        Exchange, "totals", lambda exchange: list(map(torch.zeros_like, exchange._likes))
    )
    (micro,) = micro_batches(8, 2, 1, range(1))
    for _step in range(2):
        with reduction.of(micro):
            net(torch.randn(4, 3)).sum().backward()
        during, calls[:] = list(calls), []
        reduction.finish()
        after, calls[:] = list(calls), []
        assert during == [
            *("start 0", "start 1", "start 2", "add 0"),
            *("start 3", "add 1", "start 4", "add 2"),
        ]
        assert after == ["add 3", "add 4"]
        net.zero_grad()


def test_a_flag_changes_with_any_shard_and_infinity_becomes_the_mean() -> None:
    net = nn.Linear(3, 1)
    for name, buffer in (
        ("flag", torch.tensor(False)),
        ("least", torch.full((2,), torch.inf)),
        ("empty", torch.zeros(0)),
    ):
        net.register_buffer(name, buffer)
    reduction = Reduction(World(0, 1, CPU), 2, 1, net, list(net.parameters()))
    for micro in micro_batches(4, 2, 1, range(2)):
        with reduction.of(micro):
            net.flag.fill_(bool(net.flag) != (micro.shard == 1))  # type: ignore[arg-type]
            net.least[0].fill_(float(micro.shard))  # type: ignore[index, union-attr]
            net(torch.randn(2, 3)).sum().backward()
    reduction.finish()
    assert net.flag
    assert net.least.tolist() == [0.5, torch.inf]  # type: ignore[operator]
