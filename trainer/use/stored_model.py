"""Open a stored run for `evaluate`, `predict` or `export`: its task and its verified weights."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tqdm import tqdm

from trainbox.disclosure.recorded_values import listed_changes
from trainbox.errors import Stopped, StorageFailure, WrongUse
from trainbox.files.sidecar import read_sidecar
from trainbox.files.temporary import sockets_in_a_folder
from trainbox.folders.write_failures import writing
from trainbox.options.config import Settings, check
from trainbox.processes.streams import message
from trainbox.task import Task
from trainer.load_task import load_task
from trainer.loop.arithmetic import set_cuda_variables, torchscript_repeats
from trainer.loop.state import Inference, load_weights
from trainer.parallel.strategy import Strategy, join
from trainer.parallel.world import World
from trainer.records import manifest
from trainer.records.compare_runs import manifest_differences
from trainer.records.console import Console
from trainer.records.digest import digest_of_digests, tensor_digests
from trainer.records.run_record import RunRecord
from trainer.session.failures import errors_as_failures
from trainer.session.record import look_at_data
from trainer.session.same_on_all_ranks import refuse_difference, refuse_other_classes
from trainer.session.settle import completed
from trainer.system.signals import StopRequest
from trainer.system.sources import located_sources

VALIDATION = "validation"
ANOTHER_FOLDER = "set another folder with --out FOLDER"
_OF_THE_MACHINE = {"run", "data_dir", "device"}  # each machine may have its own


@dataclass(frozen=True, kw_only=True)
class Request:
    """What each command that uses a run is given.

    Attributes:
        run: The folder of the run.
        checkpoint: `best` or `last`.
        anyway: Whether changed source files of the task are accepted.
    """

    run: Path
    data_dir: Path
    device: str = "cpu"
    checkpoint: str
    anyway: bool


@dataclass(frozen=True)
class StoredRun:
    """A run that a command uses, on this rank.

    Attributes:
        settings: The settings of the run's newest start, some replaced for the command.
        console: Prints lines and writes the log, or None if standard output is for rows.
    """

    request: Request
    record: RunRecord
    settings: Settings
    strategy: Strategy
    task: Task
    console: Console | None

    def report(self, line: str) -> None:
        """Print a line once, on standard error if standard output is for rows."""
        if self.console is not None:
            self.console.report(line)
        elif self.strategy.world.is_first:
            message(line)

    def bar(self, batches: Iterable[Any], count: int) -> Iterable[Any]:
        """Return the `count` batches, with a progress bar on a terminal."""
        if self.console is not None:
            return self.console.validation_bar(batches, count)
        hidden = None if self.strategy.world.is_first else True  # None shows it on a terminal
        return tqdm(batches, "predicting", count, unit=" batches", leave=False, disable=hidden)

    def load(self, job: Inference, part: str, relevant: tuple[str, ...] = ("",)) -> "StoredModel":
        """Load the weights that the request names, and compare this start with the run's.

        All ranks must call this. `part` names the examples, such as `validation`. Only changes of
        entries that begin with a name in `relevant` are reported.

        Raises:
            WrongUse: The run lacks such weights, they differ between machines, they are of other
                classes, the data are not valid, or a source file of the task has changed.
            StorageFailure: The checkpoint is damaged, or the training has removed it.
        """
        request, record = self.request, self.record
        refuse_other_classes(job.task, record.path, record.manifest["classes"])
        origin, progress = _load(self, job)
        changed, data_digest = _changes(job, record, part)
        sources = {name: v for name, v in changed.items() if name.startswith("sources.")}
        if sources and not request.anyway:
            raise WrongUse(
                f"the task of {record.path} was changed since the run's start "
                f"({listed_changes(sources)}): restore the old files, or accept the new ones with "
                "--anyway"
            )
        self.report(
            f"{record.path}: {request.checkpoint} checkpoint, step {origin['step']}, weights "
            f"{origin['weights_sha256'][:16]}"
        )
        changed = {name: v for name, v in changed.items() if name.startswith(relevant)}
        if changed:
            self.report(f"changed since the run's start: {listed_changes(changed)}")
        return StoredModel(self, job, origin, progress, data_digest, changed)


def _task(run: Path, chosen: Settings) -> Task:
    """Return the task of a run.

    Raises:
        WrongUse: It cannot be loaded. If its file or its class is missing, the message has the run.
    """
    source, _, name = chosen.task.rpartition(":")
    of_run = f"{run} is a run of the task {chosen.task}"
    if source.endswith(".py") and not Path(source).is_file():
        raise WrongUse(
            f"{of_run}, and the current folder ({Path.cwd()}) has no such file: start "
            f"the command in the folder that has {source}"
        )
    try:
        return load_task(chosen.task, chosen.fields)
    except WrongUse as error:
        if f"does not define a Task named {name}:" not in str(error):
            raise
        raise WrongUse(
            f"{of_run}, and {source} does not define {name}: if the class has another name now, "
            f"write {name} = NEW_NAME below it, and add --anyway"
        ) from error


@contextlib.contextmanager
def opened(
    request: Request, out: Path | None = None, log: str = "", **settings: Any
) -> Iterator[StoredRun]:
    """Read the run, join the other ranks, load the task and run the body on all ranks.

    `settings` replace the run's settings. With a folder `out`, which is made, lines are printed on
    standard output and written to the file `log` there. Otherwise lines are printed on standard
    error. Errors of the body are attributed to the task.

    Raises:
        WrongUse: A rank has another request, or the device cannot compute with the settings.
        StorageFailure: The folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(sockets_in_a_folder())
        instead = ANOTHER_FOLDER if out else None
        stack.enter_context(errors_as_failures(out or request.run, instead=instead))
        # Read the run. The size of a validation batch depends on the number of shards. A run that
        # does not keep this number has one shard for each process of its newest start.
        record = RunRecord.open(request.run)
        stored = dataclasses.asdict(completed(record.config, int(record.plan["world_size"])))
        chosen = Settings(**stored | {"batch_size_per_gpu": None} | settings)

        # Join the other ranks and load the task, whose import may use the GPU.
        if chosen.deterministic:
            set_cuda_variables()
        strategy = join(request.device)
        world = strategy.world
        given = {name: x for name, x in vars(request).items() if name not in _OF_THE_MACHINE}
        compared = {"settings": dataclasses.asdict(chosen), **given}
        refuse_difference(world, compared, "start the same command on each machine")
        check(chosen, world.device.type)
        stack.enter_context(torchscript_repeats(chosen.deterministic))
        world.seed(chosen.seed, "task")
        task = _task(request.run, chosen)

        # Make the folder of the results, and attribute errors from here on to the task.
        console, path = None, None
        if out is not None:
            with writing(out, ANOTHER_FOLDER):
                out.mkdir(parents=True, exist_ok=True)
                path = out / log.format(rank=world.rank)
                console = stack.enter_context(contextlib.closing(Console(path, world.is_first)))
        stack.enter_context(
            errors_as_failures(out or request.run, type(task).__name__, path, instead)
        )
        yield StoredRun(request, record, chosen, strategy, task, console)
        world.leave()


@dataclass(frozen=True)
class StoredModel:
    """A model with the weights of a run.

    Attributes:
        origin: The run, the checkpoint and the digests of the weights, for people and programs.
        progress: The progress of the training in the checkpoint.
        data_digest: The digest of the examples, in hex.
        changed: The entries of the run's manifest that differ now, `{name: (old, new)}`.
    """

    run: StoredRun
    job: Inference
    origin: Mapping[str, Any]
    progress: Mapping[str, Any]
    data_digest: str
    changed: Mapping[str, Any]

    @property
    def seed_parts(self) -> tuple[int | str, ...]:
        """The seed of the training's validation after this step."""
        return (self.job.config.seed, VALIDATION, self.origin["step"])


def stopping(world: World, stop: StopRequest, what: str) -> Callable[[], bool]:
    """Return a function that raises Stopped once a rank must stop; all ranks must call it."""

    def stopped() -> bool:
        if world.vote(bool(stop))[0]:
            world.leave()
            raise Stopped(
                f"stopped by {stop.cause} before the end of the {what}: start the same command "
                "again"
            )
        return False

    return stopped


def _load(run: StoredRun, job: Inference) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Load the weights on all ranks, and return their origin and the progress of the training."""
    record, world, which = run.record, job.world, run.request.checkpoint
    try:
        # Rank 0 reads whole checkpoints to verify them, which may take long.
        found, sidecar = list[int](), dict[str, Any]()
        with world.wait_for_all("the verification of the checkpoint"):
            if world.is_first:
                step, file = record.find_weights(which)
                found = [step, file.suffix == ".pt"]
                if found[1]:
                    sidecar = read_sidecar(record.files.path(step))
        step, is_whole = world.from_first(found)
        with world.wait_for_all("the load of the checkpoint"):
            if is_whole:
                state = record.load(step)
            else:
                state = {"model": load_file(record.files.best), "progress": {"best_step": None}}
            digest = digest_of_digests(tensor_digests(state["model"]))
    except FileNotFoundError as error:
        raise StorageFailure(
            f"{error.filename or error} was removed by the training of {record.path}: start the "
            "same command again"
        ) from error
    path = record.files.path(step, ".pt") if is_whole else record.files.best
    if not is_whole:
        run.report(f"the checkpoint of step {step} was removed: the weights are from {path}")
    weights = {f"the digest of the weights in {path}": digest}
    refuse_difference(world, weights, "copy the same run to all machines")
    load_weights(job.model, state["model"], job.strategy, path)
    origin = {
        "run": str(record.path),
        "run_id": record.manifest["run_id"],
        "task": record.config.task,
        "checkpoint": which,
        "step": step,
        "weights_sha256": digest,
        "checkpoint_sha256": sidecar.get("sha256"),  # on rank 0
    }
    return origin, state["progress"]


def _changes(job: Inference, record: RunRecord, part: str) -> tuple[dict[str, Any], str]:
    """Return what differs from the run's start, and the digest of the dataset.

    Raises:
        WrongUse: The data differ between ranks.
    """
    data, before = look_at_data(job, {part: job.evaluation.dataset}), record.manifest
    known = before.get("sources", {}).keys() - data.sources.keys()
    sources = data.sources | located_sources(known)
    read = data.digests if part == VALIDATION else {}
    found = manifest.describe(job.strategy, sys.argv[1:], before["settings"], read, sources)
    # The data that are read now count, and the number of processes of the newest start.
    data_before = {name: before.get("data", {}).get(name) for name in read}
    changed = manifest_differences({**before, "data": data_before, "plan": record.plan}, found)
    agreed = job.world.from_first({name: list(values) for name, values in changed.items()})
    return agreed, data.digests[part]
