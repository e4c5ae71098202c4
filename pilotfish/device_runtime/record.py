"""Records of rounds and of whole answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import attrgetter
from typing import NamedTuple

from pilotfish.engines.chat_formats.reader import Turn, TurnPart
from pilotfish.wire.codecs.logprobs import TokenLogprob
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import LOCAL, OMITTED_MASS, counters, streams

STAGES = ("draft", "encode", "uplink", "queue", "verify", "downlink", "settle")
_stage_values = attrgetter(*STAGES)


@dataclass(kw_only=True, slots=True)
class Timings:
    """Seconds of each stage of a round.

    uplink, downlink: split by the edge's clock. The clock's offset is estimated from the quickest
    exchange, assuming that both directions took equally long. The sum of both needs no assumption.
    queue: time at the edge outside the target's pass and the verification rule.
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
        return float(sum(_stage_values(self)))

    def __add__(self, other: "Timings") -> "Timings":
        """Add stage by stage."""
        return Timings(**{s: getattr(self, s) + getattr(other, s) for s in STAGES})


class TokenRun(NamedTuple):
    """Adjacent tokens of a round that have the same origin (`Piece.origin`).

    key: whether the drafts at their positions were key tokens (`adaptive`).
    """

    origin: str
    tokens: list[int]
    key: bool = False


@dataclass(kw_only=True, slots=True)
class Round:
    """One draft–verify exchange, or one step of a stream or of a baseline (window 0)."""

    protocol: str
    start: int  # committed tokens before the round
    window: int  # γ: draft tokens in the chain, or levels of the tree
    accepted: int
    tokens: list[int]  # tokens that this round committed and the answer kept
    # number of drafted tokens: γ in a chain, distinct nodes in a tree; under `ahead`, tokens that
    # the device drafted since the last round
    nodes: int = 0
    uplink_bytes: int = 0  # bytes of the frames handed to ZeroMQ
    downlink_bytes: int = 0
    timings: Timings = field(default_factory=Timings)
    notes: dict[str, float] = field(default_factory=dict)  # values of the protocol's counters
    inquired: int = 0  # number of hidden states that the edge requested
    # seconds of the target's pass; under `stream` the device may not have waited for all of it
    pass_s: float = 0.0
    # under `ahead`: source of the hints in the target's pass ("device", "text", "edge",
    # "prediction"; "": none);
    # then ``window`` is the number of these hints, ``accepted`` the number of correct hints
    source: str = ""
    # under `ahead`: (tokens since the last correction, compared drafts, agreed drafts). The
    # device's drafts are compared up to the first wrong one, also drafts that reached the edge too
    # late
    run: tuple[int, int, int] | None = None
    # indices of the accepted tokens that the device drafted without a model, because the grammar
    # allowed only one text
    forced: tuple[int, ...] = ()
    # indices in the window of the verified tokens that were key (`adaptive`), ascending
    key: tuple[int, ...] = ()
    # the mass that top-K truncation cuts off one of the verified positions' distributions, for each
    # K of `speculation.cut_mass.CUT_SIZES`; empty if it was not measured
    cut_masses: tuple[float, ...] = ()
    # one per token, if requested; None for a token sampled on the device, until the next round
    logprobs: list[TokenLogprob | None] = field(default_factory=list)

    @property
    def verified(self) -> int:
        """Number of verified positions: all accepted ones and the first rejected one (tslt 2.1)."""
        return min(self.window, self.accepted + 1)

    @property
    def averaged(self) -> int:
        """Number of positions in the sum of the note `omitted_mass`, which a federation sends.

        The verified ones; in a message of a stream the accepted drafts and the next token.
        """
        if not streams(self.protocol):
            return self.verified
        return self.accepted + 1 if OMITTED_MASS.name in self.notes else 0

    @property
    def origins(self) -> Sequence[TokenRun]:
        """The tokens in groups of adjacent tokens of one kind."""
        last = "bonus" if self.accepted == self.window else "corrected"
        if self.protocol == LOCAL:
            last = LOCAL
        elif not self.window and streams(self.protocol):
            last = "target"
        rest = TokenRun(last, self.tokens[self.accepted :], self.accepted in self.key)
        if not self.forced and not self.key:
            return TokenRun("drafted", self.tokens[: self.accepted]), rest
        return *self._accepted_runs(), rest

    def _accepted_runs(self) -> Iterator[TokenRun]:
        """Split the accepted tokens into groups by being forced or drafted, and key or not."""
        forced, key = {*self.forced}, {*self.key}
        accepted = enumerate(self.tokens[: self.accepted])
        for kind, run in groupby(accepted, lambda pair: (pair[0] in forced, pair[0] in key)):
            yield TokenRun("forced" if kind[0] else "drafted", [id for _, id in run], kind[1])

    @property
    def exchanges(self) -> int:
        """Number of round trips: 2 if the edge requested hidden states, else 1."""
        return 1 + (self.inquired > 0)


class Forecast(NamedTuple):
    """The predicted cost of one alternative, in seconds per committed token.

    edge_s: the target's computing time; None if not predicted. hints: source of the hints, under a
    protocol with hints. top_k: K of the drafter's distributions, under a protocol that sends their
    top K; else 0. expansion: the tree's shape, under a protocol with trees; else empty.
    """

    protocol: str
    window: int
    token_s: float
    edge_s: float | None = None
    hints: str = ""
    top_k: int = 0
    expansion: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Protocol and window for one answer, with the reason.

    token_s: predicted seconds per committed token; None if the policy predicts nothing. forecasts:
    all alternatives, the cheapest first. hints: source of the hints, under a protocol with hints.
    top_k: K of the drafter's distributions, under a protocol that sends their top K; else 0.
    expansion: the tree's shape, under a protocol with trees; else empty.
    """

    policy: str
    protocol: str
    window: int
    token_s: float | None
    reason: str
    forecasts: list[Forecast] = field(default_factory=list)
    hints: str = ""
    top_k: int = 0
    expansion: tuple[int, ...] = ()


class Probing(NamedTuple):
    """The cost of measuring the link: number of pings, and their bytes in both directions."""

    pings: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0

    def since(self, earlier: "Probing") -> "Probing":
        """Subtract an earlier count."""
        return Probing(*(now - then for now, then in zip(self, earlier, strict=True)))


class RttSample(NamedTuple):
    """A sample of the RTT in seconds, and its time in seconds since the answer began."""

    at_s: float
    rtt_s: float


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A loss of the edge during an answer.

    at: committed tokens at the loss, prompt included, as in `Round.start`. lost_s: seconds from
    noticing the loss until tokens were verified again, or until the answer's end. local_tokens:
    tokens that the drafter generated alone in this time.
    """

    at: int
    lost_s: float
    local_tokens: int


@dataclass(kw_only=True)
class Generation:
    """One answer. ``tokens`` includes the end token; ``text`` omits it and the stop string.

    parts: the text as parsed by the target's chat format: words, thought, calls. prompt_logprobs:
    one for each token of the prompt (``prompt_ids``), if requested; None for the first.
    cached_tokens: number of the prompt's first tokens that were not read again.

    stop_string: the stop string that ended the answer; None if something else ended it.

    link: the link's state when the answer began; None without an edge. choice: the choice of
    protocol "auto"; None for other protocols. probing: the cost of measuring the link for this
    answer. rtts: the samples of the RTT during the answer, at most the last 1,024. recoveries: the
    losses of the edge. predicted_tokens: tokens of the request's
    prediction. accepted_prediction_tokens: those that the answer repeats, under any protocol.
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
    rtts: list[RttSample] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    parts: list[TurnPart] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_ids: Sequence[int] = ()
    predicted_tokens: int = 0
    accepted_prediction_tokens: int = 0
    stop_string: str | None = None
    cached_tokens: int = 0

    @property
    def turn(self) -> Turn:
        """The answer's words, thought, and tool calls."""
        return Turn.from_parts(self.parts)

    @property
    def logprobs(self) -> list[TokenLogprob | None]:
        """Log-probabilities of the tokens, if requested.

        None for tokens that the drafter generated alone, and for a last token that was sampled on
        the device (`dssd`).
        """
        return [
            logprob
            for round_ in self.rounds
            for logprob in (round_.logprobs or [None] * len(round_.tokens))[: len(round_.tokens)]
        ]

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens per second, including the time to read the prompt."""
        return len(self.tokens) / self.total_s if self.total_s else 0.0

    @property
    def acceptance(self) -> float:
        """α of all rounds; see `acceptance`."""
        return acceptance(self.rounds)

    @property
    def forced(self) -> int:
        """Number of tokens drafted without a model, because the grammar forced them."""
        return sum(at < len(round_.tokens) for round_ in self.rounds for at in round_.forced)

    @property
    def key_positions(self) -> list[int]:
        """Indices of the answer's tokens at whose positions the draft was a key token.

        If such a draft was rejected, the token is the one that replaced it.
        """
        starts = accumulate((len(round_.tokens) for round_ in self.rounds), initial=0)
        return [
            start + at
            for start, round_ in zip(starts, self.rounds, strict=False)
            for at in round_.key
            if at < len(round_.tokens)
        ]

    @property
    def hints(self) -> dict[str, tuple[int, int]]:
        """Under `ahead`, by source of the hints: (drafts in the target's passes, accepted ones)."""
        counts: dict[str, tuple[int, int]] = {}
        for round_ in self.rounds:
            if round_.source:
                drafted, accepted = counts.get(round_.source, (0, 0))
                counts[round_.source] = drafted + round_.window, accepted + round_.accepted
        return counts

    @property
    def notes(self) -> dict[str, float | None]:
        """The protocols' counters over all rounds, by name: totals, and shares of a total.

        A share is None if its denominator is 0.
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
    """Compute α: the accepted share of the verified positions; 0 without drafts.

    A position is verified if all positions before it were accepted (tslt, Definition 2.1). In a
    tree, a position is accepted if one of its candidates is (tslt, equation 39).
    """
    verified = sum(round_.verified for round_ in rounds)
    return sum(round_.accepted for round_ in rounds) / verified if verified else 0.0


@dataclass(frozen=True)
class Piece:
    """A part of an answer.

    origin: ``drafted`` (and accepted), ``forced`` (drafted without a model: the grammar allowed one
    text only), ``corrected`` (the target's token in place of a rejected one), ``bonus`` (after a
    fully accepted window), ``target`` (from a stream's pass without drafts), ``local`` (the
    drafter's own, not verified).
    """

    text: str
    tokens: list[int]
    origin: str
    logprobs: Sequence[TokenLogprob | None] = ()  # if requested, and already known
    # words, thought and calls that the parser completed; the text may be ahead of them
    parts: Sequence[TurnPart] = ()
    key: bool = False  # whether the drafts at these positions were key tokens (`adaptive`)
