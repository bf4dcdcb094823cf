"""Decide when a supervised child gets a signal, and when it is killed."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from entrypoint.launch.children import Child


class Fault(NamedTuple):
    """Why the supervisor stops the child, and its own exit code then."""

    what: str
    code: int


class Send(NamedTuple):
    """Send `number` to the child, and then print `text`."""

    number: signal.Signals
    text: str


class Kill(NamedTuple):
    """Kill the child and its descendants, print `text`, and exit with `code`."""

    code: int
    text: str


@dataclass
class Stop:
    """How far the stop of a child has come.

    | state | the child has got | next |
    |---|---|---|
    | runs | nothing | a signal or a fault: send the first signal of the child |
    | asked | some of its signals | another signal: send the next one; the time is up: kill |
    | asked for the last time | all of them | another signal, or the time is up: kill |

    Attributes:
        sent: The signals that the child has got.
    """

    kind: Child
    budget_s: float
    sent: list[signal.Signals] = field(default_factory=list)
    _signals: tuple[signal.Signals, ...] = ()
    _heard: int = 0  # signals to the supervisor before the child got its first one
    _deadline_s: float = 0.0

    def next(
        self, received: Sequence[int], fault: Fault | None, now_s: float
    ) -> Send | Kill | None:
        """Return what to do, or None to wait.

        `received` has all signals to the supervisor so far, and `now_s` is a time that never jumps.
        """
        if not (received or fault):
            return None
        if not self.sent:
            self._signals = self.kind.signals(received[0] if received else signal.SIGTERM)
            self._heard, self._deadline_s = len(received), now_s + self.budget_s
        again = len(received) - self._heard
        if len(self.sent) <= again < len(self._signals):
            return self._send(again, received, fault)
        if again >= len(self._signals):
            ordinal = ("first", "second", "third")[min(len(received), 3) - 1]
            return self._kill(f"{ordinal} signal", 128 + received[-1], fault)
        if now_s > self._deadline_s:
            why = f"not stopped {self.budget_s:.0f} s after the signal"
            return self._kill(why, 128 + (received[-1] if again else signal.SIGKILL), fault)
        return None

    def _send(self, again: int, received: Sequence[int], fault: Fault | None) -> Send:
        number = self._signals[again]
        self.sent.append(number)
        last = again + 1 == len(self._signals)
        once_more = "stop" if last else f"send {self._signals[again + 1].name}"
        stopping = self.kind.stopping.format(signal=number.name)
        cause, what = fault.what if fault else "", "a signal"
        if received:  # a later signal may have arrived meanwhile
            cause = f"{signal.Signals(received[self._heard + again - 1]).name} received"
            what = "it again"
        return Send(number, f"{cause}: {stopping} (send {what} to {once_more} at once)")

    def _kill(self, why: str, code: int, fault: Fault | None) -> Kill:
        return Kill(fault.code if fault else code, f"{why}: killed; {self.kind.again}")
