"""The base of `wisv-full` and `wisv-selective`: a decision head judges drafts (wisv §III-A).

The device drafts its argmax, as under `greedy`. By one pass the edge finds the mismatches: drafts
that are not the target's argmax. For each mismatch its decision head reads both models' hidden
states at that token, and the link's state, which the device measured before the request. If the
link changes later, a window brings the new state in one more frame; it holds from this window on.
The head forgives a mismatch, and the draft stays, or rejects it. The target's argmax replaces the
first rejected draft. The two protocols differ in how the device's states reach the edge.
"""

import math
import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Protocol

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, UnsupportedError
from pilotfish.base.settings import setting
from pilotfish.speculation.agreement import accept_forgiven, mismatches
from pilotfish.speculation.channel import Channel
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.tree import Tree
from pilotfish.wire.codecs.hidden import (
    HIDDEN_FORMATS,
    HiddenFormat,
    decode_hidden,
    encode_hidden,
    hidden_bytes,
)
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols.options import ProtocolOptions, RoundCounter
from pilotfish.wire.protocols.protocol import (
    Decision,
    Draft,
    DrawKey,
    SamplingParams,
    SpeculationProtocol,
    StatesNeeded,
    StatesReader,
    TokenCounts,
)

if TYPE_CHECKING:
    from typing_extensions import Self

# Mismatches per drafted token, assumed before a measurement. With SmolLM2-135M as the drafter of
# Qwen2.5-Coder-1.5B the rate is 34 % up to the first rejection, and 44 % after it.
MISMATCH_RATE = 0.4
# Thresholds at which the states do not matter: 0 rejects every mismatch, 1 rejects none.
CERTAIN_THRESHOLDS = (0.0, 1.0)
# frame of the link's state: rtt_s, up_bps, down_bps, loss; NaN for an unknown value
_LINK = struct.Struct("<4d")
FORGIVEN = RoundCounter(
    name="forgiven",
    help="Accepted draft tokens that differ from the target's choice and that the decision head "
    "forgave.",
    is_lossy_gain=True,
    column_since=2,
)


class JudgingOptions(ProtocolOptions, frozen=True):
    """The head's threshold, and the format of the drafter's states."""

    threshold: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        setting(
            "wisv: reject a mismatch if the edge's decision head gives it more than this "
            "probability of harm; 0: reject all, 1: reject none (default: the edge's value)",
            metavar="ρ",
        ),
    ] = None
    hidden: Annotated[
        HiddenFormat, setting("wisv: format of the hidden states that the device sends")
    ] = HIDDEN_FORMATS[0]


class BoundDecisionHead(Protocol):
    """A decision head for one request, with its link and threshold (wisv, equation 27)."""

    @property
    def width(self) -> int:
        """The width d of the drafter's states."""

    @property
    def outcome(self) -> bool | None:
        """Whether every mismatch is rejected, if no state can change it; None: states decide."""

    def with_channel(self, channel: Channel) -> "Self":
        """Return the same head and threshold for another state of the link."""

    def __call__(
        self, drafter: Floats, target: Floats, tokens: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Decide which of m mismatches to reject, bool [m].

        drafter, target: f32 [m, d] each. tokens: i64 [m, 2], the drafter's and the target's token.
        """


@dataclass(frozen=True, eq=False)
class JudgedDraft(Draft):
    """A chain with the drafter's hidden states.

    states: f32 [γ, d], one for each token; None: some are missing. reader: on the device, a
    function that reads states on demand. channel: state of the link, for this window and later
    ones; None: the last one still holds.
    """

    states: Floats | None = None
    reader: StatesReader | None = None
    channel: Channel | None = None

    def read_states(self, at: NDArray[np.int64]) -> Floats:
        """Return the states f32 [m, d] at these tokens, i64 [m], numbered from 0."""
        if self.states is not None:
            return self.states[at]
        assert self.reader is not None
        return self.reader(at)


class JudgedProtocol(SpeculationProtocol[JudgedDraft]):
    """The device's and the edge's half, without the transfer of states.

    head: the edge's decision head. The device chooses the format of the states; the edge infers it
    from the frame's length.
    """

    Options = JudgingOptions
    counters = (FORGIVEN,)
    greedy_only = True
    lossless = False
    # relative to the acceptance of dsd at temperature 0; with the head's own threshold, over four
    # links
    relative_acceptance = 1.07
    family = "judged"
    requires = "decision head"
    decides_by_link = True

    def __init__(self, options: ProtocolOptions | None = None) -> None:
        super().__init__(options)
        assert isinstance(self.options, JudgingOptions)
        self.form = self.options.hidden
        self.head: BoundDecisionHead | None = None

    def with_resource(self, resource: BoundDecisionHead) -> "Self":
        """Return this protocol with a decision head."""
        other = self.with_options(self.options)
        other.head = resource
        return other

    @property
    def needs_states(self) -> bool:
        """Whether states can change a decision, as far as the request's threshold tells."""
        assert isinstance(self.options, JudgingOptions)
        return self.options.threshold not in CERTAIN_THRESHOLDS

    # The device's half

    def draw(self, logits: Floats, params: SamplingParams, key: DrawKey) -> tuple[list[int], None]:
        """Return the drafter's argmax."""
        return [int(logits.argmax())], None

    def make_draft(self, tree: Tree, rows: Sequence[None]) -> JudgedDraft:
        """Make a draft of ids; `attach_states` adds the states."""
        return JudgedDraft(tree.ids)

    def attach_states(self, draft: JudgedDraft, states: StatesReader) -> JudgedDraft:
        """Return the draft with a reader of the drafter's states."""
        return replace(draft, reader=states)

    def attach_channel(self, draft: JudgedDraft, channel: Channel) -> JudgedDraft:
        """Return the draft with a new state of the link."""
        return replace(draft, channel=channel)

    def encode_channel(self, draft: JudgedDraft) -> list[Buffer]:
        """Encode the draft's state of the link: one frame, or none."""
        link = draft.channel
        if link is None:
            return []
        values = (link.rtt_s, link.up_bps, link.down_bps, link.loss)
        return [_LINK.pack(*(math.nan if value is None else value for value in values))]

    def encode_hidden_frame(self, draft: JudgedDraft, at: NDArray[np.int64]) -> Buffer:
        """Encode the states at these tokens, numbered from 0.

        Raises `UnsupportedError` for states that the format cannot represent.
        """
        try:
            return encode_hidden(draft.read_states(at), self.form)
        except ValueError as error:
            others = [form for form in HIDDEN_FORMATS[:1] if form != self.form]
            way = " or ".join([*(f"send them as {form}," for form in others), "use greedy"])
            raise UnsupportedError(f"{error} For this drafter, {way}.") from error

    # The edge's half

    def count_tokens(self, frames: Sequence[Buffer], vocab_size: int) -> TokenCounts:
        """Count the tokens; one more frame has the link's state."""
        if len(frames) == self.frames + 1 and len(frames[-1]) == _LINK.size:
            frames = frames[:-1]
        return super().count_tokens(frames, vocab_size)

    def decode_channel(self, frames: Sequence[Buffer]) -> Channel | None:
        """Decode the link's state, if these frames have it; raises `MalformedError`."""
        if len(frames) == self.frames:
            return None
        values = [None if math.isnan(value) else value for value in _LINK.unpack(frames[-1])]
        try:
            return Channel(rtt_s=values[0], up_bps=values[1], down_bps=values[2], loss=values[3])
        except ValueError as error:
            raise MalformedError(f"The link's state is unusable: {error}") from error

    def follow(self, draft: JudgedDraft) -> "Self":
        """Return this protocol with the draft's state of the link, if it has one."""
        if draft.channel is None:
            return self
        assert self.head is not None
        return self.with_resource(self.head.with_channel(draft.channel))

    def decode_hidden_frame(self, frame: Buffer, count: int) -> Floats:
        """Decode states f32 [count, d]; raises `MalformedError` for a wrong number or width."""
        assert self.head is not None
        width = self.head.width
        for form in HIDDEN_FORMATS:
            if len(frame) == count * hidden_bytes(width, form):
                return decode_hidden(frame, count, width, form)
        raise MalformedError(
            f"A frame of {len(frame)} bytes does not hold {count} hidden states of width {width}."
        )

    def verify(
        self,
        draft: JudgedDraft,
        logits: Floats,
        params: SamplingParams,
        *,
        round_start: int,
        hidden: Floats | None = None,
    ) -> Decision | StatesNeeded:
        """Accept a window without mismatches; otherwise let the head judge the mismatches."""
        assert hidden is not None
        choices: NDArray[np.int64] = logits.argmax(1)
        at = mismatches(draft.ids, choices)
        if len(at) == 0:
            return Decision(len(draft.ids), int(choices[-1]), notes=(0,))
        forbidden = logits[at, draft.ids[at]] == -np.inf
        # row 0 of `hidden` is the root's
        needed = StatesNeeded(at, choices, hidden[at + 1], forbidden)
        assert self.head is not None
        if self.head.outcome is not None:
            return self.decide_by_rejections(draft, needed, np.full(len(at), self.head.outcome))
        return self.decide(draft, needed)

    @abstractmethod
    def decide(self, draft: JudgedDraft, needed: StatesNeeded) -> Decision | StatesNeeded:
        """Decide by the drafter's states, or request them."""

    def decide_by_states(
        self, draft: JudgedDraft, needed: StatesNeeded, states: Floats
    ) -> Decision:
        """Decide by the drafter's states f32 [m, d] at the mismatches."""
        assert self.head is not None
        # i64 [m, 2]
        tokens = np.stack([draft.ids[needed.at].astype(np.int64), needed.choices[needed.at]], 1)
        return self.decide_by_rejections(draft, needed, self.head(states, needed.target, tokens))

    def decide_by_rejections(
        self, draft: JudgedDraft, needed: StatesNeeded, rejected: NDArray[np.bool_]
    ) -> Decision:
        """Decide by the head's rejections of the mismatches, bool [m]."""
        rejected = rejected | needed.forbidden
        accepted, token, forgiven = accept_forgiven(draft.ids, needed.choices, rejected)
        return Decision(accepted, token, notes=(forgiven,))
