"""The programs that a launch supervises: their names in messages, and how each of them stops."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainbox.errors import INTERRUPT, ExitCode, stopped_without_loss
from trainbox.processes.process_tree import STOP_SIGNALS

# Compose and Kubernetes send SIGKILL after a grace period of 60 s. This is shorter, so that the
# supervisor can still log a message.
STOP_BUDGET_S = 50


@dataclass(frozen=True)
class Child:
    """What the supervised child is, in messages, and how it stops.

    Attributes:
        name: such as "the training".
        stopping: what the child does after the signal {signal}.
        again: what the same command does after that.
        forwarded_as: the signals that the child gets instead of another one, each at one more
            signal to this process. The signal after the last of them kills the child.
        stops_with_0: whether exit code 0 means "stopped" if the child got a signal.
        has_saved: whether a child that was stopped, and has ended with this code, has saved
            something new. The trainer itself exits with code 75 only then.
        memory: what the user can lower if the host's memory is used up.
        ended_by: the message if the signal with this number has ended the child. It had no handler
            yet, so nothing is lost. A script may have none at any time.
    """

    name: str
    stopping: str
    again: str
    forwarded_as: Mapping[signal.Signals, tuple[signal.Signals, ...]]
    stops_with_0: bool = False
    has_saved: Callable[[int], bool] = lambda code: code == ExitCode.PREEMPTED
    memory: str = "--batch-size or --workers"
    ended_by: Callable[[int], str] = stopped_without_loss

    def signals(self, received: int) -> tuple[signal.Signals, ...]:
        """Return the signals that the child gets, one after the other, after the one received."""
        return self.forwarded_as.get(signal.Signals(received), (signal.Signals(received),))


_TO_TRAINER = {signal.SIGINT: (INTERRUPT,)}
TRAINING = Child(
    "the training",
    "saving what was trained, then stopping",
    "the same command resumes from the newest checkpoint, if there is one",
    _TO_TRAINER,
)
# Its checkpoints do not remain, as in `verify` and `bench`.
UNSAVED_TRAINING = Child(
    "the training", "stopping", "the same command starts it again", _TO_TRAINER
)
EVALUATION = Child("the evaluation", "stopping", "the same command starts it again", _TO_TRAINER)
PREDICTION = Child("the prediction", "stopping", "the same command starts it again", _TO_TRAINER)
# Any program of a user. Most exit with code 0 after they have saved, or are ended by the signal. At
# Ctrl-C, a script may do what it likes, such as end its training early and test the model.
SCRIPT_RUN = Child(
    "the script",
    f"the script gets {{signal}} and has {STOP_BUDGET_S} s to save and exit",
    "the same command starts it again in the same run folder",
    dict.fromkeys(STOP_SIGNALS, (signal.SIGTERM,))
    | {signal.SIGINT: (signal.SIGINT, signal.SIGTERM)},
    stops_with_0=True,
    memory="the script's batch size or number of workers",
)
# A sweep over a user's script, which itself forwards the signal to the running trials.
SCRIPT_SWEEP = Child(
    "the sweep",
    "the running scripts get SIGTERM and have 40 s to save and exit",
    "the same command resumes the sweep",
    _TO_TRAINER,
)
