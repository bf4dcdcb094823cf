"""The rehearsal: before it trains, a run shows that its own resume gives the same bits.

One job trains a step, validates a sample, saves a checkpoint and trains another step. A second job,
with nothing in common, loads the checkpoint and trains the other step. Both must have the same bits
and the same Python state. The reasons are in docs/decisions/0007-the-rehearsal.md.
"""

import contextlib
import dataclasses
import itertools
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainbox.contract.errors import OutOfMemory, StorageFailure, WrongUse
from trainer.checks.fingerprint import ENVIRONMENT, Part, local
from trainer.checks.hidden_state import FAST, described, differing, hidden_state, on_any_rank
from trainer.checks.validation_sample import validate_sample
from trainer.data.batches import training_batches
from trainer.loop.digests import optimizer_tensors
from trainer.loop.state import Job
from trainer.loop.step import EagerStep
from trainer.loop.task_checks import collate_of
from trainer.run.checkpoint import RunCheckpoints
from trainer.run.digest import saved_digests, tensor_digest, tensor_digests, value_digest
from trainer.run.run_log import RunLog

_SAVED_STEP, _STEPS = 1, 2
# The parts of a rehearsal on its progress bar: step 1, a validation, a checkpoint, step 2, and in
# the other job a load and step 2.
_PARTS, _PARTS_IF_FAST = 6, 3


@dataclass(frozen=True)
class _Outcome:
    """What a job computed in step 2, as digests by name, and its hidden state.

    The state is that of the new job, that after the checkpoint was saved, and that at the end. The
    second job saves none, so its `between` is `before`.
    """

    digests: dict[str, str]
    before: dict[str, Part]
    between: dict[str, Part]
    after: dict[str, Part]


class Rehearsal:
    """The rehearsal of one start, which uses up two new jobs, or three if it fails.

    Attributes:
        entry: The entry of the manifest. Its `result` is a line for the header. `changing` has the
            names of the hidden state that may change, because each step sets it again.
    """

    def __init__(self, run: RunLog) -> None:
        self.is_complete, self.entry = False, dict[str, Any](result="skipped")
        self._run, self._folder, self._begin_s = run, run.path / "rehearsal", time.monotonic()
        self._outcomes: list[_Outcome] = []
        self._validates = True
        self.close()

    def close(self) -> None:
        """Remove the bar and the checkpoint of this rehearsal, or of a process that was killed."""
        self._run.console.end_bar()
        if self._run.writes:
            shutil.rmtree(self._folder, ignore_errors=True)

    def use(self, job: Job) -> None:
        """Do the next part of the rehearsal with `job`, which is new and of no use afterwards.

        All ranks must call this.

        Raises:
            WrongUse: A resume would not have the same bits.
            OutOfMemory: A step does not fit in memory. The rehearsal then starts again.
            StorageFailure: The checkpoint cannot be written or read.
        """
        run, of_the_run, folder = self._run, job.checkpoints, self._folder / "checkpoints"
        if run.writes:
            folder.mkdir(parents=True, exist_ok=True)
        job.checkpoints = RunCheckpoints(
            folder, 1, run.writes, run.report, job.strategy.gathers_states, run_id="rehearsal"
        )
        job.state.model.train()
        try:
            outcome = self._resumed(job) if self._outcomes else self._started(job)
        except OutOfMemory:
            self._outcomes.clear()
            raise
        finally:
            job.checkpoints.finish()
            job.checkpoints = of_the_run
        self._outcomes.append(outcome)
        if not job.config.deterministic:
            self._pass("1 step, a validation and a checkpoint")
        elif len(self._outcomes) == 2:
            self._compare(job, *self._outcomes)
        elif len(self._outcomes) == 3:
            self._explain(job, *self._outcomes)

    def _started(self, job: Job) -> _Outcome:
        """Train step 1, validate a sample and save, then train step 2."""
        console = self._run.console
        console.start_rehearsal_bar(_PARTS if job.config.deterministic else _PARTS_IF_FAST)
        before, steps = hidden_state(job), _steps(job)
        with job.strategy.lost_writes(job.loss_module) as lost, _weights_watched(job):
            next(steps)
        console.count_step()
        if lost:
            raise WrongUse(
                f"{_of(job)}: a forward changes the parameter {lost[0].removeprefix('model.')}, "
                "which is not trained, and --strategy fsdp would lose the change: make it a "
                "buffer, or use --strategy ddp"
            )
        self._validates = validate_sample(job) is not None
        console.count_step()
        state = job.state.capture(job.strategy)
        with job.world.wait_for_all("the checkpoint of the rehearsal"):
            job.checkpoints.save(
                _SAVED_STEP, state, {}, job.state.progress.best_step, saved_digests
            )
            job.checkpoints.wait()
        console.count_step()
        return self._outcome(job, before, hidden_state(job), steps)

    def _resumed(self, job: Job) -> _Outcome:
        """Load the checkpoint of step 1, then train step 2."""
        before = hidden_state(job)
        with job.world.wait_for_all("the load of the checkpoint"):
            if problem := job.checkpoints.files.problem(_SAVED_STEP):
                raise StorageFailure(f"the checkpoint of the rehearsal is damaged: {problem}")
            saved = job.checkpoints.files.load(_SAVED_STEP)
            if changed := job.state.other_shape(saved):
                raise WrongUse(
                    f"{_of(job)}: a resume could not load a checkpoint ({changed}): create all "
                    "parameters and buffers in build_model()"
                )
            job.state.restore(saved, job.strategy, self._folder)
        self._run.console.count_step()
        return self._outcome(job, before, before, _steps(job))

    def _outcome(
        self, job: Job, before: dict[str, Part], between: dict[str, Part], steps: Iterator[None]
    ) -> _Outcome:
        """Train step 2, if the run has one, and validate the sample again."""
        if not job.config.deterministic:
            return _Outcome({}, before, between, between)
        digests: dict[str, str] = {}
        with _noted(job, digests):
            next(steps, None)
        digests |= job.digests({**job.state.model.state_dict(), **optimizer_tensors(job)})
        groups = job.state.optimizer.state_dict()["param_groups"]
        digests |= {"the optimizer's settings": value_digest(groups)}
        if self._validates:
            digests |= validate_sample(job) or {}
        self._run.console.count_step()
        return _Outcome(digests, before, between, hidden_state(job))

    def _compare(self, job: Job, first: _Outcome, resumed: _Outcome) -> None:
        """Pass or raise WrongUse, or leave it to another job to explain what differs."""
        changing = differing(first.before, first.after) | differing(resumed.before, resumed.after)
        later = sorted(differing(first.after, resumed.after) & changing)
        texts = [described(name, first.after, resumed.after) for name in later]
        if text := on_any_rank(job.world, *texts[:1]):
            raise WrongUse(f"{_of(job)}: a resume would change {text}")
        # A part that had one value before step 2 in both jobs was not set again by step 2. It may
        # be left from the first job, such as a variable of a module.
        set_again = differing(first.between, resumed.between) | {ENVIRONMENT}
        texts = [described(n, first.after, first.before) for n in sorted(changing - set_again)]
        if text := on_any_rank(job.world, *texts[:1]):
            raise WrongUse(f"{_of(job)}: a resume could change {text}")
        if on_any_rank(job.world, _first_difference(first.digests, resumed.digests)) is None:
            self._pass("2 steps, a resume and the same bits")
            names = job.world.from_each(sorted(changing))
            self.entry["changing"] = sorted(set(itertools.chain(*names)))

    def _explain(
        self, job: Job, first: _Outcome, resumed: _Outcome, resumed_again: _Outcome
    ) -> None:
        """Raise WrongUse with the first digest that differs, and the reason."""
        again = _first_difference(resumed.digests, resumed_again.digests)
        if name := on_any_rank(job.world, again):
            raise WrongUse(
                f"{_of(job)}: {name} differs when the same step is computed again: draw random "
                "numbers only from the global generators of torch, NumPy and Python and keep no "
                f"state between calls, or {FAST}"
            )
        name = on_any_rank(job.world, _first_difference(first.digests, resumed.digests))
        raise WrongUse(
            f"{_of(job)}: {name} differs after a resume, so some state is neither in a checkpoint "
            f"nor in an attribute, such as in a file: make it a buffer, or {FAST}"
        )

    def _pass(self, what: str) -> None:
        self.is_complete, self._outcomes = True, []
        self.entry["result"] = f"{what} in {time.monotonic() - self._begin_s:.1f} s"
        self.close()


def _of(job: Job) -> str:
    return f"task {type(job.task).__name__}"


def _steps(job: Job) -> Iterator[None]:
    """Train the next steps of the rehearsal, one at each `next`."""
    end = min(_STEPS, job.schedule.total_steps)
    schedule = dataclasses.replace(job.schedule, total_steps=end)
    first, collate = job.state.progress.step, collate_of(job.task)
    train_one_step = EagerStep(
        job,
        training_batches(job.train, schedule, first, job.world.device, job.workers, collate),
    )
    for _ in range(first, end):
        train_one_step(needs_norm=True)
        yield


@contextlib.contextmanager
def _weights_watched(job: Job) -> Iterator[None]:
    """Raise WrongUse if a trained parameter changes before the optimizer's step."""

    def digests() -> dict[str, str]:
        named = job.state.model.named_parameters()
        return tensor_digests({name: local(p) for name, p in named if p.requires_grad})

    before = digests()

    def check(*_: Any) -> None:
        if job.config.deterministic and (name := _first_difference(before, digests())):
            raise WrongUse(
                f"{_of(job)}: a forward sets the trained parameter {name} from the first examples "
                f"that it gets: set it in build_model(), or {FAST}"
            )

    handle = job.state.optimizer.register_step_pre_hook(check)
    yield
    handle.remove()


@contextlib.contextmanager
def _noted(job: Job, digests: dict[str, str]) -> Iterator[None]:
    """Add the digests of the losses and gradients of a step to `digests`."""

    def losses(_module: Any, _inputs: Any, losses_B: Mapping[str, Any]) -> None:
        micro = f" of micro-batch {len(digests) // len(losses_B) + 1}" if digests else ""
        digests.update({f"the loss {n}{micro}": tensor_digest(v) for n, v in losses_B.items()})

    def gradients(*_: Any) -> None:
        named = job.state.model.named_parameters()
        digests.update(
            job.digests({f"the gradient of {n}": p.grad for n, p in named if p.grad is not None})
        )

    handles = [
        job.loss_module.register_forward_hook(losses),
        job.state.optimizer.register_step_pre_hook(gradients),
    ]
    yield
    for handle in handles:
        handle.remove()


def _first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)
