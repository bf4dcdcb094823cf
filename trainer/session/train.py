"""Run one call of `train`: read `train_task` first."""

import contextlib
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainbox.errors import (
    ExitCode,
    Failure,
    OutOfMemory,
    Stopped,
    StorageFailure,
    WrongUse,
)
from trainbox.files.temporary import sockets_in_a_folder
from trainbox.folders.record_folder import CHECKPOINTS
from trainbox.options.config import (
    CHANNELS_LAST,
    CONTIGUOUS,
    Config,
    Settings,
    check,
    split_metric,
)
from trainer.checks.capture import reason_for_eager_steps
from trainer.checks.fingerprint import sampled_digest
from trainer.checks.hidden_state import HiddenState, on_any_rank
from trainer.checks.rehearsal import rehearse
from trainer.load_task import converted_fields, load_task
from trainer.loop.arithmetic import set_cuda_variables, torchscript_repeats
from trainer.loop.build import Data, build, build_data
from trainer.loop.fit import fit
from trainer.loop.memory_format import NeedsContiguous
from trainer.loop.out_of_memory import (
    examples_at_once,
    free_memory,
    has_batch_norm,
    with_smaller_micro_batches,
)
from trainer.loop.report import closing, header, samples_per_second, smaller_micro_batches
from trainer.loop.state import Job
from trainer.measure.meter import Meter
from trainer.measure.profile import Profile
from trainer.parallel.strategy import Strategy, join
from trainer.records.checkpoint import RunCheckpoints
from trainer.records.run_gpus import RunGpus
from trainer.records.run_log import RunLog
from trainer.session.default_name import default_name
from trainer.session.failures import errors_as_failures
from trainer.session.initial import start_from_weights
from trainer.session.record import (
    changing_state,
    eager_by_rehearsal,
    end_recorded,
    look_at_data,
    record_change,
    record_start,
    refuse_edited,
)
from trainer.session.resume import find_checkpoint, reason_to_keep_micro_batches, resume_job
from trainer.session.same_on_all_ranks import SAME_HARDWARE, check_command, refuse_difference
from trainer.session.settle import settle
from trainer.system.signals import StopRequest

_SLOW_DATA_S = 2.0  # all jobs share datasets that took longer to build


# The outermost context: all loader workers must have exited when their folder is removed.
@sockets_in_a_folder()
def train_task(
    config: Config,
    stop: StopRequest,
    device_name: str,
    runs_dir: Path,
    run_name: str | None,
    data_dir: Path,
    resume: str,
    until_step: int | None = None,
    validated: Callable[[int, Mapping[str, float]], None] | None = None,
    measure_s: float | None = None,
    profile_steps: int | None = None,
    swept: Sequence[str] = (),
    rehearses: bool = True,
    hang_minutes: float | None = None,
    is_kept: bool = True,
) -> dict[str, float]:
    """Train `config.task` in `runs_dir/run_name`, and return the best metrics and the speed.

    If a run with the same settings was stopped, the training resumes from its newest checkpoint.
    With `until_step`, the training ends there as if complete, with the learning rates of the whole
    training. `validated` is called with the step and the metrics of each validation. With
    `measure_s`, the training ends after about that many measured seconds. With `profile_steps`,
    that many steps are profiled. TensorBoard shows the settings `swept` first. The first start of
    a run `rehearses` its resume. After `hang_minutes` without a step or a validated batch, the
    process exits with code 7. If the run's folder is removed afterwards, it is not kept.

    In the result, the metric that selects the best checkpoint is first, and the speed
    `samples_per_second` is last.

    Raises:
        Failure: The training did not succeed. The class of the failure has the exit code.
    """
    with errors_as_failures(runs_dir), torchscript_repeats(config.deterministic):
        # torch warns of a loss of shapes (B, 1) and (B,), which has (B, B) wrong values: refuse it.
        warnings.filterwarnings("error", message="Using a target size")
        # The import of a task may use the GPU.
        if config.deterministic:
            set_cuda_variables()
        # Join the other ranks, load the task, and open the run's folder.
        strategy = join(device_name)
        world = strategy.world
        check_command(world, config, run_name, resume)
        world.seed(config.seed, "task")
        fields = converted_fields(config.task, config.fields)
        config = dataclasses.replace(config, fields=fields)
        task = load_task(config.task, fields)
        folder = runs_dir / (run_name or default_name(config, strategy, runs_dir))
        run = RunLog(folder, world.rank, hang_minutes, is_kept)
        # The launcher prints a message of several ranks once if it is the same text on all of them.
        log = run.path / "logs" / f"rank-{0 if world.world_size == 1 else '*'}.log"
        with (
            contextlib.closing(run),
            end_recorded(run),
            errors_as_failures(runs_dir, type(task).__name__, log),
            contextlib.closing(RunGpus(strategy, run.folder)) as gpus,
        ):
            # Choose all settings, and compare them with the settings at the run's start.
            settled = settle(config, task, strategy, run)
            refuse_difference(world, dataclasses.asdict(settled), SAME_HARDWARE)
            refuse_edited(settled, strategy, run, resume == "anyway")
            check(settled, world.device.type)
            checkpoints = RunCheckpoints(
                run.path / CHECKPOINTS,
                settled.keep,
                run.writes,
                run.report,
                strategy.gathers_states,
            )
            jobs = _Jobs(config, settled, strategy, run, gpus, data_dir, checkpoints)

            def trained() -> Job:
                job = jobs.ready(resume, rehearses, stop)
                if until_step is not None:
                    job.end_step = min(job.end_step, until_step)
                with contextlib.closing(job.evaluation), _observed(job, measure_s, profile_steps):
                    anyway, did_not_fit = resume == "anyway", jobs.did_not_fit
                    _train(job, stop, anyway, did_not_fit, validated, swept, rehearses)
                return job

            job = jobs.fitting(trained, resume)
        world.leave()
        return _result(job)


@dataclass
class _Jobs:
    """Builds the jobs of one start, each with a new task.

    Attributes:
        settled: The settings `config` with each open choice made.
        did_not_fit: A message for each attempt whose micro-batches did not fit in memory.
    """

    config: Config
    settled: Settings
    strategy: Strategy
    run: RunLog
    gpus: RunGpus
    data_dir: Path
    checkpoints: RunCheckpoints
    did_not_fit: list[str] = field(default_factory=list)
    data: Data | None = None
    has_batch_norm: bool = False
    _initial: dict[str, str] = field(default_factory=dict)

    def ready(self, resume: str, rehearses: bool, stop: StopRequest) -> Job:
        """Return a job that continues from the run's newest checkpoint, or a new one.

        A new run first `rehearses` its resume.
        """
        step = find_checkpoint(self.checkpoints, self.run, self.strategy.world, resume)
        init = self.config.init if step is None else None
        rehearsal = {"result": "skipped"}
        if rehearses and step is None:
            build = functools.partial(self._build, init)
            rehearsal = rehearse(build, self.run, self.strategy, stop, self.checkpoints)
        job = self._build(init, self.checkpoints)
        job.rehearsal = rehearsal
        job.notes += rehearsal.get("notes", [])
        if step is not None:
            resume_job(job, step)
        job.eager = reason_for_eager_steps(job) or eager_by_rehearsal(job, resume == "anyway")
        return job

    def _build(self, init: str | None, checkpoints: RunCheckpoints) -> Job:
        """Return a new job with the weights of `init`. Jobs share data that took long to build."""
        free_memory()  # of the job before
        data, world = self.data, self.strategy.world
        if data is None or world.from_first(data.seconds) < _SLOW_DATA_S:
            self.data = data = None  # two datasets may not fit in memory
            world.seed(self.config.seed, "task")
            task = load_task(self.config.task, self.config.fields)
            self.data = data = build_data(self.settled, task, world, self.data_dir)
        used = data._replace(task=copy.copy(data.task))
        job = build(self.settled, used, self.strategy, self.run, self.gpus, checkpoints)
        self.settled = job.config  # the first job has chosen the memory format
        self.has_batch_norm = has_batch_norm(job.state.model)
        self._refuse_other_weights(job)
        if init is not None:
            start_from_weights(job, init)
        return job

    def _refuse_other_weights(self, job: Job) -> None:
        """Check that the model of each job begins with the same weights.

        Raises:
            WrongUse: build_model() returned other weights, such as the weights of a model that an
                earlier job has trained.
        """
        found = {name: sampled_digest(p) for name, p in job.state.model.named_parameters()}
        first = self._initial or found
        different = next((name for name in found if found[name] != first.get(name)), None)
        if (name := on_any_rank(job.world, different)) is not None:
            raise WrongUse(
                f"task {type(job.task).__name__}: build_model() returned other weights when it was "
                f"called again, first in {name}: return a new model in each call, with weights "
                "from the global generators of torch, NumPy and Python"
            )
        self._initial = found

    def fitting(self, work: Callable[[], Job], resume: str) -> Job:
        """Return `work()`, with smaller micro-batches as long as its first steps do not fit.

        If the first steps fail with the channels last, the pictures are contiguous.

        Raises:
            OutOfMemory: The micro-batches must not be smaller.
        """
        self.run.console.show(f"{'run':<10} {self.run.path}")  # a rehearsal may take long
        while True:
            of_a_view = None
            try:
                return work()
            except OutOfMemory as error:
                found = str(error)
            except NeedsContiguous as error:
                of_a_view = error.__cause__ or error
            finally:
                self.checkpoints.finish()  # a save that has begun, or a best in memory
            if of_a_view is not None:
                self.settled = self._contiguous(of_a_view)
                continue
            # Only after the `except` block does the error release the memory of the job.
            world, accumulation = self.strategy.world, self.config.accumulation
            fixed = reason_to_keep_micro_batches(self.checkpoints, world, accumulation, resume)
            smaller = with_smaller_micro_batches(self.settled, self.has_batch_norm, found, fixed)
            at_once = examples_at_once(self.settled)
            self.did_not_fit.append(f"{found} with {at_once} examples at once")
            self.settled = smaller
            self.run.end_progress()

    def _contiguous(self, error: BaseException) -> Settings:
        """Return the settings with contiguous pictures, or raise `error`.

        The format of a run changes only before its first checkpoint, and only if a rule chose it.
        """
        is_fixed = self.strategy.world.from_first(self.run.folder.has_had_a_checkpoint())
        if is_fixed or self.config.memory_format or self.settled.memory_format != CHANNELS_LAST:
            raise error
        self.run.end_progress()
        return dataclasses.replace(self.settled, memory_format=CONTIGUOUS)


@contextlib.contextmanager
def _observed(job: Job, measure_s: float | None, profile_steps: int | None) -> Iterator[None]:
    """Measure and profile the body, if requested, and write the results.

    A training that is stopped has a profile of the steps so far.

    Raises:
        StorageFailure: A result cannot be written.
    """
    meter = Meter(job, measure_s) if measure_s else None
    profile = Profile(job, profile_steps) if profile_steps else None
    try:
        yield
    except Stopped:
        if profile is not None:
            # The checkpoint is complete, so the scheduler must see that the training was stopped.
            try:
                profile.finish()
            except StorageFailure as error:
                job.run.report(str(error))
        raise
    if meter is not None:
        meter.write()
    if profile is not None:
        profile.finish()


def _result(job: Job) -> dict[str, float]:
    """Return the result of `train_task`."""
    _, chosen = split_metric(job.config.best_by, "--best-by")
    metrics = dict(
        sorted(job.state.progress.best_metrics.items(), key=lambda item: item[0] != chosen)
    )
    return {**metrics, "samples_per_second": samples_per_second(job)}


def _train(
    job: Job,
    stop: StopRequest,
    anyway: bool,
    did_not_fit: Sequence[str],
    validated: Callable[[int, Mapping[str, float]], None] | None,
    swept: Sequence[str],
    rehearses: bool,
) -> None:
    """Check the data and the task, record this start, train, and log the results.

    `did_not_fit` has a message for each earlier attempt, whose micro-batches did not fit in memory.
    A run that `rehearses` compares its hidden state with the hidden state at its start.

    Raises:
        OutOfMemory: The first steps do not fit in memory.
        Failure: Each validation had NaN as the metric that selects the best checkpoint.
    """
    # Look at the data.
    run, progress = job.run, job.state.progress
    first_step = progress.step
    complete = (
        progress.step >= job.schedule.total_steps and progress.evaluated_step == progress.step
    ) or progress.ended_early
    data = look_at_data(job, {"train": job.train, "validation": job.evaluation.dataset})
    # Record what this run is trained with, and log the header.
    record_start(job, data, anyway, did_not_fit, complete)
    if did_not_fit:
        smaller_micro_batches(job, did_not_fit[-1])
    else:
        header(job)
    # Check the task, and train.
    run.report_lost(first_step, progress.evaluated_step)
    if complete:
        run.report(
            "this run is complete: nothing is left to do (a larger --epochs or another "
            "--seed trains a new run, whose --run must have another name)"
        )
    else:
        run.begin(first_step, progress.evaluated_step, job.schedule)
        with job.gpus.measured():
            changing = changing_state(job) if rehearses else None
            if changing is not None:
                noted = functools.partial(record_change, job)
                job.check_hidden_state = HiddenState(job, changing, noted).check
            stop.begin()
            fit(job, stop, validated)
        run.board.hyperparameters(
            job.config, job.state.progress.best_step or 0, job.state.progress.best_metrics, swept
        )
    run.end_progress()
    closing(job)
    if progress.evaluated_step and progress.best_step is None:
        raise Failure(
            "each validation had NaN as the metric that selects the best checkpoint "
            f"({job.config.best_by}): check the validation data and metrics(); the last checkpoint "
            "is valid",
            exit_code=ExitCode.NOT_FINITE,
        )
