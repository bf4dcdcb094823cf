"""The optimizer step as CUDA graphs: the GPU repeats a recorded step without the host.

A step is captured only if the rehearsal has shown that a replay has the bits of an eager step. The
reasons are in docs/decisions/0035-the-captured-step.md.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents no other path

from trainbox.errors import text_of
from trainbox.tensor_trees import mapped, tensors_in
from trainer.loop import graphs
from trainer.loop.out_of_memory import FIRST_STEPS, failed_allocations, memory_used_up
from trainer.loop.state import Job
from trainer.loop.step import EagerStep
from trainer.loop.surface import PLAIN, Surface

# Shape suffix: B examples of a micro-batch.

_MOST_OTHERS = 16  # batches of another shape, after which the training is eager


class _Graph(NamedTuple):
    """Recorded work that reads and writes the gradients of the model.

    Attributes:
        inputs: The tensors of the batch that the work reads.
        outside: The memory of other tensors that the work reads, which must not be freed.
        layout: The types, shapes and plain values of this batch.
        before: The gradient of each parameter that the work reads, or None.
        after: The gradient of each parameter after the work, or None.
        result: What the work returned.
        replay: Computes the work again.
    """

    inputs: list[Tensor]
    outside: dict[int, torch.UntypedStorage]
    layout: str
    before: list[Tensor | None]
    after: list[Tensor | None]
    result: Any
    replay: Callable[[], None]


class CapturedStep(EagerStep):
    """The same step as `EagerStep`, as CUDA graphs: one for each micro-batch, one for the update.

    The first steps are eager. A batch of another shape, type or structure than the recorded one is
    computed eagerly. After 16 such batches, or if the Python state that a step may read changes,
    all later steps are eager. The exchange between the ranks, the learning rate and the seeds stay
    outside of the graphs.

    Attributes:
        others: How many batches were computed eagerly after the capture.
    """

    def __init__(
        self,
        job: Job,
        micro_batches: Iterator[Any],
        report: Callable[[str], None],
        eager_steps: int = FIRST_STEPS,
    ) -> None:
        """Capture the step after `eager_steps` eager steps, in which the optimizer makes its state.

        `report` is called with the reason if later steps are eager.
        """
        super().__init__(job, micro_batches)
        self._recorder: graphs.Recorder | None = graphs.Recorder(job.world)
        self._from_step = self.first_step + eager_steps
        self._micros: dict[int, _Graph] = {}
        self._update: _Graph | None = None
        self._surface: Surface | None = None
        self._was_eager = False
        self.others = 0
        # A float32 number on a GPU, as `learning_rate` rounds it.
        dtype = torch.float32 if job.world.device.type == "cuda" else torch.float64
        self._rates = [
            torch.zeros((), dtype=dtype, device=job.world.device)
            for _ in job.state.optimizer.param_groups
        ]
        self._report = report

    @property
    def overlaps(self) -> bool:
        """Whether the last backward sends gradients: no, the exchange follows the last graph."""
        return not self._may_record()

    def compute(self, number: int, batch: Any, checks: bool) -> dict[str, Tensor]:
        if not self._may_record():
            return super().compute(number, batch, checks)
        layout = _layout(batch)
        if number not in self._micros and layout:
            self._record_micro(number, batch, checks, layout)
        looks = number == 0 or self._was_eager
        if self._surface is not None and looks and (changed := self._surface.change()):
            self._drop(f"{changed} has changed")
        graph = self._micros.get(number)
        if graph is None or graph.layout != layout or not self._fill(graph):
            self._was_eager = True
            if self._recorder is not None:
                self.others += 1
                if self.others >= _MOST_OTHERS:
                    self._drop(f"{_MOST_OTHERS} batches had other shapes, types or plain values")
            return super().compute(number, batch, checks)
        if graph.inputs:
            with torch.no_grad():
                torch._foreach_copy_(graph.inputs, tensors_in(batch))
        self._was_eager = False
        losses_B: dict[str, Tensor] = self._replayed(graph)
        return losses_B

    def _record_micro(self, number: int, batch: Any, checks: bool, layout: str) -> None:
        inputs = mapped(lambda tensor: tensor.detach().clone(), batch)
        compute = super().compute

        def work() -> dict[str, Tensor]:
            return {n: loss_B.detach() for n, loss_B in compute(number, inputs, checks).items()}

        # A task may let an input have a gradient, for example to differentiate by it.
        graph = self._recorded(work, tensors_in(inputs), layout)
        if graph is not None:
            self._micros[number] = graph
        if len(self._micros) == len(self._job.schedule.micros):
            self._surface = Surface(self._job)

    def update(self, needs_norm: bool) -> tuple[Tensor | None, bool]:
        if not self._may_record() or len(self._micros) < len(self._job.schedule.micros):
            return super().update(needs_norm)
        groups = self._job.state.optimizer.param_groups
        if self._update is None:
            with _as_captured(groups, self._rates):
                self._update = self._recorded(functools.partial(super().update, True))
            if self._update is None:
                self._renew_scaler()
        if self._update is None or not self._fill(self._update):
            return super().update(needs_norm)
        for rate, group in zip(self._rates, groups, strict=True):
            rate.fill_(group["lr"])
        result: tuple[Tensor | None, bool] = self._replayed(self._update)
        return result

    def _renew_scaler(self) -> None:
        """Forget that the recording has unscaled the gradient."""
        state = self._job.state
        if state.scaler.is_enabled():
            scaler = torch.amp.GradScaler(self._job.world.device.type, enabled=True)
            scaler.load_state_dict(state.scaler.state_dict())
            state.scaler = scaler

    def _may_record(self) -> bool:
        return self._recorder is not None and self._job.state.progress.step >= self._from_step

    def _recorded(
        self, work: Callable[[], Any], inputs: Sequence[Tensor] = (), layout: str = ""
    ) -> _Graph | None:
        """Return `work`, which reads `inputs`, as a graph, or None if it cannot be recorded."""
        assert self._recorder is not None
        before = [parameter.grad for parameter in self.parameters]
        failed_before = failed_allocations()
        try:
            with KeptMemory() as kept:
                result, replay = self._recorder.record(work)
            if failed_allocations() > failed_before:  # cuDNN then takes another algorithm
                raise torch.OutOfMemoryError("an allocation has failed")
            after = [parameter.grad for parameter in self.parameters]
        except Exception as error:  # noqa: BLE001 - the eager step raises what is wrong
            reason = memory_used_up(error) or text_of(error).partition("\n")[0]
            self._drop(f"the step cannot be captured ({reason})")
            return None
        finally:
            self._set(before)
        return _Graph(list(inputs), kept.storages, layout, before, after, result, replay)

    @torch.no_grad()
    def _fill(self, graph: _Graph) -> bool:
        """Copy the gradients to the memory that the graph reads.

        Return False if other parameters have gradients than in the recording.
        """
        read, moved = list[Tensor](), list[Tensor]()
        for old, parameter in zip(graph.before, self.parameters, strict=True):
            new = parameter.grad
            if old is new:
                continue
            if old is None or new is None:
                return False
            read.append(old)
            moved.append(new)
        if read:
            torch._foreach_copy_(read, moved)
        return True

    def _replayed(self, graph: _Graph) -> Any:
        graph.replay()
        self._set(graph.after)
        return graph.result

    def _set(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _drop(self, problem: str) -> None:
        """Compute all later steps eagerly, because of `problem`."""
        self._report(problem)
        self._recorder, self._update, self._surface = None, None, None
        self._micros.clear()


def one_step(job: Job, micro_batches: Iterator[Any]) -> EagerStep:
    """Return the step of a training, which is captured unless there is a reason to be `eager`."""
    if job.eager:
        return EagerStep(job, micro_batches)

    def report(problem: str) -> None:
        step = job.state.progress.step
        job.run.report(f"step {step}: steps are eager from now on: {problem}")

    return CapturedStep(job, micro_batches, report)


@contextlib.contextmanager
def _as_captured(groups: Sequence[dict[str, Any]], rates: Sequence[Tensor]) -> Iterator[None]:
    """Let the optimizer read its learning rates from tensors, and allow its recording."""
    kept = [dict(group) for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, values in zip(groups, kept, strict=True):
            group.update(values)


class KeptMemory(TorchDispatchMode):
    """Keeps the memory that operations read but that none of them has allocated, as `storages`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._made = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in([list(args), kwargs or {}]):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._made:
                self.storages[storage.data_ptr()] = storage
        result = func(*args, **(kwargs or {}))
        made = {tensor.untyped_storage().data_ptr() for tensor in tensors_in([result])}
        self._made |= made - self.storages.keys()
        return result


def _layout(batch: Any) -> str:
    """Return a text that is equal for two batches if one graph computes both, or "".

    It is "" for a batch that has an object other than tensors and plain values.
    """
    if isinstance(batch, Tensor):
        if batch.layout != torch.strided:
            return ""
        return f"{batch.dtype} {tuple(batch.shape)} {batch.stride()}"
    if isinstance(batch, Mapping):
        names, values = list(map(repr, batch)), list(batch.values())
    elif isinstance(batch, list | tuple):
        names, values = [""] * len(batch), list(batch)
    else:
        return repr(batch) if type(batch) in PLAIN else ""
    parts = [_layout(value) for value in values]
    return f"{type(batch).__name__} {list(zip(names, parts, strict=True))}" if all(parts) else ""
