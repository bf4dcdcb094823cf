"""The rehearsal: before it trains, a run shows that its own resume gives the same bits.

One job trains step 1, validates a sample, trains step 2, saves a checkpoint and trains step 3. A
second job is built from nothing, loads the checkpoint and trains step 3. The two steps 3 must have
the same bits. If attributes of the task count steps, as in `self.calls += 1`, more jobs train step
3 with the values that these counts have later in the training. The reasons are in
docs/decisions/0007-the-rehearsal.md.
"""

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch

from trainbox.errors import Failure, Stopped, WrongUse, text_of
from trainbox.folders.record_folder import CHECKPOINTS, REHEARSAL
from trainer.checks.aging import Count, Numbers, States, ages, counts, values_of
from trainer.checks.batch_parts import batch_dependence
from trainer.checks.capture import (
    COMPARED_STEPS,
    LATE_STEPS,
    CaptureRehearsal,
    TracedStep,
    reason_for_eager_steps,
)
from trainer.checks.fingerprint import Part, set_numbers
from trainer.checks.first_forward import first_forward, without_gradient, zero_losses
from trainer.checks.hidden_state import (
    FAST,
    differing,
    hidden_state,
    named,
    of_all_ranks,
    on_any_rank,
    owners_of,
)
from trainer.checks.pure_schedule import check_schedule
from trainer.checks.rehearsed_steps import Outcome, Steps, outcome, steps_before
from trainer.checks.same_bits import copies_fit, same
from trainer.checks.validation_sample import impure_methods, validate_sample
from trainer.loop.captured import CapturedStep
from trainer.loop.digests import common_digests
from trainer.loop.out_of_memory import memory_used_up
from trainer.loop.state import Job
from trainer.parallel.exchange_failures import exchange_failure
from trainer.parallel.gpu_failures import gpu_failure
from trainer.parallel.strategy import Strategy
from trainer.records.checkpoint import RunCheckpoints
from trainer.records.run_log import RunLog
from trainer.system.signals import StopRequest

# The parts of a rehearsal on its progress bar: step 1, a validation, step 2 with a checkpoint, and
# the next step; in the other job a load and the next step.
_PARTS, _PARTS_IF_FAST = 6, 3
# If the counts have later values, step 3 is too slow above 10 times its usual seconds, or above its
# usual seconds and 3 more, whichever is longer.
_SLOWER, _SLOWER_S = 10, 3.0
# If later values change the step, up to this many counts are tried one at a time, so that the error
# can name the count that does it.
_MOST_ALONE = 8
_CURE = "make it a buffer (a list of layers: an nn.ModuleList), or save it with get_extra_state()"
_CURE_OF_TASK = (
    "keep it in a buffer of the model, or return a factor that depends on the step from schedule()"
)
_CURE_OF_DATA = (
    "let an example depend only on its index and on the global generators of torch, NumPy and "
    "Python, which are seeded for each example"
)


@dataclass(frozen=True)
class _First:
    """What the first job has shown.

    Attributes:
        task: How messages name the task.
        outcome: The values and the bits of its last step.
        states: Its hidden state at six times.
        validates: Whether the values of `outcome` contain the statistics of a validation sample.
        saved: The step of its checkpoint.
        steps: The number of steps of the whole training.
        validations: The number of validations of the whole training.
        share: The batches of a whole validation, divided by the batches of the sample.
    """

    task: str
    outcome: Outcome
    states: States
    validates: bool
    saved: int
    steps: int
    validations: int
    share: float


class _Rehearsal:
    """The jobs of one rehearsal, of which only one lives at a time."""

    def __init__(self, new_job: Callable[[], Job], strategy: Strategy) -> None:
        self._new_job, self._world = new_job, strategy.world
        self.steps, self.notes, self.seconds = 0, list[str](), dict[str, float]()
        self.capture = CaptureRehearsal("")

    @contextlib.contextmanager
    def _measured(self, part: str) -> Iterator[None]:
        """Add the time of the body to the seconds of `part`, with the work on the device."""
        device, begin_s = self._world.device, time.monotonic()
        yield
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - begin_s

    def _state(self, job: Job) -> dict[str, Part]:
        """Return the hidden state of a job, or nothing if the run is fast."""
        with self._measured("compare"):
            return hidden_state(job) if job.config.deterministic else {}

    def _job(self) -> Job:
        with self._measured("build"):
            return self._new_job()

    def run(self) -> list[str]:
        """Compare a resumed job with the first one, and return the attributes that steps change.

        Raises:
            WrongUse: A resume would not have the same bits.
        """
        world = self._world
        first = self._started(self._job())
        if first is None:
            return []
        one, other = first.outcome, self._resumed(first, replays=not self.capture.reason)
        # An attribute that differs after the same step depends on more than the checkpoint.
        hidden = differing(one.end, other.end)
        hidden |= {n for n in differing(one.after_step, other.after_step) if _counts(n, one, other)}
        if difference := self._difference(one, other):
            repeated = self._difference(other, self._resumed(first))
            names = of_all_ranks(world, differing(first.states.before, other.start))
            problem = _digest_problem(difference, repeated, names, first.task)
            raise WrongUse(f"{first.task}: {problem}")
        trials = self._refuse_later_bits(first, other, hidden)
        if names := of_all_ranks(world, hidden):
            also = f", and with {trials} later values of its counts" if trials else ""
            self.notes.append(
                f"{named(names)} changed in a step, and checkpoints leave this out; step "
                f"{first.saved + 1} had the same bits without it{also}"
            )
        changing = differing(one.start, one.end) | differing(other.start, other.end)
        return of_all_ranks(world, changing)

    def _difference(self, one: Outcome, other: Outcome) -> str | None:
        """Return the first value that differs on any rank, or None; all ranks must call this."""
        names = {**one.values, **other.values}
        own = (n for n in names if not same(one.values.get(n), other.values.get(n)))
        return on_any_rank(self._world, next(own, None))

    def _started(self, job: Job) -> _First | None:
        """Train, validate a sample and save, then train one more step unless the run is fast."""
        console, deterministic = job.run.console, job.config.deterministic
        console.start_rehearsal_bar(_PARTS if deterministic else _PARTS_IF_FAST)
        with job.world.wait_for_all("the check of schedule()"):
            self.notes += check_schedule(job)
        total, before = job.schedule.total_steps, steps_before(job.schedule.total_steps)
        self.steps = min(before + deterministic, total)
        start, self.capture.reason = self._state(job), reason_for_eager_steps(job)
        with (
            self._measured("steps"),
            first_forward(job, self.notes),
            job.strategy.lost_writes(job.loss_module) as lost,
        ):
            steps = Steps(
                job, TracedStep, 0 if self.capture.reason else COMPARED_STEPS + LATE_STEPS
            )
            steps.train()
        console.count_step()
        if lost:
            raise WrongUse(
                f"{_of(job)}: a forward changes the parameter {lost[0].removeprefix('model.')}, "
                "which is not trained, and --strategy fsdp would lose the change: make it a "
                "buffer, or use --strategy ddp"
            )
        after_first = self._state(job)
        with self._measured("validation"):
            sample = validate_sample(job, is_first=True)
        console.count_step()
        validated = self._state(job)
        with self._measured("steps"):
            for _ in range(before - 1):
                steps.train()
            self.notes += zero_losses(job)  # refuses NaN, before the weights are saved
        best = job.state.progress.best_step
        with self._measured("save"):
            saved = job.state.capture(job.strategy)
            with job.world.wait_for_all("the checkpoint of the rehearsal"):
                job.checkpoints.save(before, saved, {}, best)
                job.checkpoints.wait()
        console.count_step()
        first, validates = None, sample is not None
        if deterministic:
            before_step = self._state(job)
            found = outcome(job, start, steps, validates, copies_fit(job), self._measured)
            if job.world.world_size > 1:
                common_digests(job)  # refuses weights that differ between ranks
            of_first, of_save = (steps.state_of_dataset(step) for step in (1, before))
            states = States(
                start,
                {**after_first, **of_first},
                {**validated, **of_first},
                {**before_step, **of_save},
                found.after_step,
                found.end,
            )
            every = job.config.eval_every * job.schedule.steps_per_epoch
            validations = total // every, sample.share if sample else 1.0
            first = _First(_of(job), found, states, validates, before, total, *validations)
        if not self.capture.reason:
            assert isinstance(steps.step, TracedStep)
            self.steps += COMPARED_STEPS + LATE_STEPS
            with self._measured("capture"):
                self.capture.watch(job, steps.step, steps.train, validated)
        with self._measured("checks"):
            if sample:
                with job.world.wait_for_all("the check of metrics()"):
                    self.notes += impure_methods(job.task, sample)
            self.notes += filter(
                None, [*without_gradient(job), batch_dependence(job, steps.batches)]
            )
        return first

    def _resumed(
        self, first: _First, numbers: Numbers | None = None, replays: bool = False
    ) -> Outcome:
        """Load the checkpoint in a new job, then train the next step and validate.

        Before the step, attributes of the job get the values `numbers`. If the job `replays`, it
        also captures a step as a CUDA graph, and replays it.
        """
        job = self._job()
        start, files = self._state(job), job.checkpoints.files
        with self._measured("load"), job.world.wait_for_all("the load of the checkpoint"):
            job.state.restore(files.load(first.saved), job.strategy, files.folder)
        set_numbers(owners_of(job), numbers or {})
        job.run.console.count_step()
        copies = first.outcome.copies
        if not replays:
            return outcome(job, start, Steps(job), first.validates, copies, self._measured)
        problems = list[str]()
        kind = functools.partial(CapturedStep, report=problems.append, eager_steps=1)
        steps = Steps(job, kind, COMPARED_STEPS)
        found = outcome(job, start, steps, first.validates, copies, self._measured)
        with self._measured("capture"):
            assert isinstance(steps.step, CapturedStep)
            self.capture.replay(job, steps.step, steps.train, problems)
        return found

    def _refuse_later_bits(self, first: _First, resumed: Outcome, hidden: Set[str]) -> int:
        """Train the step with the values that the counts in the attributes `hidden` have later.

        Return the number of these trials.

        Raises:
            WrongUse: The step then has other bits, fails, or takes much longer.
        """
        one = first.outcome
        found = counts(
            hidden, first.states, first.saved, first.steps, first.validations, first.share
        )
        own_trials = list(ages(found))
        # Some hidden attributes, such as a list of losses, keep their early content while a count
        # gets its later value. An error of such a mixture proves nothing. On several processes, an
        # error cannot be ignored, because the other ranks wait in the step.
        consistent = all(self._world.from_each({count.part for count in found} == hidden))
        if not consistent and self._world.world_size > 1:
            return 0
        trials: int = max(self._world.from_each(len(own_trials)))
        for number in range(trials):
            trial = own_trials[number] if number < len(own_trials) else []
            if problem := self._problem(first, resumed, trial, consistent):
                if again := self._difference(one, self._resumed(first)):
                    problem = _digest_problem(again, again, [], first.task)
                    raise WrongUse(f"{first.task}: {problem}")
                culprit = self._culprit(first, resumed, trial, consistent)
                own = _later(culprit, problem, number == 0, first.task) if culprit else None
                raise WrongUse(f"{first.task}: {on_any_rank(self._world, own)}")
        return trials

    def _culprit(
        self, first: _First, resumed: Outcome, trial: list[Count], consistent: bool
    ) -> list[Count]:
        """Return the first count of `trial` that changes the step on its own, or all counts."""
        most = max(self._world.from_each(len(trial)))
        for number in range(most if 1 < most <= _MOST_ALONE else 0):
            alone = trial[number : number + 1]
            if self._problem(first, resumed, alone, consistent):
                return alone
        return trial

    def _problem(
        self, first: _First, resumed: Outcome, trial: list[Count], consistent: bool
    ) -> str | None:
        """Return what is wrong with the step if the counts have the values of `trial`, or None."""
        own, step = None, f"step {first.saved + 1}"
        try:
            aged = self._resumed(first, values_of(trial))
        except Exception as error:
            of_machine = isinstance(error, OSError) or (
                isinstance(error, Failure) and not isinstance(error, WrongUse)
            )
            if isinstance(error, RuntimeError) and not of_machine:
                of_machine = bool(gpu_failure(error) or exchange_failure(error))
            if of_machine or memory_used_up(error) is not None:
                raise
            text = f"{step} raises {type(error).__name__} ({text_of(error)})"
            if self._world.world_size > 1:  # the other ranks may wait in the step
                what = f"a count of another process changes the training: {text}"
                if trial:
                    what = _later(trial, text, False, first.task)
                raise WrongUse(f"{first.task}: {what}") from error
            return text if consistent else None
        usual_s = max(first.outcome.seconds, resumed.seconds)
        if aged.seconds > max(_SLOWER * usual_s, usual_s + _SLOWER_S):
            own = f"{step} takes {aged.seconds:.1f} s instead of {usual_s:.1f} s"
        if difference := self._difference(first.outcome, aged):
            return f"{step} has other bits, first in {difference},"
        return on_any_rank(self._world, own)


def rehearse(
    build: Callable[[RunCheckpoints], Job],
    run: RunLog,
    strategy: Strategy,
    stop: StopRequest,
    checkpoints: RunCheckpoints,
) -> dict[str, Any]:
    """Rehearse the resume of a new run with `checkpoints`, and return the entry of its manifest.

    `build` returns a new job with the given checkpoints. The rehearsal builds two jobs, and more if
    attributes of the task count steps or if the rehearsal fails. In the entry, `result` is a line
    for the header, `notes` are lines about what may be wrong, `seconds` has the time of each part,
    `changing` has the names of the attributes that a step or a validation changes, and `eager` is
    why the steps of the training are not captured, or "". All ranks must call this.

    Raises:
        WrongUse: A resume would not have the same bits.
        OutOfMemory: A step does not fit in memory.
        StorageFailure: The checkpoint cannot be written or read.
        Stopped: A stop was requested.
    """
    begin_s, world = time.monotonic(), strategy.world
    own = checkpoints.of_rehearsal(run.path / REHEARSAL / CHECKPOINTS)
    deterministic = True

    def new_job() -> Job:
        nonlocal deterministic
        if any(world.from_each(bool(stop))):
            world.leave()
            raise Stopped(f"stopped by {stop.cause} before step 1: start the same command again")
        job = build(own)
        deterministic = job.config.deterministic
        return job

    rehearsal = _Rehearsal(new_job, strategy)
    try:
        changing = rehearsal.run()
    finally:
        own.finish()
        run.console.end_bar()
        remove_rehearsal(run)
    what = "a resume and the same bits" if deterministic else "a validation and a checkpoint"
    steps = "1 step" if rehearsal.steps == 1 else f"{rehearsal.steps} steps"
    return {
        "result": f"{steps}, {what} in {time.monotonic() - begin_s:.1f} s",
        "notes": rehearsal.notes,
        "seconds": {part: round(s, 3) for part, s in rehearsal.seconds.items()},
        **({"changing": changing} if deterministic else {}),
        "eager": rehearsal.capture.reason,
    }


def remove_rehearsal(run: RunLog) -> None:
    """Remove the checkpoint of the rehearsal, also after a process that was killed."""
    if run.writes:
        shutil.rmtree(run.path / REHEARSAL, ignore_errors=True)


def _counts(name: str, one: Outcome, other: Outcome) -> bool:
    """Return whether the numbers in the attribute `name` differ after the same step of two jobs.

    The comparison is made before the validation, which may set a count back to 0.
    """
    states = (one.after_step, other.after_step)
    own, others = (state[name].numbers if name in state else {} for state in states)
    return own != others


def _digest_problem(difference: str, repeated: str | None, hidden: list[str], task: str) -> str:
    """Return why the value `difference` differs after a resume, and the cure.

    `repeated` is the first value that differs if the same step is computed twice, or None. The
    attributes `hidden` differed before the step.
    """
    if repeated is not None:
        return (
            f"{repeated} differs when the same step is computed again: draw random numbers only "
            "from the global generators of torch, NumPy and Python and keep no state between "
            f"calls, or {FAST}"
        )
    state = (
        named(hidden)
        if hidden
        else "in the dataset of a loader worker, a closure, a variable or a file"
    )
    return (
        f"{difference} differs after a resume, so a step uses state that checkpoints leave out "
        f"({state}): {_cure(hidden, task)}, or {FAST}"
    )


def _cure(names: list[str], task: str) -> str:
    owners = {name.partition(".")[0] for name in names}
    if owners == {task.removeprefix("task ")}:
        return _CURE_OF_TASK
    of_data = names and all(owner.endswith("_dataset") for owner in owners)
    return _CURE_OF_DATA if of_data else _CURE


def _later(trial: list[Count], problem: str, is_end: bool, task: str) -> str:
    """Return what is wrong if the counts of `trial` have their later values."""
    cure = _cure([count.part for count in trial], task)
    if len(trial) == 1:
        return (
            f"{trial[0].name} changes the training: {problem} if it is {trial[0].value:,}, as "
            f"{'at the end' if is_end else 'later in the training'}, and checkpoints leave it out: "
            f"{cure}"
        )
    names = named([count.name for count in trial])
    return (
        f"{names} change the training: {problem} if they have "
        f"{'their last values' if is_end else 'later values'}, and checkpoints leave them out: "
        f"{cure}"
    )


def _of(job: Job) -> str:
    return f"task {type(job.task).__name__}"
