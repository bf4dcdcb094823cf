"""Open a stored run for `evaluate`, `predict` or `export`: its task and its verified weights."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from trainbox.contract.config import Settings, check
from trainbox.contract.errors import Preempted, StorageFailure, WrongUse
from trainbox.task import Task
from trainer.load_task import load_task
from trainer.loop.arithmetic import set_cuda_variables
from trainer.loop.state import Inference, load_weights
from trainer.parallel.strategy import Strategy, join
from trainer.run import manifest
from trainer.run.compare import listed_changes, manifest_differences
from trainer.run.console import Console
from trainer.run.digest import digest_of_digests, tensor_digests
from trainer.run.run_record import RunRecord, StoredWeights
from trainer.session.agreement import refuse_difference, refuse_other_classes
from trainer.session.failures import errors_as_failures
from trainer.session.record import look_at_data
from trainer.session.settle import completed
from trainer.system.signals import StopRequest
from trainer.system.sources import located_sources

VALIDATION = "validation"
ANOTHER_FOLDER = "set another folder with --out FOLDER"
_OF_THE_MACHINE = {"run", "data_dir", "device"}  # each machine may have its own
_ATTEMPTS = 5  # to load a checkpoint that a training replaces
T = TypeVar("T")


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


class StoredTask(NamedTuple):
    """The task of a run on this rank, and the settings of the run's newest start."""

    record: RunRecord
    settings: Settings
    strategy: Strategy
    task: Task


def open_task(request: Request, **settings: Any) -> StoredTask:
    """Read the run, join the other ranks and load the task. `settings` replace those of the run.

    Raises:
        WrongUse: A rank has another request, or the device cannot compute with the settings.
    """
    record = RunRecord.open(request.run)
    # The size of a validation batch depends on the number of shards. A run that does not keep this
    # number has one shard for each process of its newest start.
    stored = dataclasses.asdict(completed(record.config, int(record.plan["world_size"])))
    chosen = Settings(**stored | {"batch_size_per_gpu": None} | settings)
    # The import of a task may use the GPU.
    if chosen.deterministic:
        set_cuda_variables()
    strategy = join(request.device)
    given = {name: value for name, value in vars(request).items() if name not in _OF_THE_MACHINE}
    compared = {"settings": dataclasses.asdict(chosen), **given}
    refuse_difference(strategy.world, compared, "start the same command on each machine")
    check(chosen, strategy.world.device.type)
    return StoredTask(record, chosen, strategy, load_task(chosen.task, chosen.fields))


@contextlib.contextmanager
def results_in(out: Path, log: str, stored: StoredTask) -> Iterator[Console]:
    """Make the folder `out`, and attribute errors of the body to the task, with `log` there.

    Raises:
        StorageFailure: The folder cannot be written.
    """
    with writing(out, ANOTHER_FOLDER):
        out.mkdir(parents=True, exist_ok=True)
    with (
        contextlib.closing(Console(out / log, stored.strategy.world.is_first)) as console,
        errors_as_failures(out, type(stored.task).__name__, out / log),
    ):
        yield console


@contextlib.contextmanager
def writing(what: object, remedy: str) -> Iterator[None]:
    """Raise an error of the system in the body as StorageFailure: `what` cannot be written."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader needs no more rows
    except OSError as error:
        raise StorageFailure(
            f"{what} cannot be written ({error.strerror or error}): {remedy}"
        ) from error


@dataclass(frozen=True)
class StoredModel:
    """A model with the weights of a run.

    Attributes:
        weights: The checkpoint of the weights.
        digest: The digest of the weights, in hex.
        data_digest: The digest of the examples, in hex.
        changed: The entries of the run's manifest that differ now, `{name: (old, new)}`.
    """

    record: RunRecord
    job: Inference
    weights: StoredWeights
    digest: str
    data_digest: str
    changed: Mapping[str, tuple[Any, Any]]

    @classmethod
    def load(
        cls,
        record: RunRecord,
        job: Inference,
        request: Request,
        part: str,
        report: Callable[[str], None],
        relevant: tuple[str, ...] = ("",),
    ) -> "StoredModel":
        """Load the weights that `request` names, and compare this start with the run's.

        All ranks must call this. `part` names the examples, such as `validation`. Only changes of
        entries that begin with a name in `relevant` are reported.

        Raises:
            WrongUse: The run lacks such weights, they differ between machines, they are of other
                classes, the data are not valid, or a source file of the task has changed.
            StorageFailure: The checkpoint is damaged, or the training removed it in each attempt.
        """
        refuse_other_classes(job.task, record.path, record.manifest["classes"])
        weights, digest = _load(job, record, request.checkpoint)
        changed, data_digest = _changes(job, record, part)
        sources = {name: v for name, v in changed.items() if name.startswith("sources.")}
        if sources and not request.anyway:
            raise WrongUse(
                f"the task of {record.path} was changed since the run's start "
                f"({listed_changes(sources)}): restore the old files, or accept the new ones with "
                "--anyway"
            )
        report(
            f"{record.path}: {request.checkpoint} checkpoint, step {weights.step}, weights "
            f"{digest[:16]}"
        )
        changed = {name: v for name, v in changed.items() if name.startswith(relevant)}
        if changed:
            report(f"changed since the run's start: {listed_changes(changed)}")
        return cls(record, job, weights, digest, data_digest, changed)

    @property
    def seed_parts(self) -> tuple[int | str, ...]:
        """The seed of the training's validation after this step."""
        return (self.job.config.seed, VALIDATION, self.weights.step)

    def until_stopped(
        self, what: str, stop: StopRequest, loop: Callable[[Callable[[], bool]], T | None]
    ) -> T:
        """Return what `loop` returns, which gets a function that asks whether a rank must stop.

        Raises:
            Preempted: The loop has returned None because of a request to stop.
        """
        world = self.job.world
        found = loop(lambda: bool(world.vote(bool(stop))[0]))
        if found is None:
            world.leave()
            raise Preempted(
                f"stopped by {stop.cause} before the end of the {what}: start the same command "
                "again"
            )
        return found


def _load(job: Inference, record: RunRecord, which: str) -> tuple[StoredWeights, str]:
    """Load the weights on all ranks, and return where they were and their digest.

    A training that still runs may remove the checkpoint in between, so this tries again.
    """
    world = job.world
    for _ in range(_ATTEMPTS):
        found, state, digest = None, None, ""
        # Rank 0 reads whole checkpoints to verify them, which may take long.
        with (
            world.wait_for_all("the verification of the checkpoint"),
            contextlib.suppress(FileNotFoundError),
        ):
            found = record.find(which) if world.is_first else None
        if (chosen := world.from_first(found and [found.step, found.sha256])) is None:
            continue
        weights = StoredWeights(*chosen)
        path = record.files.path(weights.step, ".pt")
        with (
            world.wait_for_all("the load of the checkpoint"),
            contextlib.suppress(FileNotFoundError),
        ):
            state = record.load(weights.step)
            digest = digest_of_digests(tensor_digests(state))
        if all(world.from_each(state is not None)):
            assert state is not None
            refuse_difference(
                world,
                {f"the digest of the weights in {path}": digest},
                "copy the same run to all machines",
            )
            load_weights(job.model, state, job.strategy, path)
            return weights, digest
    raise StorageFailure(
        f"the training in {record.path} removed each of {_ATTEMPTS} checkpoints before it was "
        "read: train with a larger --keep or --checkpoint-minutes"
    )


def _changes(
    job: Inference, record: RunRecord, part: str
) -> tuple[dict[str, tuple[Any, Any]], str]:
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
    # The other ranks get lists in JSON.
    agreed = job.world.from_first({name: list(values) for name, values in changed.items()})
    return {name: (old, new) for name, (old, new) in agreed.items()}, data.digests[part]
