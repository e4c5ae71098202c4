"""Keep the rows of a watch in memory until the disk has taken them.

In: answers, probes and outages, as `Recorder` takes them. Out: the run file. An answer is written
when it has ended, in one transaction. If a write fails (a full, removed or broken disk), the rows
stay in memory, and a later `flush` opens the file again and writes them. An outage is written when
it begins, and its end when it has ended.
"""

import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from pilotfish.base.errors import RunFileError
from pilotfish.device_runtime.record import Round, RttSample
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.recording import Recorder

_Row: TypeAlias = Callable[[Recorder], None]

# Rows in memory; older ones are dropped. A round of a probe and three answers has 4 rows, so these
# are 1,024 rounds: three and a half days at one round every five minutes.
MOST_ROWS = 4096
_LARGEST_PORTION = 256  # rows of one transaction, whose sync takes most of its time


class _UnwrittenAnswer:
    """An answer that has begun."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.rounds: list[tuple[int, float, Round]] = []
        self.rtts: list[RttSample] = []
        self.columns: dict[str, Any] = {}

    def __call__(self, recorder: Recorder) -> None:
        """Write the whole answer."""
        number = recorder.begin(self._answer)
        for round_ in self.rounds:
            recorder.add_round(number, *round_)
        recorder.add_rtts(number, self.rtts)
        recorder.end(number, **self.columns)


class _UnwrittenOutage:
    """An outage that has begun, or has ended."""

    def __init__(self, outage: Outage) -> None:
        self.outage = outage

    def __call__(self, recorder: Recorder) -> None:
        """Write the outage, or its end if the file has its begin."""
        recorder.add_outage(self.outage)

    def names(self, outage: Outage | None) -> bool:
        """Return whether this is the same outage, at its begin or its end."""
        return outage is not None and outage.began_clock_s == self.outage.began_clock_s


class _UnwrittenFacts:
    """Facts of the run that have changed."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __call__(self, recorder: Recorder) -> None:
        """Write the facts."""
        recorder.change_facts(**self._values)


class RowBuffer:
    """The rows that the disk does not have yet; takes the rows of answers like a `Recorder`.

    reopen: opens the file again after a write has failed. on_disk: called with the problem when a
    write fails for the first time, and with "" when all rows are on the disk again. check_answer:
    called before a finished answer is kept; if it raises an error, the answer is not kept.
    """

    def __init__(
        self,
        recorder: Recorder,
        reopen: Callable[[], Recorder],
        *,
        on_disk: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self._recorder: Recorder | None = recorder
        self._reopen = reopen
        self._on_disk = on_disk
        self._open: Outage | None = None  # the file has its begin, but not its end
        self._alive: dict[str, float] | None = None
        self._rows: deque[_Row] = deque()
        self._portion = 1  # number of rows of the next transaction
        self._running: _UnwrittenAnswer | None = None
        self.check_answer: Callable[[], None] = lambda: None
        self.problem = ""
        self.written = self.failures = self.dropped = 0

    @property
    def waiting(self) -> int:
        """Number of rows in memory."""
        return len(self._rows)

    def begin(self, answer: Answer) -> int:
        """Begin an answer; return 0, since the file will give the id."""
        self._running = _UnwrittenAnswer(answer)
        return 0

    def add_round(self, answer: int, number: int, at_s: float, round_: Round) -> None:
        """Take a round of the answer that has begun."""
        assert self._running is not None
        self._running.rounds.append((number, at_s, round_))

    def add_rtts(self, answer: int, rtts: Sequence[RttSample]) -> None:
        """Take the samples of the RTT of the answer that has begun."""
        assert self._running is not None
        self._running.rtts = list(rtts)

    def end(self, answer: int, **columns: Any) -> None:
        """Take the end of the answer that has begun, and write the answer."""
        running, self._running = self._running, None
        assert running is not None
        if columns.get("finished"):
            self.check_answer()
        running.columns = columns
        self._add(running)

    def add_probe(self, probe: Probe) -> None:
        """Write a probe."""
        self._add(lambda recorder: recorder.add_probe(probe))

    def add_outage(self, outage: Outage) -> None:
        """Write an outage when it begins, and again when it has ended."""
        for row in self._rows:
            if isinstance(row, _UnwrittenOutage) and row.names(outage):
                row.outage = outage  # the begin still waits, so the outage is written whole
                self.flush()
                return
        self._add(_UnwrittenOutage(outage))

    def change_facts(self, **values: Any) -> None:
        """Write facts of the run."""
        self._add(_UnwrittenFacts(values))

    def note_alive(self, unix_s: float, clock_s: float) -> None:
        """Write that the watch runs at this time, by both clocks; only the newest time is kept."""
        self._alive = {"alive_unix_s": unix_s, "alive_clock_s": clock_s}
        self.flush()

    def _add(self, row: _Row) -> None:
        self._rows.append(row)
        if len(self._rows) > MOST_ROWS:
            at = next(at for at, each in enumerate(self._rows) if not self._must_stay(each))
            del self._rows[at]
            self.dropped += 1
        self.flush()

    def _must_stay(self, row: _Row) -> bool:
        """Return whether a row may not be dropped.

        These are facts, and the end of an outage whose begin is in the file. There are at most two
        of them, since the facts change once, and a file has one outage without an end.
        """
        is_end = isinstance(row, _UnwrittenOutage) and row.names(self._open)
        return is_end or isinstance(row, _UnwrittenFacts)

    def flush(self) -> None:
        """Try to write all rows that are in memory."""
        while self._rows:
            rows = list(islice(self._rows, self._portion))
            if not self._try(partial(self._write, rows)):
                self._portion = 1  # a disk that is almost full takes one row
                return
            self._portion = min(2 * self._portion, _LARGEST_PORTION)
            for row in rows:
                self._rows.popleft()
                if isinstance(row, _UnwrittenOutage):
                    self._open = row.outage if row.outage.ended_clock_s is None else None
            self.written += len(rows)
        self._portion = 1
        if self._alive is not None:
            if not self._try(partial(self._write, [_UnwrittenFacts(self._alive)])):
                return
            self._alive = None
        if self.problem:
            self.problem = ""
            self._on_disk("")

    def tidy(self, delete: Callable[[Recorder], None]) -> None:
        """Delete old rows from the file by this function, unless rows wait for the disk."""
        if not self._rows and self._recorder is not None:
            self._try(partial(delete, self._recorder))

    def _write(self, rows: Sequence[_Row]) -> None:
        """Write rows in one transaction."""
        if self._recorder is not None and not self._recorder.in_place:
            raise OSError(f"{self._recorder.path} was moved or deleted.")
        was_closed = self._recorder is None
        if self._recorder is None:
            self._recorder = self._reopen()
        with self._recorder.together():
            if was_closed and self._open is not None:
                self._recorder.add_outage(self._open)  # the file may be a new one
            for row in rows:
                row(self._recorder)

    def _try(self, act: Callable[[], None]) -> bool:
        """Return whether it worked; after a failure the file is opened again by the next try."""
        try:
            act()
        except (OSError, RunFileError, sqlite3.Error) as error:
            self.failures += 1
            self._close()
            if not self.problem:
                refused = isinstance(error, sqlite3.Error)
                self.problem = f"A row cannot be written: {error}." if refused else str(error)
                self._on_disk(self.problem)
            return False
        return True

    def _close(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def close(self) -> None:
        """Try for a last time to write all rows, and close the file."""
        self.flush()
        self._close()
