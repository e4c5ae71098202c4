"""What happened: one record a round, and the answer that the rounds add up to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import counters

STAGES = ("draft", "encode", "uplink", "queue", "verify", "downlink", "settle")


@dataclass(kw_only=True, slots=True)
class Timings:
    """Seconds of each stage of a round (DESIGN §4).

    uplink and downlink are told apart by the edge's clock, whose offset the quickest exchange tells
    under the usual assumption that its two ways took equally long; their sum needs no assumption.
    queue is all that the round spent at the edge outside of the target pass and the rule.
    """

    draft: float = 0.0
    encode: float = 0.0
    uplink: float = 0.0
    queue: float = 0.0
    verify: float = 0.0
    downlink: float = 0.0
    settle: float = 0.0

    @property
    def total(self) -> float:
        """Seconds from the first drafted token to the last committed one."""
        return float(sum(getattr(self, stage) for stage in STAGES))

    def __add__(self, other: "Timings") -> "Timings":
        """Stage by stage."""
        return Timings(**{s: getattr(self, s) + getattr(other, s) for s in STAGES})


@dataclass(kw_only=True, slots=True)
class Round:
    """One draft–verify exchange, or one step of a baseline (window 0)."""

    protocol: str
    start: int  # committed tokens before the round
    window: int  # γ: the most drafted tokens that could be accepted, the levels of a tree
    accepted: int
    tokens: list[int]  # committed by this round and kept in the answer
    nodes: int = 0  # tokens drafted: γ in a chain, all distinct nodes of a tree
    uplink_bytes: int = 0  # frames as handed to ZeroMQ
    downlink_bytes: int = 0
    timings: Timings = field(default_factory=Timings)
    notes: dict[str, float] = field(default_factory=dict)  # of the protocol's counters, by name
    inquired: int = 0  # hidden states that the edge asked for, in a second exchange
    pass_s: float = 0.0  # of the target, as the edge told; `stream`'s may go on while nobody waits

    @property
    def verified(self) -> int:
        """Positions that were looked at: those before a rejection, and that one (tslt 2.1)."""
        return min(self.window, self.accepted + 1)

    @property
    def exchanges(self) -> int:
        """Round trips that it took: a second one where the edge asked for something."""
        return 1 + (self.inquired > 0)


class Forecast(NamedTuple):
    """What one alternative would cost: predicted seconds a committed token."""

    protocol: str
    window: int
    token_s: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Protocol and window for one answer, and why.

    token_s: predicted seconds a committed token; None where the policy predicts nothing.
    forecasts: of all alternatives, the cheapest first.
    """

    policy: str
    protocol: str
    window: int
    token_s: float | None
    reason: str
    forecasts: list[Forecast] = field(default_factory=list)


class Probing(NamedTuple):
    """What measuring the link has cost: pings, and their bytes both ways."""

    pings: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0

    def since(self, before: "Probing") -> "Probing":
        """What came on top of an earlier count."""
        return Probing(*(now - then for now, then in zip(self, before, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One time that an answer lost its edge.

    at: committed tokens by then, the prompt's included, as `Round.start`. lost_s: seconds from when
    the loss was noticed until tokens were verified again, or until the answer ended without.
    local_tokens: what the drafter said alone meanwhile.
    """

    at: int
    lost_s: float
    local_tokens: int


@dataclass(kw_only=True)
class Generation:
    """One answer. ``tokens`` holds the end token, ``text`` neither it nor the stop string.

    link: what was known of the link when the answer began; None without an edge. choice: what
    protocol "auto" chose, and why; None where nothing was to choose. probing: what measuring the
    link has cost this answer. recoveries: when the edge was lost, and for how long.
    """

    protocol: str
    prompt_tokens: int
    tokens: list[int]
    text: str
    finish_reason: str  # "stop": an end token or a stop string; "length": max_tokens or context
    rounds: list[Round]
    first_token_s: float
    total_s: float
    link: LinkState | None = None
    choice: Choice | None = None
    probing: Probing = field(default_factory=Probing)
    recoveries: list[Recovery] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens per second, reading the prompt included."""
        return len(self.tokens) / self.total_s if self.total_s else 0.0

    @property
    def acceptance(self) -> float:
        """α of all rounds; see `acceptance`."""
        return acceptance(self.rounds)

    @property
    def notes(self) -> dict[str, float | None]:
        """What the rounds noted, of every counter there is: whole numbers as their total.

        Of others the share, which is None where there is nothing that it could be a share of.
        """
        return {name: counter.told(self.rounds) for name, counter in counters().items()}

    @property
    def rounded_notes(self) -> dict[str, float | None]:
        """The same with six digits behind the point."""
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in self.notes.items()
        }


def acceptance(rounds: Sequence[Round]) -> float:
    """α: the share accepted of the positions that were verified; 0 without drafts.

    A position is verified when all before it were accepted (tslt Definition 2.1); in a tree it is
    accepted when one of its candidates is (tslt (39)).
    """
    verified = sum(round_.verified for round_ in rounds)
    return sum(round_.accepted for round_ in rounds) / verified if verified else 0.0


@dataclass(frozen=True)
class Piece:
    """A part of an answer as it comes.

    origin: ``drafted`` (and accepted), ``corrected`` (the target's token in place of a rejected
    one), ``bonus`` (after a window that was accepted whole), ``target`` (of `stream`), ``local``
    (of the drafter alone: nobody verified it).
    """

    text: str
    tokens: list[int]
    origin: str
