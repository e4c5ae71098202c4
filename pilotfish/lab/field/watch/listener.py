"""What a watch tells while it runs: to a terminal, a journal, and metrics."""

from dataclasses import dataclass, field

from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.watch.clock import Stamp


@dataclass(frozen=True, kw_only=True)
class WatchRound:
    """A round that has ended. number: the round by the schedule. failed: by protocol, the error of
    an answer that was not finished although the edge could be used.
    """

    number: int
    stamp: Stamp
    probe: Probe
    answers: list[Answer] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class WatchListener:
    """Base of all listeners; each method is called when the event has happened.

    All calls come from the thread of the watch.
    """

    def on_probe(self, probe: Probe) -> None:
        """Take a probe."""

    def on_answer(self, answer: Answer) -> None:
        """Take a finished answer; warm-ups are not told."""

    def on_round(self, round_: WatchRound) -> None:
        """Take a round."""

    def on_outage(self, outage: Outage) -> None:
        """Take an outage when it begins, and again when it has ended."""

    def on_clock_step(self, stamp: Stamp, by_s: float) -> None:
        """Take a setting of the wall clock by so many seconds, by a person or by NTP."""

    def on_disk(self, stamp: Stamp, problem: str, waiting: int) -> None:
        """Take the problem when a write fails first; "": all rows are on the disk again.

        waiting: rows in memory.
        """

    def on_rows(self, written: int, failures: int, dropped: int, file_bytes: int) -> None:
        """Take counts since the start when they have changed: rows on the disk, failed writes,
        rows that were lost because too many waited. file_bytes: size of the run file.
        """


class Listeners(WatchListener):
    """Tells several listeners."""

    def __init__(self, *listeners: WatchListener) -> None:
        self._listeners = listeners

    def on_probe(self, probe: Probe) -> None:  # noqa: D102  # as in the base
        for listener in self._listeners:
            listener.on_probe(probe)

    def on_answer(self, answer: Answer) -> None:  # noqa: D102  # as in the base
        for listener in self._listeners:
            listener.on_answer(answer)

    def on_round(self, round_: WatchRound) -> None:  # noqa: D102  # as in the base
        for listener in self._listeners:
            listener.on_round(round_)

    def on_outage(self, outage: Outage) -> None:  # noqa: D102  # as in the base
        for listener in self._listeners:
            listener.on_outage(outage)

    def on_clock_step(self, stamp: Stamp, by_s: float) -> None:  # noqa: D102  # as in the base
        for listener in self._listeners:
            listener.on_clock_step(stamp, by_s)

    def on_disk(self, stamp: Stamp, problem: str, waiting: int) -> None:  # noqa: D102  # as in the base
        for listener in self._listeners:
            listener.on_disk(stamp, problem, waiting)

    def on_rows(self, written: int, failures: int, dropped: int, file_bytes: int) -> None:  # noqa: D102  # as in the base
        for listener in self._listeners:
            listener.on_rows(written, failures, dropped, file_bytes)
