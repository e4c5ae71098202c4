"""What a drafting protocol is: two halves of one exchange, and the words they share.

A protocol is one subclass of `SpeculationProtocol` in a file of its own, with its options and counters
(`wire.protocols.options`). The device calls `draw` while it drafts, `pack` and `propose` with what
it drew, and `settle` with the verdict; the edge calls `admit` on what arrived and `rule` on the
target's logits. An exchange holds the options of one generation and no other state: what a round
needs is in its arguments.

A window is a tree in general (`speculation.tree`), whose nodes 1…n stand in the pass breadth first;
most protocols send chains, in which node i follows node i − 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import BadDraftError, MalformedError, TooLargeError
from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.speculation.logits_options import (
    NO_LOGITS_OPTIONS,
    Constraint,
    LogitsOptions,
    LogitsProcessor,
)
from pilotfish.speculation.randomness import Purpose, noise, sample, uniforms
from pilotfish.speculation.rows import Row
from pilotfish.speculation.tree import Expansion, Tree, Walk, verify
from pilotfish.speculation.truncation import SparseRows
from pilotfish.wire.codecs.ids import count_ids, decode_ids, encode_ids, id_bytes
from pilotfish.wire.messages import MAX_WINDOW, Buffer
from pilotfish.wire.protocols.options import ProtocolOptions, RoundCounter

if TYPE_CHECKING:
    from typing_extensions import Self

Ids = NDArray[np.uint32]
NO_IDS: Ids = np.empty(0, np.uint32)

# typical headers (docs/wire.md)
WINDOW_BYTES, VERDICT_BYTES, STATES_REQUEST_BYTES = 42, 58, 50


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one end samples by: the drafter from q, the target from p. The seed names the draws.

    shaping: of the logits, before; protocols see only shaped ones.
    """

    sampling: Sampling
    seed: int
    logits_options: LogitsOptions = NO_LOGITS_OPTIONS

    def logits_processor(
        self, prompt_length: int, constraint: Constraint | None = None
    ) -> LogitsProcessor | None:
        """Make what shapes the logits behind a prompt of so many tokens; None: nothing does."""
        return (
            None
            if self.logits_options.is_identity
            else LogitsProcessor(self.logits_options, prompt_length, constraint)
        )


@dataclass(frozen=True, eq=False)
class Draft:
    """A window; protocols add the distributions that it was sampled from.

    ids: u32 [n], the tokens of its nodes. pending: u32 [0 or 1], a token that the device committed
    alone and the edge does not know yet; it comes before the window (`dssd`).
    """

    ids: Ids
    pending: Ids = field(default_factory=lambda: NO_IDS, kw_only=True)

    @property
    def parents(self) -> NDArray[np.int64] | None:
        """Of each node the index of its parent among the nodes, −1 for the root; None: a chain."""
        return None

    @property
    def depth(self) -> int:
        """The most tokens that can be accepted: γ."""
        return len(self.ids)

    def path(self, node: int) -> Sequence[int]:
        """The nodes from the first token to ``node``, which is 0 for an empty path."""
        return range(1, node + 1)


@dataclass(frozen=True)
class DrawKey:
    """Where in a round a node's candidates are drawn; it names their draws.

    depth: of the candidates, 0 for the window's first token. candidates: their numbers among all
    that are drawn for this depth; in a chain there is one.
    """

    round_start: int
    depth: int
    candidates: range = range(1)

    @property
    def position(self) -> int:
        """The position that the candidates are drawn for."""
        return self.round_start + self.depth


D = TypeVar("D", bound=Draft)


class Decision(NamedTuple):
    """The edge's decision: the path to node ``accepted`` is committed, and then ``token``.

    accepted: 0 where nothing was. token: None where the device samples it by the ``frames``.
    notes: what the protocol's counters note of the round, in their order.
    """

    accepted: int
    token: int | None
    frames: Sequence[Buffer] = ()
    notes: Sequence[float] = ()


@dataclass(frozen=True, eq=False)
class StatesNeeded:
    """Instead of a decision: the drafter's states at these tokens are needed for one.

    at: i64 [m], m ≥ 1, numbered from 0 in the window, ascending. choices: i64 [n + 1], the target's
    argmax after the root and after each token. target: f32 [m, d], its own states there. barred:
    bool [m], which of them the request's grammar forbids. frames: by which the device is asked.
    """

    at: NDArray[np.int64]
    choices: NDArray[np.int64]
    target: Floats
    forbidden: NDArray[np.bool_]
    frames: Sequence[Buffer] = ()


StatesReader = Callable[[NDArray[np.int64]], Floats]
"""Reads the drafter's hidden states f32 [m, d] at m tokens of a window, i64 [m] (wisv §III-A)."""


class PairSizes(NamedTuple):
    """Of a pair: tokens of the target's vocabulary, d of the drafter's hidden states."""

    vocabulary: int
    hidden: int


class TokenCounts(NamedTuple):
    """How many tokens a window brings, as the lengths of its frames tell; of a tree at least."""

    pending: int  # 0 or 1
    drafted: int


class RoundBytes(NamedTuple):
    """Bytes of a round: headers and frames as handed to ZeroMQ."""

    up: float
    down: float


class SpeculationProtocol(ABC, Generic[D]):
    """One protocol, both halves, with its options for one generation."""

    name: ClassVar[str]
    Options: ClassVar[type[ProtocolOptions]] = ProtocolOptions
    counters: ClassVar[tuple[RoundCounter, ...]] = ()
    default_top_k: ClassVar[int] = (
        0  # top-K of the drafter where nobody asks for another truncation
    )
    lossless: ClassVar[bool] = True  # the output's law is the target's
    deterministic: ClassVar[bool] = False  # and it follows from prompt, parameters and seed alone
    streams: ClassVar[bool] = False  # the target generates by itself; drafts are hints, no windows
    # α over that of `dsd`, measured on the default pair at temperature 1: what is expected of the
    # protocol on a pair that has not shown its own yet. At temperature 0 all lossless ones accept
    # alike.
    relative_acceptance: ClassVar[float] = 1.0
    strict_relative_acceptance: ClassVar[float] = (
        1.0  # of lossy ones: the same without what they gain
    )
    family: ClassVar[str] = ""  # protocols of one family accept alike; its own name if ""
    allows_trees: ClassVar[bool] = False  # windows may be trees
    requires: ClassVar[str] = ""  # what the edge must have for it (`edge_runtime.resources`)
    decides_by_link: ClassVar[bool] = (
        False  # the edge decides by the link, measured for each request
    )
    requests_states: ClassVar[bool] = False  # the edge may ask for hidden states of a window
    frames: ClassVar[int] = 1  # of a window, behind its header
    reads_last_token: ClassVar[bool] = (
        False  # a window's last token, too, is read before it is sent
    )

    def __init__(self, options: ProtocolOptions | None = None) -> None:
        self.options = self.Options() if options is None else options

    def with_options(self, options: ProtocolOptions) -> "Self":
        """The same for a generation with these options, which are of its own type."""
        return type(self)(options)

    def read_options(self, values: Mapping[str, Any]) -> ProtocolOptions:
        """Its options as a device tells them; `MalformedError` for what is none of them."""
        try:
            return self.Options.from_mapping(values)
        except ValueError as error:
            raise MalformedError(f"These are no options of {self.name}: {error}.") from error

    def with_resource(self, resource: Any) -> "Self":
        """The same with what it ``needs`` of the edge, for one generation."""
        raise NotImplementedError(f"{self.name} needs nothing of the edge")

    def check(self, target: Sampling, drafter: Sampling | None = None) -> None:
        """Raise `UnsupportedError` for a sampling of either end that cannot be served.

        The edge does not know the drafter's.
        """
        return

    def expansion(self, window: int) -> Expansion:
        """⟨k₁…k_L⟩ of a window of ``window`` levels when nobody asks for another one."""
        return (1,) * window

    def estimate_bytes(
        self, expansion: Expansion, drafter: Sampling, acceptance: float, sizes: PairSizes
    ) -> RoundBytes:
        """Bytes that a round is expected to take, before there was one to count.

        drafter: how q is shaped; acceptance: α.
        """
        return RoundBytes(WINDOW_BYTES + id_bytes(sizes.vocabulary) * len(expansion), VERDICT_BYTES)

    def estimate_round_trips(self, expansion: Expansion, acceptance: float) -> float:
        """Round trips that a round is expected to take; acceptance: α."""
        return 1.0

    # The device's half

    @abstractmethod
    def draw(self, logits: Floats, params: SamplingParams, key: DrawKey) -> tuple[list[int], Any]:
        """The tokens drawn after one row of logits [V], and the numbers they were sampled from."""

    @abstractmethod
    def make_draft(self, tree: Tree, rows: Sequence[Any]) -> D:
        """The draft of these nodes; ``rows`` are those that `draw` returned, in order."""

    def attach_states(self, draft: D, states: StatesReader) -> D:
        """The draft with what this protocol needs of the drafter's hidden states: mostly nothing.

        ``states`` may be called until the next window is drafted.
        """
        return draft

    def encode_draft(self, draft: D, pending: Ids, vocab_size: int) -> list[Buffer]:
        """The frames of a draft; ids come first in every protocol.

        Only under `dssd` can there be a pending token.
        """
        assert not len(pending)
        return [encode_ids(draft.ids, vocab_size)]

    def finish_round(
        self,
        draft: D,
        decision: Decision,
        params: SamplingParams,
        *,
        round_start: int,
        vocab_size: int,
    ) -> int:
        """The token after the accepted ones; the edge has chosen it, but for `dssd`."""
        if decision.token is None or decision.frames:
            raise MalformedError("The edge's verdict lacks the token that follows.")
        return decision.token

    def check_notes(
        self, notes: Sequence[float], *, window: int, accepted: int
    ) -> dict[str, float]:
        """A verdict's notes by their names; `MalformedError` for what no such window can have.

        Those that are missing at the end are 0. window: its levels. accepted: how many tokens of it
        were.
        """
        if not (notes or self.counters):
            return {}
        if len(notes) > len(self.counters):
            raise MalformedError(f"Rounds of {self.name} do not note so much.")
        values = {}
        for counter, value in zip(self.counters, (*notes, *[0] * len(self.counters)), strict=False):
            if not counter.is_valid(value, window, accepted):
                raise MalformedError(f"No window of {self.name} has {value} as its {counter.name}.")
            values[counter.name] = value
        return values

    def encode_states(self, draft: D, frames: Sequence[Buffer]) -> list[Buffer]:
        """The frames of the answer to an inquiry."""
        raise MalformedError(f"The edge asks for hidden states, which {self.name} does not send.")

    # The edge's half

    def count_tokens(self, frames: Sequence[Buffer], vocab_size: int) -> TokenCounts:
        """How many tokens these frames bring; a typed error where no window has such frames.

        It costs next to nothing: whatever can be refused by it is refused before it is decoded.
        """
        check_frame_count(frames, self.frames)
        return TokenCounts(0, count_window_ids(frames[0], vocab_size))

    @abstractmethod
    def decode_draft(self, frames: Sequence[Buffer], vocab_size: int) -> D:
        """The draft in frames that have an `extent`, checked; a typed error for what is none."""

    @abstractmethod
    def verify(
        self,
        draft: D,
        logits: Floats,
        params: SamplingParams,
        *,
        round_start: int,
        hidden: Floats | None = None,
    ) -> Decision | StatesNeeded:
        """Decide on a draft by the target's logits [n + 1, V]: the root's, then each node's.

        hidden: its states [n + 1, d] there, where the target has them.
        """

    def verify_with_states(
        self, draft: D, needed: StatesNeeded, frames: Sequence[Buffer]
    ) -> Decision:
        """Decide by the answer to an inquiry; a typed error for anything that is not one."""
        raise MalformedError(f"Nobody asked for hidden states: {self.name} sends none.")


def sample_candidates(row: Row, params: SamplingParams, key: DrawKey) -> list[int]:
    """Independent samples of q, one for each candidate."""
    return [
        row.token(
            sample(
                row.weights,
                noise(
                    len(row.weights),
                    params.seed,
                    Purpose.DRAFT,
                    key.position,
                    round_start=key.round_start,
                    candidate=candidate,
                ),
            )
        )
        for candidate in key.candidates
    ]


def coins(count: int, params: SamplingParams, round_start: int) -> Callable[[int, float], bool]:
    """The accept draws of a window: did what has this probability happen to candidate number i?"""
    draws = uniforms(
        count, params.seed, Purpose.ACCEPT, round_start, round_start=round_start
    ).tolist()
    return lambda candidate, probability: bool(draws[candidate] < probability)


def sample_next(walk: Walk, params: SamplingParams, key: DrawKey) -> int:
    """The token after the accepted path: residual or bonus. place: that token's."""
    return sample(
        walk.weights,
        noise(
            len(walk.weights),
            params.seed,
            Purpose.RESIDUAL if walk.rejected else Purpose.BONUS,
            key.position,
            round_start=key.round_start,
        ),
    )


def verify_window(
    draft: Draft,
    candidates: Sequence[tuple[int, ...]],
    q: Callable[[int], Row],
    logits: Floats,
    params: SamplingParams,
    *,
    round_start: int,
) -> Decision:
    """The edge's decision where it knows q: the accepted path, then residual or bonus.

    candidates and q: of each inner node; logits: [n + 1, V], of which only the path's are used.
    """
    walk = verify(
        candidates,
        draft.ids,
        q,
        lambda node: probabilities(logits[node : node + 1], params.sampling)[0],
        coins(sum(map(len, candidates)), params, round_start),
    )
    key = DrawKey(round_start, len(draft.path(walk.node)))
    return Decision(walk.node, sample_next(walk, params, key))


def check_frame_count(frames: Sequence[Buffer], count: int) -> None:
    """Raise `MalformedError` unless there are ``count`` frames."""
    if len(frames) != count:
        raise MalformedError(f"This message has {len(frames)} array frames where {count} belong.")


def check_candidates(q: SparseRows, rows: NDArray[np.int64], tokens: Ids) -> None:
    """Raise `BadDraftError` if one of the tokens [n] cannot have been drawn from its row [n]."""
    strange = tokens[~q.contains(rows, tokens)]
    if len(strange):
        raise BadDraftError(f"Token {strange[0]} cannot have been drawn: its q̂ is 0.")


def count_window_ids(frame: Buffer, vocab_size: int, most: int = MAX_WINDOW + 1) -> int:
    """How many ids are in a frame; `TooLargeError` for many more than ``most``."""
    if len(frame) > 3 * most:  # an id has 3 bytes at most
        raise TooLargeError(f"An ids frame has {len(frame)} bytes; no window has so many tokens.")
    return count_ids(frame, vocab_size)


def decode_window_ids(frame: Buffer, vocab_size: int, most: int = MAX_WINDOW + 1) -> Ids:
    """The ids of a frame; `TooLargeError` for many more than ``most``, which no window has.

    What the window's other frames cost to decode grows with the number of its tokens.
    """
    count_window_ids(frame, vocab_size, most)
    return decode_ids(frame, vocab_size)


class IdsOnlyProtocol(SpeculationProtocol[Draft]):
    """What protocols share in which nothing but ids goes up."""

    def make_draft(self, tree: Tree, rows: Sequence[None]) -> Draft:
        """Ids alone."""
        return Draft(tree.ids)

    def decode_draft(self, frames: Sequence[Buffer], vocab_size: int) -> Draft:
        """Any ids will do; `extent` has looked at their number."""
        return Draft(decode_ids(frames[0], vocab_size))
