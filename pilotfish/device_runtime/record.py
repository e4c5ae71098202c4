"""Records of rounds, and of the answers that they add up to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from pilotfish.engines.chat_formats.reader import Turn, TurnPart
from pilotfish.wire.codecs.logprobs import TokenLogprob
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import LOCAL, counters, streams

STAGES = ("draft", "encode", "uplink", "queue", "verify", "downlink", "settle")


@dataclass(kw_only=True, slots=True)
class Timings:
    """Seconds of each stage of a round.

    uplink and downlink are separated by the edge's clock; its offset is that of the quickest
    exchange, assuming that both ways took equally long. Their sum needs no assumption. queue: time
    at the edge outside of the target's pass and the rule.
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
        """Add stage by stage."""
        return Timings(**{s: getattr(self, s) + getattr(other, s) for s in STAGES})


@dataclass(kw_only=True, slots=True)
class Round:
    """One draft–verify exchange, or one step of a stream or of a baseline (window 0)."""

    protocol: str
    start: int  # committed tokens before the round
    window: int  # γ: the most drafted tokens that could be accepted, the levels of a tree
    accepted: int
    tokens: list[int]  # committed by this round and kept in the answer
    # tokens drafted: γ in a chain, all distinct nodes of a tree; under `ahead` here, meanwhile
    nodes: int = 0
    uplink_bytes: int = 0  # frames as handed to ZeroMQ
    downlink_bytes: int = 0
    timings: Timings = field(default_factory=Timings)
    notes: dict[str, float] = field(default_factory=dict)  # of the protocol's counters, by name
    inquired: int = 0  # hidden states that the edge asked for, in a second exchange
    pass_s: float = 0.0  # of the target; under `stream` the device may not have waited for it
    # under `ahead`: whose hints were in the target's pass ("device", "text", "edge"; "": none), of
    # which ``window`` were drafted and ``accepted`` came true
    source: str = ""
    # under `ahead`, of the device's own drafts of these tokens, whether they reached the target in
    # time or not: tokens committed since the last correction, with a draft of them or without, how
    # many drafts were compared, up to the first wrong one, and how many of these agreed
    run: tuple[int, int, int] | None = None
    # of the accepted tokens those, numbered from 0, that this end drafted without a model, for a
    # grammar left one text
    forced: tuple[int, ...] = ()
    # of the tokens, if asked for; that of a token that this end sampled comes a round later
    logprobs: list[TokenLogprob | None] = field(default_factory=list)

    @property
    def verified(self) -> int:
        """Positions verified: the accepted ones and the first rejected (tslt 2.1)."""
        return min(self.window, self.accepted + 1)

    @property
    def origins(self) -> Sequence[tuple[str, list[int]]]:
        """The tokens in runs, each with where it came from, as `Piece` has it."""
        last = "bonus" if self.accepted == self.window else "corrected"
        if self.protocol == LOCAL:
            last = LOCAL
        elif not self.window and streams(self.protocol):
            last = "target"
        rest = last, self.tokens[self.accepted :]
        if not self.forced:
            return ("drafted", self.tokens[: self.accepted]), rest
        return *self._accepted_runs(), rest

    def _accepted_runs(self) -> Iterator[tuple[str, list[int]]]:
        """The accepted tokens, in runs of forced and of drafted ones."""
        forced = {*self.forced}
        accepted = enumerate(self.tokens[: self.accepted])
        for was_forced, run in groupby(accepted, lambda pair: pair[0] in forced):
            yield "forced" if was_forced else "drafted", [id for _, id in run]

    @property
    def exchanges(self) -> int:
        """Round trips: 2 if the edge asked for hidden states, else 1."""
        return 1 + (self.inquired > 0)


class Forecast(NamedTuple):
    """The predicted cost of one alternative, in seconds a committed token.

    edge_s: that the target computes for it; None where that was not predicted. hints: whose hints
    the target takes, of a protocol that has any.
    """

    protocol: str
    window: int
    token_s: float
    edge_s: float | None = None
    hints: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Protocol and window for one answer, and why.

    token_s: predicted seconds a committed token; None if the policy predicts nothing. forecasts: of
    all alternatives, the cheapest first. hints: whose are used, of a protocol that has any.
    """

    policy: str
    protocol: str
    window: int
    token_s: float | None
    reason: str
    forecasts: list[Forecast] = field(default_factory=list)
    hints: str = ""


class Probing(NamedTuple):
    """The cost of measuring the link: pings, and their bytes both ways."""

    pings: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0

    def since(self, earlier: "Probing") -> "Probing":
        """Subtract an earlier count."""
        return Probing(*(now - then for now, then in zip(self, earlier, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A loss of the edge during an answer.

    at: committed tokens by then, the prompt's included, as `Round.start`. lost_s: seconds from
    noticing the loss until tokens were verified again, or until the answer's end. local_tokens:
    tokens that the drafter generated alone meanwhile.
    """

    at: int
    lost_s: float
    local_tokens: int


@dataclass(kw_only=True)
class Generation:
    """One answer. ``tokens`` includes the end token, ``text`` neither it nor the stop string.

    parts: the text as read, by the target's family: words, thought, calls. prompt_logprobs: of each
    token of the prompt (``prompt_ids``), if asked for and told; the first has none.

    link: the link's state when the answer began; None without an edge. choice: that of protocol
    "auto"; None for other protocols. probing: the cost of measuring the link for this answer.
    recoveries: the losses of the edge.
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
    parts: list[TurnPart] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_ids: Sequence[int] = ()

    @property
    def turn(self) -> Turn:
        """The answer's words, its thought, and its calls of tools."""
        return Turn.from_parts(self.parts)

    @property
    def logprobs(self) -> list[TokenLogprob | None]:
        """Of each token, if asked for.

        None for what the drafter said alone, and for a last token that this end sampled (`dssd`).
        """
        return [
            told
            for one in self.rounds
            for told in (one.logprobs or [None] * len(one.tokens))[: len(one.tokens)]
        ]

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens per second, reading the prompt included."""
        return len(self.tokens) / self.total_s if self.total_s else 0.0

    @property
    def acceptance(self) -> float:
        """α of all rounds; see `acceptance`."""
        return acceptance(self.rounds)

    @property
    def forced(self) -> int:
        """The tokens that the device drafted without a model; 0 without a grammar."""
        return sum(at < len(one.tokens) for one in self.rounds for at in one.forced)

    @property
    def hints(self) -> dict[str, tuple[int, int]]:
        """Under `ahead`: drafts in the target's passes and how many came true, by their source."""
        found: dict[str, tuple[int, int]] = {}
        for round_ in self.rounds:
            if round_.source:
                drafted, accepted = found.get(round_.source, (0, 0))
                found[round_.source] = drafted + round_.window, accepted + round_.accepted
        return found

    @property
    def notes(self) -> dict[str, float | None]:
        """Every counter over all rounds: totals of whole numbers, shares of others.

        A share is None if there is nothing to divide by.
        """
        return {name: counter.summarize(self.rounds) for name, counter in counters().items()}

    @property
    def rounded_notes(self) -> dict[str, float | None]:
        """`notes`, rounded to six decimals."""
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in self.notes.items()
        }


def acceptance(rounds: Sequence[Round]) -> float:
    """Compute α: the share accepted of the positions that were verified; 0 without drafts.

    A position is verified when all before it were accepted (tslt Definition 2.1); in a tree it is
    accepted when one of its candidates is (tslt (39)).
    """
    verified = sum(round_.verified for round_ in rounds)
    return sum(round_.accepted for round_ in rounds) / verified if verified else 0.0


@dataclass(frozen=True)
class Piece:
    """A part of an answer.

    origin: ``drafted`` (and accepted), ``forced`` (the same, without a model: a grammar left one
    text), ``corrected`` (the target's token in place of a rejected
    one), ``bonus`` (after a window that was accepted whole), ``target`` (of a stream's pass without
    drafts), ``local`` (of the drafter alone, not verified).
    """

    text: str
    tokens: list[int]
    origin: str
    logprobs: Sequence[TokenLogprob | None] = ()  # if asked for, as far as they are known yet
    # what is known by now to be words, thought, or a call; it may lag behind the text
    parts: Sequence[TurnPart] = ()
