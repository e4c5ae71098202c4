"""Watch an edge: in each round a probe and an answer by each protocol, until told to stop.

In: the settings of a watch and its run file. Out: rows in the file, and calls to listeners.

Nothing that link, edge, clock or disk do ends a watch. An edge that cannot be used begins an
outage: at the time of the first attempt that failed, or of the last message before, whichever is
later. The outage ends with the first ping that is answered by the same target. Between rounds the
watch pings the edge at least once a minute, and at once if the connection breaks.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from pilotfish.base.errors import (
    EdgeLostError,
    InterruptedGenerationError,
    PilotfishError,
    PromptTooLongError,
)
from pilotfish.base.supervisor import Supervisor
from pilotfish.device_runtime import energy
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.record import Round
from pilotfish.lab.field import matrix
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.configuration import Cell
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.field.measure import Measurement, RoundLog
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run_clock import RunClock
from pilotfish.lab.field.watch.clock import Clock, Stamp, Stamps
from pilotfish.lab.field.watch.listener import WatchListener, WatchRound
from pilotfish.lab.field.watch.probe import measure_link
from pilotfish.lab.field.watch.retention import forget_old
from pilotfish.lab.field.watch.row_buffer import RowBuffer
from pilotfish.lab.field.watch.watch_file import WatchFile, reopen
from pilotfish.lab.field.watch.watch_settings import WatchSettings
from pilotfish.lab.field.watch.watched_edge import UNUSABLE, WatchedEdge

_SLICE_S = 1.0  # longest wait between two looks at the link and at the request to stop
_CHECK_S = 60.0  # longest time between two pings of a usable edge
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # between attempts to reach an unusable edge
_RETRY_DISK_S = 30.0
_ALIVE_S = 60.0  # time between two signs of life in the file during an outage
_TIDY_S = 60.0  # longest time between two deletions of old rows
_STEP_S = 1.0  # smallest setting of the wall clock that listeners hear of
_ROW_S = 300.0  # the watchdog's least time-out: an answer may wait two minutes for a silent edge


class Watching:
    """A running watch. Its thread is the one that calls `run`; any thread may call `stop`."""

    def __init__(
        self,
        settings: WatchSettings,
        opened: WatchFile,
        *,
        clock: Clock,
        listener: WatchListener,
        supervisor: Supervisor | None = None,
        on_fetch: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._settings = settings
        self._schedule = settings.schedule
        self._matrix: MatrixSettings = opened.facts.settings
        self._facts = opened.facts
        self._clock = clock
        self._listener = listener
        self._supervisor = supervisor or Supervisor()
        self._stamp = Stamps(clock, RunClock(opened.facts.starts[-1].moment, clock.boot_s))
        self._log = RoundLog()
        self._edge = WatchedEdge(
            settings, opened.facts.target, on_round=self._on_round, on_fetch=on_fetch
        )
        self.rows = RowBuffer(
            opened.recorder,
            self._reopen,
            on_disk=lambda problem: listener.on_disk(self._stamp(), problem, self.rows.waiting),
        )
        self.rows.check_answer = self._edge.expect_target
        self._rails = energy.rails()
        self._last = opened.last
        self._outage: Outage | None = None
        self._measurement: tuple[Device, Measurement] | None = None
        self._succeeded = self._stamp()  # time of the last sign of life of the edge
        self._silent_since: Stamp | None = None  # the edge was lost in the last probe's transfer
        self._offset_s = self._offset()
        self._pause_s = _FIRST_PAUSE_S
        # times by the run's clock: of the next ping, of the next write of waiting rows, of the next
        # sign of life in the file, and of the next deletion of old rows
        self._check_at_s = self._flush_at_s = self._alive_at_s = self._tidy_at_s = 0.0
        self._told_rows = (0, 0, 0)
        self._stopped = False

    def stop(self) -> None:
        """End the watch after the row that is being measured."""
        self._stopped = True

    def interrupt(self) -> None:
        """End the watch now, whatever it waits for; the row that is being measured is lost."""
        self._stopped = True
        self._edge.interrupt()

    def run(self) -> None:
        """Watch until `stop`, or until the schedule ends."""
        self._supervisor.allow(_ROW_S)
        self._supervisor.ready(f"Watching {self._settings.edge}")
        try:
            while not self._stopped and not self._schedule.is_over(self._stamp.clock_s()):
                self._step()
        finally:
            self._supervisor.stopping("Writing the last rows")
            self._edge.close()
            self.rows.note_alive(*self._stamp())
            self.rows.close()

    def _step(self) -> None:
        """Do what is due: look at the clocks and the edge, measure a round, or wait."""
        self._supervisor.feed()
        self._note_clock_step()
        now_s = self._stamp.clock_s()
        if self.rows.problem and now_s >= self._flush_at_s:
            self._flush_at_s = now_s + _RETRY_DISK_S
            self.rows.note_alive(*self._stamp())  # writes the rows first
        if self._outage is not None and now_s >= self._alive_at_s:
            self._alive_at_s = now_s + _ALIVE_S
            self.rows.note_alive(*self._stamp())
        if now_s >= self._tidy_at_s:
            self._tidy()
        if now_s >= self._check_at_s or (self._outage is None and not self._edge.is_up):
            self._reach()
        number = self._schedule.due(self._stamp.clock_s(), self._last)
        if number is not None and self._outage is None:
            self._round(number)
        else:
            self._wait()
        self._tell_rows()

    def _wait(self) -> None:
        now_s = self._stamp.clock_s()
        left_s = min(_SLICE_S, self._schedule.left_s(now_s), max(0.0, self._check_at_s - now_s))
        self._clock.wait(max(0.0, left_s))

    # The edge

    def _reach(self) -> Measurement | None:
        """Try to reach the edge; return what measures answers there, or None if it is away."""
        with self._losing():
            device = self._edge.reach()
            self._on_reached()
            if self._measurement is None or self._measurement[0] is not device:
                self._measurement = None
                measurement = self._prepare(device)
                if measurement is not None:
                    self._measurement = device, measurement
            return None if self._measurement is None else self._measurement[1]
        return None

    def _prepare(self, device: Device) -> Measurement | None:
        """Return what measures the answers of a new device, after a warm-up of each protocol.

        None: the watch ends, or the edge went away meanwhile, so the warm-up comes again.
        """
        measurement = Measurement(
            device,
            self._log,
            self.rows,
            self._matrix,
            rails=self._rails,
            clock_s=self._stamp.clock_s,
            unix_s=self._clock.unix_s,
        )
        for cell in matrix.warm_up(self._matrix):
            if self._stopped or self._outage is not None:
                return None
            self._answer(measurement, cell, warm_up=True)
        return None if self._outage is not None else measurement

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Begin an outage if the block raises an error that tells that the edge is unusable."""
        began = self._stamp()
        try:
            yield
        except InterruptedGenerationError:
            self._stopped = True
        except PromptTooLongError:
            raise  # no later attempt can succeed
        except PilotfishError as error:
            signs = [self._silent_since or began, self._succeeded]
            if isinstance(error, EdgeLostError) and (silent_s := self._edge.silent_s) is not None:
                signs.append(self._ago(silent_s))
            self._lost(max(signs, key=lambda stamp: stamp.clock_s), str(error))
        else:
            if self._silent_since is None:
                self._note_reply()

    def _lost(self, began: Stamp, reason: str) -> None:
        """Note that the edge cannot be used, and plan the next attempt."""
        if self._outage is None:
            self._pause_s = _FIRST_PAUSE_S
            self._outage = Outage(
                began_unix_s=began.unix_s, began_clock_s=began.clock_s, reason=reason
            )
            self.rows.add_outage(self._outage)
            self._alive_at_s = self._stamp.clock_s() + _ALIVE_S
            self._listener.on_outage(self._outage)
        self._supervisor.status(f"Away: {reason}")
        self._check_at_s = self._stamp.clock_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S, self._settings.every_s)

    def _on_reached(self) -> None:
        """Note that the edge can be used, and plan the next ping."""
        now = self._note_reply()
        self._check_at_s = now.clock_s + _CHECK_S
        target = self._edge.target
        if self._facts.target is None and target is not None:
            software = self._edge.software
            self._facts = replace(self._facts, target=target, edge_software=software)
            self.rows.change_facts(target=target, edge_software=software)
        if self._outage is not None:
            ended = replace(self._outage, ended_unix_s=now.unix_s, ended_clock_s=now.clock_s)
            self._outage = None
            self.rows.add_outage(ended)
            self._listener.on_outage(ended)
        self._supervisor.status(f"Watching {self._settings.edge}")

    def _on_round(self, round_: Round) -> None:
        self._note_reply()
        self._supervisor.feed()
        self._log(round_)

    def _note_reply(self) -> Stamp:
        """Note a sign of life of the edge; return its time."""
        self._succeeded, self._silent_since = self._stamp(), None
        return self._succeeded

    # A round

    def _round(self, number: int) -> None:
        """Measure a round; it ends early if the edge goes away."""
        measurement = self._reach()
        if measurement is None or self._measurement is None or self._outage is not None:
            return
        began, probe = self._stamp(), None
        with self._losing():
            probe = self._probe(self._measurement[0], began)
        if probe is None:
            return
        self._last = number
        self.rows.add_probe(probe)
        self._listener.on_probe(probe)
        result = WatchRound(number=number, stamp=began, probe=probe)
        for cell in self._cells(number):
            if self._stopped or self._outage is not None:
                break
            answer = self._answer(measurement, cell, failed=result.failed)
            if answer is not None:
                result.answers.append(answer)
                self._listener.on_answer(answer)
        self._check_at_s = self._stamp.clock_s() + _CHECK_S
        self._listener.on_round(result)
        self._tidy()

    def _cells(self, number: int) -> list[Cell]:
        """List the answers of a round: the prompts take turns, the protocols in a random order."""
        prompt = number % len(self._matrix.prompts)
        cells = [Cell(each, prompt, number) for each in matrix.configurations(self._matrix)]
        random.Random(f"{self._matrix.seed}/{number}").shuffle(cells)
        return cells

    def _probe(self, device: Device, began: Stamp) -> Probe:
        settings = self._settings.probe
        probe = device.measure(
            lambda link: measure_link(
                link, settings, on_wait=self._on_wait, on_loss=self._on_transfer_lost
            )
        )
        return replace(probe, began_unix_s=began.unix_s, clock_s=began.clock_s)

    def _on_wait(self) -> None:
        """Feed the watchdog while a probe waits; raise if the watch is to end now."""
        self._supervisor.feed()
        self._edge.check()

    def _on_transfer_lost(self, silent_s: float) -> None:
        """Note when the last message came: an outage may have begun then."""
        self._silent_since = self._ago(silent_s)

    def _answer(
        self,
        measurement: Measurement,
        cell: Cell,
        *,
        warm_up: bool = False,
        failed: dict[str, str] | None = None,
    ) -> Answer | None:
        """Measure an answer; None if it fails. failed: takes the error if the edge is usable."""
        with self._losing():
            try:
                return measurement.answer(cell, warm_up=warm_up)
            except PilotfishError as error:
                if isinstance(error, (*UNUSABLE, InterruptedGenerationError)):
                    raise
                if failed is not None:
                    failed[cell.configuration.protocol] = str(error)
        return None

    # Clocks and the file

    def _ago(self, seconds: float) -> Stamp:
        now = self._stamp()
        return Stamp(now.unix_s - seconds, now.clock_s - seconds)

    def _offset(self) -> float:
        return self._clock.unix_s() - self._clock.boot_s()

    def _note_clock_step(self) -> None:
        """Tell listeners if the wall clock was set."""
        offset_s = self._offset()
        by_s = offset_s - self._offset_s
        if abs(by_s) > _STEP_S:
            self._listener.on_clock_step(self._stamp(), by_s)
        self._offset_s = offset_s

    def _tidy(self) -> None:
        """Keep the file bounded: after each round, and during a time without rounds."""
        assert self._facts.watch is not None
        now_s = self._stamp.clock_s()
        self._tidy_at_s = now_s + _TIDY_S
        self.rows.tidy(partial(forget_old, watch=self._facts.watch, clock_s=now_s))

    def _tell_rows(self) -> None:
        """Tell listeners the counts of rows if they have changed."""
        counts = self.rows.written, self.rows.failures, self.rows.dropped
        if counts != self._told_rows:
            self._told_rows = counts
            self._listener.on_rows(*counts, _size(self._settings.out))

    def _reopen(self) -> Recorder:
        return reopen(self._settings.out, self._facts)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
