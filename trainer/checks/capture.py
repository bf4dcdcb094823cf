"""Whether the steps of a training are captured as CUDA graphs: only if the rehearsal proves it.

The reasons are in docs/decisions/0035-the-captured-step.md.
"""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from trainbox.plain_state import plain_state
from trainbox.tensor_trees import tensors_in
from trainer.checks.fingerprint import Part
from trainer.checks.hidden_state import differing, hidden_state, named, on_any_rank
from trainer.checks.op_trace import OpTrace
from trainer.checks.same_bits import copies_fit, kept, same
from trainer.loop import graphs
from trainer.loop.captured import CapturedStep
from trainer.loop.digests import state_tensors
from trainer.loop.state import Job
from trainer.loop.step import EagerStep
from trainer.records.digest import value_digest

COMPARED_STEPS = 2  # a single replay does not show whether a step replaces a buffer
LATE_STEPS = 1  # a step with the learning rate and the settings of the training's end
FEWEST_STEPS = 200  # a shorter training does not win back the time of the capture
# The largest gradients of a captured step with several shards. An eager step exchanges larger
# gradients during the backward, and the graph of each shard would keep its own copy of them.
_MOST_EXCHANGED_BYTES = 2**25
_STRATEGIES = ("single", "ddp")


def reason_for_eager_steps(job: Job) -> str:
    """Return why the steps of `job` cannot be captured, whatever they compute, or ""."""
    config, world, state = job.config, job.world, job.state
    left = job.schedule.total_steps - state.progress.step
    exchanged = sum(p.nbytes for p in state.model.parameters() if p.requires_grad)
    groups = state.optimizer.param_groups
    reasons = {
        "--capture off": config.capture == "off",
        f"the device is {world.device.type}": not graphs.can_record(world.device),
        f"--strategy {job.strategy.name}": job.strategy.name not in _STRATEGIES,
        "--fast does not compare bits": not config.deterministic,
        "--compile": config.compile,
        "--skip-nonfinite": bool(config.skip_nonfinite),
        f"only {left} steps are left": left < FEWEST_STEPS,
        "several shards have large gradients": (
            config.shards > 1 and exchanged > _MOST_EXCHANGED_BYTES
        ),
        f"{type(state.optimizer).__name__} is neither fused nor capturable": not all(
            group.get("fused") or group.get("capturable") for group in groups
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


class TracedStep(EagerStep):
    """An eager step that can note its operations.

    With a `trace`, it also notes as `problem` if a random number does not come from the device's
    generator, because a CUDA graph would repeat this number.
    """

    trace: OpTrace | None = None
    problem = ""

    @property
    def overlaps(self) -> bool:
        """Whether the last backward sends gradients: not in a trace, as in a captured step."""
        return self.trace is None

    def compute(self, number: int, batch: Any, checks: bool) -> dict[str, Tensor]:
        if self.trace is None:
            return super().compute(number, batch, checks)
        before = self._generators()
        self.trace.give(tensors_in(batch), "input")
        self._give_gradients(self.trace)
        with self.trace:
            losses_B = super().compute(number, batch, checks)
        self._compare_generators(before)
        return losses_B

    def update(self, needs_norm: bool) -> tuple[Tensor | None, bool]:
        if self.trace is None:
            return super().update(needs_norm)
        before = self._generators()
        self._give_gradients(self.trace)
        with self.trace:
            updated = super().update(needs_norm=True)
        self._compare_generators(before)
        return updated

    def _give_gradients(self, trace: OpTrace) -> None:
        trace.give([parameter.grad for parameter in self.parameters], "gradient")

    def _generators(self) -> dict[str, Any]:
        """Return the states of the generators that a replay of a graph does not advance."""
        of_numpy = repr(numpy.random.get_state(legacy=False))
        found: dict[str, Any] = {"Python": random.getstate(), "NumPy": of_numpy}
        if self._job.world.device.type != "cpu":
            found["torch on the CPU"] = torch.default_generator.get_state().tolist()
        return found

    def _compare_generators(self, before: dict[str, Any]) -> None:
        for name, state in self._generators().items():
            if state != before[name] and not self.problem:
                self.problem = f"a step draws a random number from the generator of {name}"


@dataclass
class CaptureRehearsal:
    """What two eager steps of one job show, and what two captured steps of another job compute.

    Attributes:
        reason: Why the steps of the training are eager, or "" if they are captured. It is the same
            on all ranks.
    """

    reason: str
    _eager: list[dict[str, Any]] | None = None
    _copies: bool = False

    def watch(
        self,
        job: Job,
        step: TracedStep,
        train: Callable[[], None],
        validated: Mapping[str, Part],
    ) -> None:
        """Compare eager steps of `job`, which `train` trains.

        `validated` is the hidden state after the first validation. An attribute that has changed
        since then may act in a later step. The last step has the learning rate and the settings of
        the training's end.
        """
        traces, eager = list[OpTrace](), list[dict[str, Any]]()
        self._copies = copies_fit(job)
        objects, groups = _objects(job), _groups(job)
        moved = set[str]()
        for number in range(COMPARED_STEPS + LATE_STEPS):
            is_late = number >= COMPARED_STEPS
            if is_late:
                job.state.progress.step = job.schedule.total_steps - 1
            step.trace = OpTrace(job.world.device, _state(job))
            train()
            traces.append(step.trace)
            now = _objects(job)
            moved |= {name for name in now if objects.get(name) != now[name]}
            if not is_late:
                eager.append(self._values(job))
        step.trace = None
        changed = differing(validated, hidden_state(job))
        # A user knows attributes and generators better than operations, so these are named first.
        found = [
            step.problem,
            f"{named(changed)} changes during the training" if changed else "",
            "the optimizer changes its parameter groups" if groups != _groups(job) else "",
            f"{named(moved)} is another tensor after a step" if moved else "",
            *(one.difference(other) for one, other in itertools.pairwise(traces)),
        ]
        self._agree(job, next(filter(None, found), ""))
        self._eager = eager

    def replay(
        self, job: Job, step: CapturedStep, train: Callable[[], None], problems: list[str]
    ) -> None:
        """Compare two captured steps of `job`, which `train` trains, with the eager ones."""
        assert self._eager is not None
        found = ""
        for number, eager in enumerate(self._eager):
            train()
            captured = self._values(job)
            other = next((n for n in eager if not same(captured.get(n), eager[n])), None)
            if other and not found:
                found = f"{other} has other bits in replay {number + 1}"
        if step.others and not found:
            found = "the batches have values that differ and are not tensors, such as names"
        self._agree(job, next(iter(problems), found))

    def _values(self, job: Job) -> dict[str, Any]:
        """Return the values after a step: the weights, the state of the optimizer, the losses."""
        means = job.state.running.means(job.schedule.batch_size)
        found: dict[str, Any] = {"the mean of a loss": repr(means)}
        for part in state_tensors(job):
            found |= kept(job, part, self._copies)
        return found

    def _agree(self, job: Job, own: str) -> None:
        reason = on_any_rank(job.world, own or None)
        self.reason = f"task {type(job.task).__name__}: {reason}" if reason else ""


def _state(job: Job) -> list[Tensor]:
    """Return the tensors that a checkpoint has."""
    of_model = list(job.state.model.state_dict(keep_vars=True).values())
    of_optimizer = [v for own in job.state.optimizer.state.values() for v in own.values()]
    return [value for value in (*of_model, *of_optimizer) if isinstance(value, Tensor)]


def _objects(job: Job) -> dict[str, int]:
    """Return the parameters, buffers and tensors of the optimizer by name, as addresses."""
    model, optimizer = job.state.model, job.state.optimizer
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for number, own in enumerate(optimizer.state.values()):
        found |= {f"state {number} {n}": v for n, v in own.items() if isinstance(v, Tensor)}
    return {name: tensor.data_ptr() for name, tensor in found.items()}


def _groups(job: Job) -> str:
    """Return a digest of the settings of each parameter group besides its learning rate."""
    groups = job.state.optimizer.state_dict()["param_groups"]
    others = [{n: value for n, value in group.items() if n != "lr"} for group in groups]
    return value_digest(plain_state(others, "the groups"))
