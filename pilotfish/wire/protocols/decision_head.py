"""What `wisv-full` and `wisv-selective` share: drafts that a decision head judges (wisv §III-A).

The device drafts its argmax, as under `greedy`; the edge finds the mismatches by one pass, and for
each of them its head looks at both models' hidden states at the mismatched token and at the link as
the device measured it before the request. What it forgives stays; the first one that it rejects is
replaced by the target's argmax. How the device's states get to the edge is where the two differ.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, UnsupportedError
from pilotfish.base.settings import setting
from pilotfish.speculation.agreement import accept_forgiven, mismatches
from pilotfish.speculation.distributions import Floats, Sampling
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
    States,
    StatesNeeded,
)

if TYPE_CHECKING:
    from typing_extensions import Self

# Of the tokens of a window, those that the target would say otherwise, expected before a round was
# counted. SmolLM2-135M for Qwen2.5-Coder-1.5B: 34 % up to the first rejection, 44 % behind it.
MISMATCHED = 0.4
FORGIVEN = RoundCounter(
    name="forgiven",
    help="Accepted tokens that the target would have said otherwise, by its decision head.",
    is_lossy_gain=True,
    column_since=2,
)


class JudgingOptions(ProtocolOptions, frozen=True):
    """How strictly mismatches are judged, and how the drafter's states are sent."""

    threshold: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        setting(
            "wisv: reject a mismatch that the edge's head finds harmful with more than this "
            "probability; 0: each, 1: none (default: as the edge has it)",
            metavar="ρ",
        ),
    ] = None
    hidden: Annotated[HiddenFormat, setting("wisv: how hidden states are sent")] = HIDDEN_FORMATS[0]


class BoundDecisionHead(Protocol):
    """A decision head, bound to one request's link and threshold (wisv (27))."""

    @property
    def width(self) -> int:
        """d of the drafter's states."""

    def __call__(
        self, drafter: Floats, target: Floats, tokens: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which of m mismatches are to be rejected, bool [m].

        drafter, target: f32 [m, d] each. tokens: i64 [m, 2], the drafter's and the target's.
        """


@dataclass(frozen=True, eq=False)
class JudgedDraft(Draft):
    """A chain, and the drafter's hidden states at its tokens, as far as this end can have them."""

    states: States | None = None


class JudgedProtocol(SpeculationProtocol[JudgedDraft]):
    """Both halves, but for the way of the states. judge: the edge's decision head.

    How states are sent is the device's affair: the frame's length tells the edge.
    """

    Options = JudgingOptions
    counters = (FORGIVEN,)
    lossless = False
    relative_acceptance = (
        1.07  # over dsd's at temperature 0, by the head's own threshold, over four links
    )
    family = "judged"
    requires = "decision head"
    decides_by_link = True

    def __init__(self, options: ProtocolOptions | None = None) -> None:
        super().__init__(options)
        assert isinstance(self.options, JudgingOptions)
        self.form = self.options.hidden
        self.head: BoundDecisionHead | None = None

    def with_resource(self, resource: BoundDecisionHead) -> "Self":
        """The same with a decision head."""
        other = self.with_options(self.options)
        other.head = resource
        return other

    def check(self, target: Sampling, drafter: Sampling | None = None) -> None:
        """Only temperature 0 can be served."""
        for end in (target, drafter or target):
            if not end.greedy:
                raise UnsupportedError(
                    f"Protocol {self.name} decodes at temperature 0, not {end.temperature}."
                )

    # The device's half

    def draw(self, logits: Floats, params: SamplingParams, key: DrawKey) -> tuple[list[int], None]:
        """The drafter's argmax."""
        return [int(logits.argmax())], None

    def make_draft(self, tree: Tree, rows: Sequence[None]) -> JudgedDraft:
        """Ids; the states come by `carry`."""
        return JudgedDraft(tree.ids)

    def attach_states(self, draft: JudgedDraft, states: States) -> JudgedDraft:
        """The draft with the drafter's states."""
        return JudgedDraft(draft.ids, states=states)

    def encode_hidden_frame(self, draft: JudgedDraft, at: NDArray[np.int64]) -> Buffer:
        """The frame of the states at these tokens, numbered from 0.

        `UnsupportedError` for states that the format cannot hold.
        """
        assert draft.states is not None
        try:
            return encode_hidden(draft.states(at), self.form)
        except ValueError as error:
            others = [form for form in HIDDEN_FORMATS[:1] if form != self.form]
            way = " or ".join([*(f"send them as {form}," for form in others), "use greedy"])
            raise UnsupportedError(f"{error} For this drafter, {way}.") from error

    # The edge's half

    def decode_hidden_frame(self, frame: Buffer, count: int) -> Floats:
        """States f32 [count, d] of a frame; `MalformedError` for any other number or width."""
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
        """Accept a window without mismatches; else have them judged."""
        assert hidden is not None
        choices: NDArray[np.int64] = logits.argmax(1)
        at = mismatches(draft.ids, choices)
        if len(at) == 0:
            return Decision(len(draft.ids), int(choices[-1]), notes=(0,))
        barred = logits[at, draft.ids[at]] == -np.inf
        return self.decide(
            draft, StatesNeeded(at, choices, hidden[at + 1], barred)
        )  # row 0 is the root's

    @abstractmethod
    def decide(self, draft: JudgedDraft, needed: StatesNeeded) -> Decision | StatesNeeded:
        """Decide, or say what is needed for it."""

    def decide_by_states(
        self, draft: JudgedDraft, needed: StatesNeeded, states: Floats
    ) -> Decision:
        """The decision; ``states``: the drafter's f32 [m, d] at what was wanted."""
        assert self.head is not None
        # i64 [m, 2]
        tokens = np.stack([draft.ids[needed.at].astype(np.int64), needed.choices[needed.at]], 1)
        rejected = self.head(states, needed.target, tokens) | needed.forbidden
        accepted, token, forgiven = accept_forgiven(draft.ids, needed.choices, rejected)
        return Decision(accepted, token, notes=(forgiven,))
