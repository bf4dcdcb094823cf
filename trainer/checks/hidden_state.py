"""The state of a job that checkpoints leave out, and a note if it changes during the training."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from trainer.checks.fingerprint import Owner, Part, fingerprint, of_dataset, owners
from trainer.loop.state import Job
from trainer.parallel.world import World

FAST = "use --fast, which does not guarantee the same bits"  # the end of several messages
DRILL = "`trainbox drill` shows whether it does"
_MOST_NAMED = 3
_TRAIN = "train_dataset"


def owners_of(job: Job) -> dict[str, Owner]:
    """Return the objects of a job whose state checkpoints leave out."""
    datasets = {_TRAIN: job.train, "validation_dataset": job.evaluation.dataset}
    return owners(job.task, job.state.model, job.state.optimizer, datasets)


def state_of_dataset(dataset: Any) -> dict[str, Part]:
    """Return the fingerprint of the training set in the process that reads it."""
    return fingerprint(of_dataset(_TRAIN, dataset))


def hidden_state(job: Job) -> dict[str, Part]:
    """Return the fingerprint of the job's hidden state on this rank.

    Loader workers have their own copies of the datasets.
    """
    state = job.state
    of_optimizer = [v for v in state.optimizer.state.values() if isinstance(v, dict)]
    saved = [v for values in (state.model.state_dict(), *of_optimizer) for v in values.values()]
    return fingerprint(owners_of(job), saved)


def differing(before: Mapping[str, Part], after: Mapping[str, Part]) -> set[str]:
    """Return the names of the attributes that differ, or that only one of the two has."""
    absent = Part("", {}, False)
    return {
        name
        for name in {**before, **after}
        if before.get(name, absent).digest != after.get(name, absent).digest
    }


def named(names: Collection[str]) -> str:
    """Return names for a sentence, such as `Net.calls, 5 attributes of Net.metric and 3 more`."""
    shown = sorted(names)
    each = Counter(name.rpartition(".")[0] for name in shown)
    if len(shown) > _MOST_NAMED and len(each) > 1:
        shown = [
            f"{each[owner]} attributes of {owner}" if each[owner] > 1 else name
            for owner, name in {name.rpartition(".")[0]: name for name in shown}.items()
        ]
    more = len(shown) - _MOST_NAMED
    if more > 0:
        return f"{', '.join(shown[:_MOST_NAMED])} and {more} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def on_any_rank(world: World, own: str | None = None) -> str | None:
    """Return the first text `own` of all ranks that is not None; all ranks must call this."""
    return next((text for text in world.from_each(own) if text is not None), None)


def of_all_ranks(world: World, own: Collection[str]) -> list[str]:
    """Return the names `own` of all ranks in order, each once; all ranks must call this."""
    return sorted({name for names in world.from_each(sorted(own)) for name in names})


class HiddenState:
    """The hidden state of a training, which is compared at each checkpoint.

    Two kinds of attributes may change without a note: the attributes `changing`, which changed in
    the rehearsal, and attributes of objects with their own `get_extra_state()` or `state_dict()`.
    """

    def __init__(
        self, job: Job, changing: Collection[str], noted: Callable[[Collection[str], int], Any]
    ) -> None:
        """Begin with the state of now. `check` calls `noted` with new names and the step."""
        self._job, self._known, self._noted = job, set(changing), noted
        self._start = hidden_state(job)

    def check(self) -> None:
        """Print a note on attributes that changed since the start; all ranks must call this."""
        now = hidden_state(self._job)
        saved = {name for name, part in now.items() if part.is_saved}
        changed = differing(self._start, now) - self._known - saved
        if names := of_all_ranks(self._job.world, changed):
            self._known |= set(names)
            step = self._job.state.progress.step
            self._job.run.report(
                f"note: by step {step}, {named(names)} changed, which checkpoints leave out: "
                f"a resume may have other bits, and {DRILL}"
            )
            self._noted(names, step)
