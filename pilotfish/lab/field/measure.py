"""Measure a run: answer every cell of the matrix once, and record each round.

In: a device, a recorder, the settings of a run. Out: each answer when it is finished.

Before each answer both ends drop the cache of the last answer, which often had the same prompt. So
every answer starts with cold caches.

The time that is spent writing the run file is subtracted from first_token_s, total_s and at_s; no
stage contains this time. Under `stream` it is not subtracted, because tokens arrive while the file
is being written.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypeAlias, cast

from msgspec import Struct

from pilotfish.base.errors import (
    BusyError,
    EdgeLostError,
    EdgeUnreachableError,
    RateLimitedError,
    TooManySessionsError,
)
from pilotfish.base.settings import setting
from pilotfish.bridge import Prompt
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.energy import Meter, Rail
from pilotfish.device_runtime.record import Generation, Round
from pilotfish.emulation.emulator import Emulator
from pilotfish.lab.field import matrix
from pilotfish.lab.field.answer import Answer, AnswerWriter
from pilotfish.lab.field.configuration import Cell, Configuration, has_windows
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.prompts import prompts_setting
from pilotfish.wire.protocols import LOCAL, STREAM
from pilotfish.wire.request import Options

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 8.0
_PASSING = (
    BusyError,
    EdgeLostError,
    EdgeUnreachableError,
    RateLimitedError,
    TooManySessionsError,
)

EdgeKeys: TypeAlias = Annotated[
    Path,
    setting(
        "the folder with device.key and edge.pub; needed beyond loopback",
        form="keys",
        metavar="DIR",
    ),
]


class MeasureSettings(Struct, frozen=True, kw_only=True):
    """Options of ``pilotfish field measure``, except those of the matrix (`MatrixSettings`)."""

    out: Annotated[Path, setting("the run file", metavar="RUN.pilotfish")]
    resume: Annotated[bool, setting("resume the run in the run file, if that file exists")] = False
    draft: (
        Annotated[Path, setting("the drafter, as for `device run`", metavar="MODEL|text")] | None
    ) = None
    edge: (
        Annotated[
            str,
            setting(
                "the edge's address, tcp://HOST:PORT; not needed for protocol local",
                metavar="ADDRESS",
            ),
        ]
        | None
    ) = None
    keys: EdgeKeys | None = None
    prompts: Annotated[Path, prompts_setting("'prompt' or 'question'")] | None = None
    note: (
        Annotated[str, setting("a remark on the run; the report shows it", metavar="TEXT")] | None
    ) = None
    name: (
        Annotated[str, setting("the device's name in reports; default: the host's", metavar="NAME")]
        | None
    ) = None
    patience_s: Annotated[
        float,
        setting("seconds to wait for an edge that was lost", gt=0, metavar="SECONDS"),
    ] = 60.0


class RoundLog:
    """Writes a device's rounds to the run file; pass it to `Device` as ``on_round``.

    recording_s: seconds spent on recording since the answer began. first_token_s: seconds from the
    answer's begin to its first round. total_s: seconds from its begin to its end. first_token_s and
    total_s do not include the time for recording.
    """

    def __init__(self) -> None:
        self._recorder: AnswerWriter | None = None
        self._answer = 0
        self._number = 0
        self._begun_s = 0.0
        self.recording_s = 0.0
        self.first_token_s = 0.0
        self.total_s = 0.0

    @contextmanager
    def assign(self, recorder: AnswerWriter, answer: int) -> Iterator[None]:
        """Assign the rounds inside the ``with`` block to this answer; ignore all other rounds."""
        self._recorder, self._answer, self._number = recorder, answer, 0
        self.recording_s = self.first_token_s = 0.0
        self._begun_s = time.monotonic()
        try:
            yield
        finally:
            self.total_s = time.monotonic() - self._begun_s - self.recording_s
            self._recorder = None

    def __call__(self, round_: Round) -> None:
        """Record a complete round, if an answer is assigned."""
        if self._recorder is None:
            return
        now_s = time.monotonic()
        at_s = now_s - self._begun_s - self.recording_s
        self.first_token_s = self.first_token_s or at_s
        self._recorder.add_round(self._answer, self._number, at_s, round_)
        self._number += 1
        if round_.protocol != STREAM:
            self.recording_s += time.monotonic() - now_s


class Measurement:
    """Measures a device, and records its answers in a run file.

    emulator: the emulated link between the device and its edge. clock_s: returns the time by the
    run's clock (`field.run_clock`). unix_s: returns that of the wall clock. notify: callback with a
    sentence about each error that is followed by another attempt.
    """

    def __init__(
        self,
        device: Device,
        log: RoundLog,
        recorder: AnswerWriter,
        settings: MatrixSettings,
        *,
        emulator: Emulator | None = None,
        rails: Sequence[Rail] = (),
        patience_s: float = 60.0,
        clock_s: Callable[[], float] = lambda: 0.0,
        unix_s: Callable[[], float] = time.time,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._device = device
        self._log = log
        self._recorder = recorder
        self._settings = settings
        self._emulator = emulator
        self._rails = rails
        self._patience_s = patience_s
        self._clock_s = clock_s
        self._unix_s = unix_s
        self._notify = notify
        self._prompts = [device.prompt(prompt) for prompt in settings.prompts]

    def answers(self, cells: Iterable[Cell], *, warm_up: bool = False) -> Iterator[Answer]:
        """Make the answers of these cells; yield each one after it is recorded.

        If the edge is lost, retry for patience_s seconds with growing pauses, then raise the error.
        The file keeps the interrupted answer, marked as unfinished.
        """
        for cell in cells:
            yield self._answer_with_retries(cell, warm_up)

    def _answer_with_retries(self, cell: Cell, warm_up: bool) -> Answer:
        give_up_s: float | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self.answer(cell, warm_up=warm_up)
            except _PASSING as error:
                now_s = time.monotonic()
                give_up_s = give_up_s or now_s + self._patience_s
                left_s = give_up_s - now_s
                if left_s <= 0.0:
                    raise
                self._notify(f"{error} Trying again in {min(pause_s, left_s):.3g} s.")
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def answer(self, cell: Cell, *, warm_up: bool = False) -> Answer:
        """Make and record one answer; return it without the times of its rounds (``at_s``).

        After an error the file keeps the answer, marked as unfinished.
        """
        (protocol, window, point), prompt, repeat = cell
        settings, recorder, log = self._settings, self._recorder, self._log
        question = self._prompts[prompt]
        self._emulate(cell.configuration)
        self._clear_caches(question)
        options = {
            **matrix.keywords(settings, cell.configuration),
            "seed": settings.seed + repeat,
        }
        answer = Answer(
            id=0,
            protocol=protocol,
            window=window,
            prompt=prompt,
            repeat=repeat,
            warm_up=warm_up,
            temperature=options["temperature"],
            seed=settings.seed + repeat,
            point=point,
            started_unix_s=self._unix_s(),
            clock_s=self._clock_s(),
            finished=False,
        )
        answer_id = recorder.begin(answer)
        try:
            with Meter(self._rails) as meter, log.assign(recorder, answer_id):
                generation = self._device.generate(question, **cast(Options, options))
        except BaseException as error:
            with suppress(OSError):  # the error may be a failing disk, so this write may fail, too
                recorder.end(answer_id, error=str(error) or type(error).__name__)
            raise
        columns = _columns(generation, log) | {"energy_j": meter.joules}
        recorder.add_rtts(answer_id, generation.rtts)
        recorder.end(answer_id, finished=True, **columns)
        finished = {"id": answer_id, "finished": True, "rounds": generation.rounds}
        return Answer(**{**vars(answer), **columns, **finished})

    def _emulate(self, configuration: Configuration) -> None:
        """Give the emulated link the conditions of this configuration.

        A change takes a new connection: what the device measured of the old link ends with the old
        one. The device makes it itself, since it would report a connection that is cut as lost.
        """
        wanted = matrix.conditions(self._settings, configuration)
        link = self._emulator
        if link is not None and wanted is not None and wanted != link.conditions:
            link.set(wanted)
            self._device.reconnect()

    def _clear_caches(self, prompt: Prompt) -> None:
        """Clear the caches of both ends, by generating one token after a different prompt."""
        other = (int(prompt.ids[0]) + 1) % self._device.tokenizer.vocab_size
        protocol = LOCAL if self._device.welcome is None else STREAM
        self._device.generate([other], protocol=protocol, max_tokens=1, seed=0)


def _columns(generation: Generation, log: RoundLog) -> dict[str, Any]:
    """Return the fields of `Answer` that a generation and its log determine, by name."""
    drafted = has_windows(generation.protocol)
    windows = [round_.window for round_ in generation.rounds if drafted]
    return {
        "protocol_used": generation.protocol,
        "window_used": max(windows, default=0) or None,
        "prompt_tokens": generation.prompt_tokens,
        "tokens": len(generation.tokens),
        "finish_reason": generation.finish_reason,
        "first_token_s": log.first_token_s,
        "total_s": log.total_s,
        "recording_s": log.recording_s,
        "link": generation.link,
        "choice": generation.choice,
        "pings": generation.probing.pings,
        "probe_uplink_bytes": generation.probing.uplink_bytes,
        "probe_downlink_bytes": generation.probing.downlink_bytes,
    }
