"""The steps that a job of the rehearsal trains, and what it computes after the checkpoint."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from trainbox.plain_state import plain_state
from trainbox.tensor_trees import copied
from trainer.checks.fingerprint import Part
from trainer.checks.hidden_state import hidden_state, state_of_dataset
from trainer.checks.same_bits import bits, kept
from trainer.checks.validation_sample import validate_sample
from trainer.data.batches import training_batches
from trainer.data.examples import Answer, Question
from trainer.loop.digests import state_tensors
from trainer.loop.state import Job
from trainer.loop.step import EagerStep
from trainer.loop.task_checks import collate_of
from trainer.records.digest import value_digest

_MOST_BEFORE = 2

State = Mapping[str, Part]


def steps_before(total_steps: int) -> int:
    """Return the number of steps before the first job saves: 2, or 1 in a shorter training.

    One step is not enough: some state is then still as at the start, such as an average that is
    updated before the weights change.
    """
    return max(1, min(_MOST_BEFORE, total_steps - 1))


@dataclass(frozen=True)
class Outcome:
    """What a job computed in the step after the save and in a sample of the validation.

    Attributes:
        values: What it computed, by name: copies or digests of tensors, and texts.
        copies: Whether the values have copies of tensors.
        start: The hidden state of the job at its start.
        after_step: The hidden state after the step, before the validation.
        end: The hidden state at its end.
        seconds: The time of the step.
    """

    values: dict[str, Any]
    copies: bool
    start: State
    after_step: State
    end: State
    seconds: float


class Steps:
    """The next steps of the rehearsal.

    Attributes:
        batches: A copy of the first micro-batch.
        step: Trains the steps.
    """

    def __init__(
        self,
        job: Job,
        kind: Callable[[Job, Iterator[Any]], EagerStep] = EagerStep,
        compared_steps: int = 0,
    ) -> None:
        """Train `job` up to the first step after the save, and then `compared_steps` more."""
        self._first, self._micros = job.state.progress.step, len(job.schedule.micros)
        total = job.schedule.total_steps
        self._left = min(steps_before(total) + 1 + compared_steps, total) - self._first
        self.batches, self._of_dataset = list[Any](), list[State]()
        schedule = dataclasses.replace(job.schedule, total_steps=self._first + self._left)
        # One worker reads all steps, so that a state of the dataset, such as a generator, is kept.
        workers, question = min(job.workers, 1), None
        if job.workers and job.config.deterministic:
            question = Question(state_of_dataset)
        self._read = self._examples(
            training_batches(
                job.train,
                schedule,
                self._first,
                job.world.device,
                workers,
                collate_of(job.task),
                question,
            )
        )
        self._ahead = deque[Any]()
        self.step = kind(job, self._micro_batches())

    def train(self) -> None:
        """Train the next step, if there is one."""
        if self._left > 0:
            self.step(needs_norm=True)
            self._left -= 1

    def state_of_dataset(self, step: int) -> State:
        """Return the state of the training set in its worker after it has read `step`.

        The state is empty without workers.
        """
        self._ahead.extend(self._read)  # an answer follows its batch
        number = (step - self._first) * self._micros - 1
        return self._of_dataset[number] if 0 <= number < len(self._of_dataset) else {}

    def _micro_batches(self) -> Iterator[Any]:
        while True:
            if self._ahead:
                yield self._ahead.popleft()
            elif (batch := next(self._read, None)) is not None:
                yield batch
            else:
                return

    def _examples(self, read: Iterator[Any]) -> Iterator[Any]:
        for batch in read:
            if isinstance(batch, Answer):
                self._of_dataset.append(batch.content)
                continue
            if not self.batches:
                self.batches.append(copied(batch))
            yield batch


@contextlib.contextmanager
def _noted(job: Job, values: dict[str, Any], copies: bool) -> Iterator[None]:
    """Add the losses and gradients of a step to `values`."""

    def losses(_module: Any, _inputs: Any, losses_B: Mapping[str, Any]) -> None:
        micro = f" of micro-batch {len(values) // len(losses_B) + 1}" if values else ""
        values.update({f"the loss {n}{micro}": bits(v) for n, v in losses_B.items()})

    def gradients(*_: Any) -> None:
        named = job.state.model.named_parameters()
        found = {f"the gradient of {n}": p.grad for n, p in named if p.grad is not None}
        values.update(kept(job, found, copies))

    with (
        job.loss_module.register_forward_hook(losses),
        job.state.optimizer.register_step_pre_hook(gradients),
    ):
        yield


def outcome(
    job: Job,
    start: State,
    steps: Steps,
    validates: bool,
    copies: bool,
    measured: Callable[[str], AbstractContextManager[None]],
) -> Outcome:
    """Train the next step, if the run has one, and validate the sample again; return the results.

    Args:
        job: the job.
        start: the hidden state of the job at its start.
        steps: the steps of the job.
        validates: whether to validate the sample.
        copies: whether to keep copies of tensors, or else their digests.
        measured: a context that adds the time of its body to a part of the rehearsal.
    """
    values: dict[str, Any] = {}
    begin_s = time.monotonic()
    with measured("steps"), _noted(job, values, copies):
        steps.train()
    seconds = time.monotonic() - begin_s
    with measured("compare"):
        after_step = hidden_state(job)
        read = steps.state_of_dataset(job.state.progress.step)
        for part in state_tensors(job):
            values |= kept(job, part, copies)
        groups = plain_state(job.state.optimizer.state_dict()["param_groups"], "the groups")
        values |= {"a setting of the optimizer": value_digest(groups)}
    with measured("validation"):
        sample = validate_sample(job) if validates else None
        values |= sample.digests if sample else {}
    job.run.console.count_step()
    with measured("compare"):
        end = {**hidden_state(job), **read}
    return Outcome(values, copies, start, {**after_step, **read}, end, seconds)
