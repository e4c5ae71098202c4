"""One generation at the edge: what its `Begin` sets, and its state from then on.

A new `Begin` replaces the `Generation` of its session whole, so nothing of the previous answer is
left in the next one. The session (`edge_runtime/sessions.py`) holds what outlives a generation. The
classes here hold state only: `edge_runtime/windows.py` and `edge_runtime/streams.py` serve windows
and streams. Used by the serving loop only.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from pilotfish.edge_runtime.answer_trace import AnswerTrace
from pilotfish.edge_runtime.grammar_compiler import Compilation
from pilotfish.edge_runtime.hint_sources import HintSources
from pilotfish.edge_runtime.reply_logprobs import Logprobs, PromptLogprobs
from pilotfish.edge_runtime.scheduler import Job
from pilotfish.speculation.logits_options import LogitsProcessor
from pilotfish.wire.messages import Begin, Buffer, DeviceMessage, StatesRequest, Verdict
from pilotfish.wire.protocols import Draft, SamplingParams, SpeculationProtocol, StatesNeeded
from pilotfish.wire.protocols.protocol import Ids
from pilotfish.wire.transport import Envelope

# message, its envelope, and its time of arrival (monotonic clock, ns)
ReceivedMessage = tuple[DeviceMessage, Envelope, int]


@dataclass(slots=True)
class WindowState:
    """State of a window: under way or, if it has a ``verdict``, the last answered window."""

    client: bytes
    start: int  # position of the window's first token, after the pending token if there is one
    frames: Sequence[Buffer]  # frames as received; empty after the verdict
    draft: Draft  # after the verdict, without distributions
    received_ns: int
    verdict: Verdict | None = None
    reply_frames: Sequence[Buffer] = ()  # frames of the verdict, or of the states request before it
    states_request: StatesRequest | None = None  # request for hidden states, sent to the device
    states_needed: StatesNeeded | None = None  # description of the states that the decision needs
    _checksums: Sequence[tuple[int, int]] = ()  # after the verdict: checksums of the frames

    @property
    def committed_before(self) -> int:
        """Number of committed tokens before the window."""
        return self.start - len(self.draft.pending)

    def set_verdict(self, verdict: Verdict, answer: Sequence[Buffer]) -> None:
        """Store the verdict, and drop the distributions, which may take megabytes."""
        self._checksums = _checksums(self.frames)
        self.verdict, self.reply_frames, self.frames = verdict, answer, ()
        self.draft = Draft(self.draft.ids, pending=self.draft.pending)

    def matches(self, frames: Sequence[Buffer]) -> bool:
        """Return whether a window with these frames is a retry of this window."""
        if self.verdict is not None:
            return _checksums(frames) == self._checksums
        return [*map(bytes, frames)] == [*map(bytes, self.frames)]


def _checksums(frames: Sequence[Buffer]) -> list[tuple[int, int]]:
    """Return checksums that recognise repeated frames; a forged frame harms only its sender."""
    return [(len(frame), crc32(frame)) for frame in frames]


@dataclass(slots=True)
class Stream:
    """Stream under way; ``remaining``: number of requested tokens that are not computed yet."""

    client: bytes
    remaining: int
    received_ns: int


@dataclass(eq=False, slots=True)
class Generation:
    """Settings and state of one generation.

    number: the device's number of the generation; it grows from one generation of a session to the
    next. protocol: has the options and resources of the request; None: the generation is a
    `stream`.
    """

    number: int
    sampling_params: SamplingParams
    protocol: SpeculationProtocol[Any] | None
    logits_processor: LogitsProcessor | None  # None: logits are not changed
    logprobs: Logprobs | None  # log-probabilities of the answer's tokens, if requested
    prompt_logprobs: PromptLogprobs | None  # log-probabilities of the prompt, if requested
    hints: HintSources | None  # sources of hints, only under protocol `ahead`
    verify_cpu_s: float  # processor seconds of the last verification, or of the grammar
    window_state: WindowState | None = None
    awaits_pending: bool = False  # whether the next window must bring a pending token (`dssd`)
    stream: Stream | None = None
    ended: bool = False  # whether the stream has reached an end token
    jobs: list[Job] = field(default_factory=list)  # jobs in the scheduler
    trace: AnswerTrace | None = None  # None: the edge makes no traces

    @property
    def undecided(self) -> bool:
        """Whether a window waits for its verdict (for a pass, or for states from the device)."""
        return self.window_state is not None and self.window_state.verdict is None

    @property
    def temperature(self) -> float:
        """Temperature of the target's distribution."""
        return self.sampling_params.sampling.temperature

    def stop(self) -> None:
        """Cancel all work under way: jobs, stream, and undecided window."""
        for job in self.jobs:
            job.cancelled = True
        self.jobs.clear()
        self.stream = None
        if self.hints is not None:
            self.hints.set_requested_end(0)
        if self.undecided:
            self.window_state = None


@dataclass(eq=False, slots=True)
class GenerationSpec:
    """Generation that a device requests: its `Begin`, checked, with the decoded parts.

    new: tokens after the session's kept tokens, u32 [n]. prediction: ids that the answer is
    expected to have, u32 [m]. protocol: has the options and resources of the request; None: the
    generation is a `stream`. received_ns: when the `Begin` was read (monotonic).
    """

    begin: Begin
    new: Ids
    prediction: Ids
    sampling_params: SamplingParams
    protocol: SpeculationProtocol[Any] | None
    received_ns: int = field(default_factory=time.monotonic_ns)


@dataclass(eq=False, slots=True)
class QueuedGeneration:
    """Generation that waits for its grammar, with the messages that wait for it.

    message: the latest window, states or pull. hints: the latest hints.
    """

    spec: GenerationSpec
    envelope: Envelope
    compilation: Compilation
    message: ReceivedMessage | None = None
    hints: list[ReceivedMessage] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Number of the generation."""
        return self.spec.begin.generation

    @property
    def messages(self) -> list[ReceivedMessage]:
        """All waiting messages, in the order in which they will be served."""
        return self.hints if self.message is None else [self.message, *self.hints]

    @property
    def size(self) -> int:
        """Size of all waiting messages, bytes."""
        return sum(envelope.size for _, envelope, _ in self.messages)
