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
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from trainbox.contract.errors import Preempted, StorageFailure, WrongUse
from trainer.checks.fingerprint import ENVIRONMENT, Part
from trainer.checks.hidden_state import FAST, described, differing, hidden_state, on_any_rank
from trainer.checks.validation_sample import validate_sample
from trainer.data.batches import training_batches
from trainer.loop.digests import common_digests
from trainer.loop.losses import check_running
from trainer.loop.state import Job
from trainer.loop.step import EagerStep
from trainer.loop.task_checks import collate_of
from trainer.parallel.strategy import Strategy
from trainer.run.checkpoint import RunCheckpoints
from trainer.run.digest import saved_digests, tensor_digest, value_digest
from trainer.run.run_log import RunLog
from trainer.system.signals import StopRequest

_FOLDER = "rehearsal"  # in the run's folder
_SAVED_STEP, _STEPS = 1, 2
# The parts of a rehearsal on its progress bar: step 1, a validation, a checkpoint, step 2, and in
# the other job a load and step 2.
_PARTS, _PARTS_IF_FAST = 6, 3


@dataclass(frozen=True)
class _Outcome:
    """What a job of `task` computed in step 2, as digests by name, and its hidden state.

    The state is that of the new job, that after the checkpoint was saved, and that at the end. The
    second job saves none, so its `between` is `before`. If it `validates`, the digests have the
    statistics of a sample.
    """

    task: str
    digests: dict[str, str]
    before: dict[str, Part]
    between: dict[str, Part]
    after: dict[str, Part]
    validates: bool


def rehearse(
    build: Callable[[RunCheckpoints], Job], run: RunLog, strategy: Strategy, stop: StopRequest
) -> dict[str, Any]:
    """Rehearse the resume of a new run, and return the entry of its manifest.

    `build` returns a new job with the given checkpoints. The rehearsal uses up two jobs, or three
    if it fails. In the entry, `result` is a line for the header, and `changing` has the names of
    the hidden state that may change, because each step sets it again. All ranks must call this.

    Raises:
        WrongUse: A resume would not have the same bits.
        OutOfMemory: A step does not fit in memory.
        StorageFailure: The checkpoint cannot be written or read.
        Preempted: A stop was requested.
    """
    begin_s, world, folder = time.monotonic(), strategy.world, run.path / _FOLDER
    checkpoints = RunCheckpoints(
        folder / "checkpoints", 1, run.writes, run.report, strategy.gathers_states, "rehearsal"
    )

    def new_job() -> Job:
        if any(world.from_each(bool(stop))):
            world.leave()
            raise Preempted(f"stopped by {stop.cause} before step 1: start the same command again")
        return build(checkpoints)

    def entry(what: str, **found: Any) -> dict[str, Any]:
        return {"result": f"{what} in {time.monotonic() - begin_s:.1f} s", **found}

    try:
        if (first := _started(new_job())) is None:
            return entry("1 step, a validation and a checkpoint")
        resumed = _resumed(new_job(), first)
        changing = differing(first.before, first.after) | differing(resumed.before, resumed.after)
        problem = on_any_rank(world, _state_problem(first, resumed, changing))
        difference = on_any_rank(world, _first_difference(first.digests, resumed.digests))
        if problem is None and difference is not None:
            again = _resumed(new_job(), first)
            repeated = on_any_rank(world, _first_difference(resumed.digests, again.digests))
            problem = _digest_problem(difference, repeated, changing)
        if problem is not None:
            raise WrongUse(f"{first.task}: {problem}")
        names = world.from_each(sorted(changing))
        everywhere = sorted(set(itertools.chain(*names)))
        return entry("2 steps, a resume and the same bits", changing=everywhere)
    finally:
        checkpoints.finish()
        run.console.end_bar()
        remove_rehearsal(run)


def remove_rehearsal(run: RunLog) -> None:
    """Remove the checkpoint of the rehearsal, also that of a process that was killed."""
    if run.writes:
        shutil.rmtree(run.path / _FOLDER, ignore_errors=True)


def _started(job: Job) -> _Outcome | None:
    """Train step 1, validate a sample and save, then train step 2 unless the run has `--fast`."""
    console, deterministic = job.run.console, job.config.deterministic
    console.start_rehearsal_bar(_PARTS if deterministic else _PARTS_IF_FAST)
    before, steps = hidden_state(job) if deterministic else {}, _steps(job)
    with job.strategy.lost_writes(job.loss_module) as lost:
        next(steps)
    console.count_step()
    if lost:
        raise WrongUse(
            f"{_of(job)}: a forward changes the parameter {lost[0].removeprefix('model.')}, which "
            "is not trained, and --strategy fsdp would lose the change: make it a buffer, or use "
            "--strategy ddp"
        )
    check_running(job, job.state.running.gather())  # before the weights are saved
    sample = validate_sample(job, is_first=True)
    console.count_step()
    state = job.state.capture(job.strategy)
    with job.world.wait_for_all("the checkpoint of the rehearsal"):
        job.checkpoints.save(_SAVED_STEP, state, {}, job.state.progress.best_step, saved_digests)
        job.checkpoints.wait()
    console.count_step()
    if not deterministic:
        return None
    return _outcome(job, before, hidden_state(job), steps, validates=sample is not None)


def _resumed(job: Job, first: _Outcome) -> _Outcome:
    """Load the checkpoint of step 1, then train step 2 and validate as in the `first` outcome."""
    before, files = hidden_state(job), job.checkpoints.files
    with job.world.wait_for_all("the load of the checkpoint"):
        if problem := files.problem(_SAVED_STEP):
            raise StorageFailure(f"the checkpoint of the rehearsal is damaged: {problem}")
        saved = files.load(_SAVED_STEP)
        if changed := job.state.other_shape(saved):
            raise WrongUse(
                f"{_of(job)}: a resume could not load a checkpoint ({changed}): create all "
                "parameters and buffers in build_model()"
            )
        job.state.restore(saved, job.strategy, files.folder)
    job.run.console.count_step()
    return _outcome(job, before, before, _steps(job), first.validates)


def _outcome(
    job: Job,
    before: dict[str, Part],
    between: dict[str, Part],
    steps: Iterator[None],
    validates: bool,
) -> _Outcome:
    """Train step 2, if the run has one, and validate the sample again."""
    digests: dict[str, str] = {}
    with _noted(job, digests):
        next(steps, None)
    for part in common_digests(job):
        digests |= part
    groups = job.state.optimizer.state_dict()["param_groups"]
    digests |= {"the optimizer's settings": value_digest(groups)}
    if validates:
        digests |= validate_sample(job) or {}
    job.run.console.count_step()
    return _Outcome(_of(job), digests, before, between, hidden_state(job), validates)


def _state_problem(first: _Outcome, resumed: _Outcome, changing: Set[str]) -> str | None:
    """Return what a resume would do to a part of the hidden state that is `changing`, or None."""
    for name in sorted(differing(first.after, resumed.after) & changing):
        return f"a resume would change {described(name, first.after, resumed.after)}"
    # A part that had one value before step 2 in both jobs was not set again by step 2. It may be
    # left from the first job, such as a variable of a module.
    set_again = differing(first.between, resumed.between) | {ENVIRONMENT}
    for name in sorted(changing - set_again):
        return f"a resume could change {described(name, first.after, first.before)}"
    return None


def _digest_problem(difference: str, repeated: str | None, changing: Set[str]) -> str:
    """Return why the digest `difference` differs after a resume.

    `repeated` is the digest that differs when the same step is computed again, or None. A step
    changes the parts `changing` of the hidden state.
    """
    if repeated is not None:
        return (
            f"{repeated} differs when the same step is computed again: draw random numbers only "
            "from the global generators of torch, NumPy and Python and keep no state between "
            f"calls, or {FAST}"
        )
    state = ", ".join(sorted(changing)) or "in a file"
    return (
        f"{difference} differs after a resume, so a step uses state that checkpoints leave out "
        f"({state}): make it a buffer, or {FAST}"
    )


def _of(job: Job) -> str:
    return f"task {type(job.task).__name__}"


def _steps(job: Job) -> Iterator[None]:
    """Train the next steps of the rehearsal, one at each `next`."""
    end = min(_STEPS, job.schedule.total_steps)
    schedule = dataclasses.replace(job.schedule, total_steps=end)
    first, collate = job.state.progress.step, collate_of(job.task)
    workers = min(job.workers, _STEPS)  # more would start, and have nothing to read
    train_one_step = EagerStep(
        job, training_batches(job.train, schedule, first, job.world.device, workers, collate)
    )
    for _ in range(first, end):
        train_one_step(needs_norm=True)
        yield


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

    with (
        job.loss_module.register_forward_hook(losses),
        job.state.optimizer.register_step_pre_hook(gradients),
    ):
        yield


def _first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)
