"""The state of a task that checkpoints leave out, and the message about a change of it."""

from collections.abc import Collection, Mapping

from torch.optim.lr_scheduler import LRScheduler

from trainbox.contract.errors import WrongUse
from trainer.checks.fingerprint import GENERATORS, Part, fingerprint
from trainer.loop.state import Job
from trainer.parallel.world import World

FAST = "use --fast, which does not guarantee the same bits"  # the end of several messages
UNUSED = "use --no-rehearsal if the training does not use it"


def hidden_state(job: Job) -> dict[str, Part]:
    """Return the fingerprint of the job's hidden state on this rank."""
    # Loader workers have their own copies of the datasets.
    datasets = {"train_dataset": job.train, "validation_dataset": job.evaluation.dataset}
    return fingerprint(
        job.task, job.state.model, job.state.optimizer, {} if job.workers else datasets
    )


def differing(before: Mapping[str, Part], after: Mapping[str, Part]) -> set[str]:
    """Return the names of the parts that differ or that only one has.

    The parts of a module or class that was imported meanwhile are new, and do not differ.
    """
    known = {part.owner for part in before.values()}
    new = {name for name, part in after.items() if part.owner not in known}
    return {name for name in {**before, **after} if before.get(name) != after.get(name)} - new


def described(name: str, before: Mapping[str, Part], after: Mapping[str, Part]) -> str:
    """Return how the part `name` changes, and the remedy."""
    absent = Part("", "absent", object)
    old, new = before.get(name, absent), after.get(name, absent)
    kind = new.kind if new is not absent else old.kind
    if issubclass(kind, GENERATORS):
        name, remedy = f"{name}, a random generator", "draw from torch's global generator"
    elif issubclass(kind, LRScheduler):
        remedy = "remove the scheduler, and write schedule()"
    elif name.endswith(".attributes"):
        name += ", such as requires_grad"
        remedy = "set it in build_model(), or with --freeze"
    elif name.startswith("the "):
        remedy = "build the model and the optimizer whole in build_model() and build_optimizer()"
    else:
        remedy = "make it a buffer" + (", or set it in build_model()" if new.owner else "")
        remedy += f", or {UNUSED}"
    values = f" from {old.shown} to {new.shown}" if old.shown and new.shown else ""
    return f"{name}{values}, which checkpoints leave out: {remedy}"


def on_any_rank(world: World, own: str | None = None) -> str | None:
    """Return the first text `own` of all ranks that is not None; all ranks must call this."""
    return next((text for text in world.from_each(own) if text is not None), None)


class HiddenState:
    """The hidden state of a training.

    It may change only in the parts `changing`, and in objects that decide themselves what
    checkpoints save, such as with `get_extra_state`.
    """

    def __init__(self, job: Job, changing: Collection[str]) -> None:
        self._job, self._changing, self._start = job, changing, hidden_state(job)

    def check(self) -> None:
        """Compare with the start; all ranks must call this.

        Raises:
            WrongUse: A part has changed on some rank.
        """
        now = hidden_state(self._job)
        saved = {name for name, part in now.items() if part.is_saved}
        changed = differing(self._start, now) - set(self._changing) - saved
        texts = [described(name, self._start, now) for name in sorted(changed)]
        if text := on_any_rank(self._job.world, *texts[:1]):
            raise WrongUse(
                f"task {type(self._job.task).__name__}: by step {self._job.state.progress.step} "
                f"it has changed {text}"
            )
