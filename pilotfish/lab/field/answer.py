"""An answer of a run with its rounds, and what takes the rows of answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pilotfish.device_runtime.record import Choice, Round, RttSample, acceptance
from pilotfish.lab.field.axes import Point
from pilotfish.lab.field.configuration import Cell, Configuration, WindowSetting
from pilotfish.wire.link.state import LinkState


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer of the matrix. Its times do not include the time for recording.

    protocol, window: the requested configuration. protocol_used, window_used: the configuration
    that was used; under ``auto`` it differs from the requested one. link: state of the link when
    the answer began. choice: the protocol and window that ``auto`` chose for the answer. at_s[i]:
    seconds from the start of the answer to the commit of round i. The first round includes reading
    the prompt, because every answer starts with cold caches. recording_s: seconds spent writing the
    run file. clock_s: the begin by the run's clock
    (`run_clock`); None in old files. rtts: samples of the RTT during the answer.
    """

    id: int
    protocol: str
    window: WindowSetting | None
    prompt: int
    repeat: int
    warm_up: bool
    temperature: float
    seed: int
    started_unix_s: float
    finished: bool
    error: str | None = None  # message of the error that ended the answer, if it could be recorded
    protocol_used: str | None = None
    window_used: WindowSetting | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    finish_reason: str | None = None
    first_token_s: float = 0.0
    total_s: float = 0.0
    recording_s: float = 0.0
    link: LinkState | None = None
    choice: Choice | None = None
    probe_uplink_bytes: int = 0
    probe_downlink_bytes: int = 0
    pings: int = 0
    energy_j: float | None = None
    point: Point = ()
    clock_s: float | None = None
    rtts: list[RttSample] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)

    @property
    def configuration(self) -> Configuration:
        """The requested configuration."""
        return Configuration.of(self.protocol, self.window, self.point)

    @property
    def cell(self) -> Cell:
        """The cell of the matrix to which the answer belongs."""
        return Cell(self.configuration, self.prompt, self.repeat)

    @property
    def acceptance(self) -> float:
        """The acceptance α of the answer's rounds (`device_runtime.record.acceptance`)."""
        return acceptance(self.rounds)


class AnswerWriter(Protocol):
    """Takes the rows of answers; see the methods of `Recorder`."""

    def begin(self, answer: Answer) -> int:
        """Take the begin of an answer; return its id."""
        ...

    def add_round(self, answer: int, number: int, at_s: float, round_: Round) -> None:
        """Take a round of this answer."""
        ...

    def add_rtts(self, answer: int, rtts: Sequence[RttSample]) -> None:
        """Take the samples of the RTT of this answer."""
        ...

    def end(self, answer: int, **columns: Any) -> None:
        """Take the end of this answer."""
        ...
