"""The base class of speculation protocols, with both halves of a round, and its types.

Each protocol is a subclass of `SpeculationProtocol` in its own file, with its options and counters
(`wire.protocols.options`). The device calls `draw` for each row of logits, `make_draft` and
`encode_draft` with the drawn tokens, and `finish_round` with the verdict. The edge calls
`count_tokens` and `decode_draft` with the frames, and `verify` with the target's logits. A protocol
object holds the options of one generation and no other state; all else is in the arguments.

A window is in general a tree (`speculation.tree`), with nodes 1…n in breadth-first order. Most
protocols send chains, in which node i follows node i − 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, UnsupportedError
from pilotfish.speculation.channel import Channel
from pilotfish.speculation.distributions import Floats, Sampling
from pilotfish.speculation.logits_options import (
    NO_LOGITS_OPTIONS,
    Constraint,
    LogitsOptions,
    LogitsProcessor,
)
from pilotfish.speculation.tree import Expansion, Tree
from pilotfish.wire.codecs.ids import decode_ids, encode_ids, id_bytes
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols.options import OMITTED_MASS, ProtocolOptions, RoundCounter
from pilotfish.wire.protocols.window_checks import check_frame_count, count_window_ids

if TYPE_CHECKING:
    from typing_extensions import Self

Ids = NDArray[np.uint32]
NO_IDS: Ids = np.empty(0, np.uint32)

# typical sizes of headers, in bytes (docs/wire.md)
WINDOW_BYTES, VERDICT_BYTES, STATES_REQUEST_BYTES = 42, 58, 50


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters: the drafter's for q (device), or the target's for p (edge).

    seed: the key of all draws. logits_options: changes to the logits before sampling; protocols
    receive processed logits.
    """

    sampling: Sampling
    seed: int
    logits_options: LogitsOptions = NO_LOGITS_OPTIONS

    def logits_processor(
        self, prompt_length: int, constraint: Constraint | None = None
    ) -> LogitsProcessor | None:
        """Return the logits processor for a prompt of this length; None: no logits change."""
        return (
            None
            if self.logits_options.is_identity
            else LogitsProcessor(self.logits_options, prompt_length, constraint)
        )


@dataclass(frozen=True, eq=False)
class Draft:
    """A window; subclasses add the distributions from which it was sampled.

    ids: u32 [n], the nodes' tokens. pending: u32 [0 or 1], a token before the window that the
    device has committed and the edge does not know yet (`dssd`).
    """

    ids: Ids
    pending: Ids = field(default_factory=lambda: NO_IDS, kw_only=True)

    @property
    def parents(self) -> NDArray[np.int64] | None:
        """Each node's parent, i64 [n], by index among the nodes; −1: the root. None: a chain."""
        return None

    @property
    def depth(self) -> int:
        """The largest number of tokens that can be accepted: γ."""
        return len(self.ids)

    def path(self, node: int) -> Sequence[int]:
        """Return the nodes from the first token to ``node``; 0 means an empty path."""
        return range(1, node + 1)


@dataclass(frozen=True)
class DrawKey:
    """The key of the random draws of a node's candidates.

    depth: the candidates' depth, 0 for the window's first token. candidates: their numbers
    among all candidates of this depth; a chain has one candidate at each depth.
    """

    round_start: int
    depth: int
    candidates: range = range(1)

    @property
    def position(self) -> int:
        """The candidates' position in the text."""
        return self.round_start + self.depth


D = TypeVar("D", bound=Draft)


class Decision(NamedTuple):
    """The edge's decision: the path to node ``accepted`` is committed, and then ``token``.

    accepted: 0 means no node. token: None means that the device samples it from ``frames``. notes:
    the values of the protocol's counters for this round, in their order.
    """

    accepted: int
    token: int | None
    frames: Sequence[Buffer] = ()
    notes: Sequence[float] = ()


@dataclass(frozen=True, eq=False)
class StatesNeeded:
    """A request for the drafter's hidden states, which the decision needs.

    at: i64 [m], m ≥ 1, indices of the tokens in the window, from 0, ascending. choices: i64
    [n + 1], the target's argmax after the root and after each token. target: f32 [m, d], the
    target's states at these tokens. forbidden: bool [m], the tokens that the request's grammar
    forbids. frames: frames of the request to the device.
    """

    at: NDArray[np.int64]
    choices: NDArray[np.int64]
    target: Floats
    forbidden: NDArray[np.bool_]
    frames: Sequence[Buffer] = ()


StatesReader = Callable[[NDArray[np.int64]], Floats]
"""Reads the drafter's hidden states f32 [m, d] at m tokens of a window, i64 [m] (wisv §III-A)."""


class PairSizes(NamedTuple):
    """Sizes of a pair: the target's vocabulary, and the width d of the drafter's states."""

    vocabulary: int
    hidden: int


class TokenCounts(NamedTuple):
    """The numbers of tokens in a window, by its frames' lengths; for a tree, the minimum."""

    pending: int  # 0 or 1
    drafted: int


class RoundBytes(NamedTuple):
    """Bytes of a round: the headers and frames that are handed to ZeroMQ."""

    up: float
    down: float


class SpeculationProtocol(ABC, Generic[D]):
    """A protocol, the device's half and the edge's half, with the options of one generation.

    greedy_only: the protocol decodes at temperature 0 alone.
    default_top_k: top-K of the drafter if the request names no truncation.
    top_ks: the K among which "auto" chooses if the request names no truncation; it also may send
        whole distributions, if they fit into a message.
    branchings: the first levels of trees among which "auto" chooses; the later levels have one
        candidate per node. A client that names the protocol gets `expansion`.
    lossless: the output follows the target's distribution.
    deterministic: the output also follows from prompt, parameters and seed alone.
    streams: the target generates by itself; drafts are hints, not windows.
    relative_acceptance: acceptance relative to `dsd`'s, measured on the default pair at temperature
        1 (at 0 all lossless protocols accept alike): the estimate for a pair without data.
    strict_relative_acceptance: the same, without acceptances that a lossless rule would reject.
    family: protocols of one family accept alike; "": the protocol's own name.
    allows_trees: windows may be trees.
    requires: the edge's resource that the protocol needs (`edge_runtime.resources`).
    decides_by_link: the edge's decision depends on the link, measured for each request.
    frames: number of a window's frames after its header.
    """

    name: ClassVar[str]
    Options: ClassVar[type[ProtocolOptions]] = ProtocolOptions
    counters: ClassVar[tuple[RoundCounter, ...]] = ()
    greedy_only: ClassVar[bool] = False
    default_top_k: ClassVar[int] = 0
    top_ks: ClassVar[tuple[int, ...]] = ()
    branchings: ClassVar[tuple[Expansion, ...]] = ()
    lossless: ClassVar[bool] = True
    deterministic: ClassVar[bool] = False
    streams: ClassVar[bool] = False
    relative_acceptance: ClassVar[float] = 1.0
    strict_relative_acceptance: ClassVar[float] = 1.0
    family: ClassVar[str] = ""
    allows_trees: ClassVar[bool] = False
    requires: ClassVar[str] = ""
    decides_by_link: ClassVar[bool] = False
    frames: ClassVar[int] = 1

    def __init__(self, options: ProtocolOptions | None = None) -> None:
        self.options = self.Options() if options is None else options

    def with_options(self, options: ProtocolOptions) -> "Self":
        """Return this protocol with these options, which have the type `Options`."""
        return type(self)(options)

    def read_options(self, values: Mapping[str, Any]) -> ProtocolOptions:
        """Read the options of a request; raises `MalformedError`."""
        try:
            return self.Options.from_mapping(values)
        except ValueError as error:
            raise MalformedError(f"These are no options of {self.name}: {error}.") from error

    def with_resource(self, resource: Any) -> "Self":
        """Return this protocol with the edge's resource that it ``requires``."""
        raise NotImplementedError(f"{self.name} needs nothing of the edge")

    def check(self, target: Sampling, drafter: Sampling | None = None) -> None:
        """Raise `UnsupportedError` for sampling parameters that the protocol cannot serve.

        drafter: the drafter's parameters; None at the edge, which does not know them.
        """
        for end in (target, drafter or target):
            if self.greedy_only and not end.greedy:
                raise UnsupportedError(
                    f"Protocol {self.name} decodes at temperature 0, not {end.temperature}; use "
                    "coupled, tslt, tree, dssd or dsd to sample."
                )

    def expansion(self, window: int) -> Expansion:
        """Return the default expansion ⟨k₁…k_L⟩ of a window with ``window`` levels."""
        return (1,) * window

    def estimate_bytes(
        self, expansion: Expansion, drafter: Sampling, acceptance: float, sizes: PairSizes
    ) -> RoundBytes:
        """Estimate the bytes of a round, before any round was measured.

        drafter: sampling parameters of q. acceptance: α.
        """
        return RoundBytes(WINDOW_BYTES + id_bytes(sizes.vocabulary) * len(expansion), VERDICT_BYTES)

    def estimate_round_trips(self, expansion: Expansion, acceptance: float) -> float:
        """Estimate the round trips of a round; acceptance: α."""
        return 1.0

    @property
    def requests_states(self) -> bool:
        """Whether the edge may ask for hidden states of a window."""
        return False

    @property
    def reads_last_token(self) -> bool:
        """Whether the drafter also runs over a window's last token, before the window is sent."""
        return False

    # The device's half

    def max_rows(self, drafter: Sampling, vocab_size: int) -> int | None:
        """Return how many rows of q a window can send; None: any window, or it is not known.

        drafter: sampling parameters of q.
        """
        return None

    def fits(self, rows: Sequence[Any]) -> bool:
        """Return whether a message holds these distributions from `draw`."""
        return True

    @abstractmethod
    def draw(self, logits: Floats, params: SamplingParams, key: DrawKey) -> tuple[list[int], Any]:
        """Draw tokens from one row of logits [V]; return them and the distribution used."""

    @abstractmethod
    def make_draft(self, tree: Tree, rows: Sequence[Any]) -> D:
        """Return the draft of these nodes; ``rows``: the distributions from `draw`, in order."""

    def attach_states(self, draft: D, states: StatesReader) -> D:
        """Return the draft with the drafter's hidden states, if the protocol needs them.

        ``states`` is valid until the next window is drafted.
        """
        return draft

    def attach_channel(self, draft: D, channel: Channel) -> D:
        """Return the draft with the link's newest state, if the protocol ``decides_by_link``."""
        return draft

    def encode_draft(self, draft: D, pending: Ids, vocab_size: int) -> list[Buffer]:
        """Encode a draft as frames; ids come first in every protocol.

        pending: a pending token, under `dssd` only.
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
        """Return the token after the accepted tokens: the edge's choice, except under `dssd`."""
        if decision.token is None or decision.frames:
            raise MalformedError("The edge's verdict lacks the token that follows.")
        return decision.token

    def take_key_tokens(self, draft: D, decision: Decision) -> tuple[Decision, tuple[int, ...]]:
        """Remove the frame that names the key tokens from a decision, if the protocol has any.

        Returns the decision, and the indices of the key tokens in the window, ascending. Raises
        `MalformedError`.
        """
        return decision, ()

    @property
    def round_counters(self) -> tuple[RoundCounter, ...]:
        """The counters of a round's notes in their order; only an ensemble reports the last."""
        return (*self.counters, OMITTED_MASS)

    def check_notes(
        self, notes: Sequence[float], *, window: int, accepted: int
    ) -> dict[str, float]:
        """Return a verdict's notes by name; raises `MalformedError` for impossible values.

        Notes missing at the end are 0. window: number of its levels. accepted: number of accepted
        tokens.
        """
        if not (notes or self.counters):
            return {}
        # a target that is no ensemble reports only the protocol's own counters
        reported = self.round_counters[: max(len(notes), len(self.counters))]
        if len(notes) > len(reported):
            raise MalformedError(
                f"The verdict has more notes than a round of {self.name} can have."
            )
        values = {}
        for counter, value in zip(reported, (*notes, *[0] * len(reported)), strict=False):
            if not counter.is_valid(value, window, accepted):
                raise MalformedError(
                    f"A window of {self.name} cannot have {value} as its {counter.name}."
                )
            values[counter.name] = value
        return values

    def encode_states(self, draft: D, frames: Sequence[Buffer]) -> list[Buffer]:
        """Encode the hidden states that the frames of a `StatesRequest` name."""
        raise MalformedError(f"The edge asks for hidden states, which {self.name} does not send.")

    # The edge's half

    def count_tokens(self, frames: Sequence[Buffer], vocab_size: int) -> TokenCounts:
        """Count the tokens in these frames, by their lengths; raises a typed error.

        This is cheap, and comes before `decode_draft`: bad frames are refused without decoding.
        """
        check_frame_count(frames, self.frames)
        return TokenCounts(0, count_window_ids(frames[0], vocab_size))

    @abstractmethod
    def decode_draft(self, frames: Sequence[Buffer], vocab_size: int) -> D:
        """Decode and check frames that `count_tokens` has accepted; raises a typed error."""

    def follow(self, draft: D) -> "Self":
        """Return the protocol for this draft and the later ones of its generation."""
        return self

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
        """Decide on a draft by the target's logits [n + 1, V]: one row for the root and each node.

        hidden: the target's states [n + 1, d], if the target offers them.
        """

    def verify_with_states(
        self, draft: D, needed: StatesNeeded, frames: Sequence[Buffer]
    ) -> Decision:
        """Decide by the frames of the device's `States`; raises a typed error."""
        raise MalformedError(f"The edge did not ask for hidden states: {self.name} sends none.")


class IdsOnlyProtocol(SpeculationProtocol[Draft]):
    """Base of protocols that send only ids."""

    def make_draft(self, tree: Tree, rows: Sequence[None]) -> Draft:
        """Return a draft that has only ids."""
        return Draft(tree.ids)

    def decode_draft(self, frames: Sequence[Buffer], vocab_size: int) -> Draft:
        """Decode the ids; `count_tokens` has checked their number."""
        return Draft(decode_ids(frames[0], vocab_size))
