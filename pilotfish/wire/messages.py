"""The headers of every message, typed and bounded; `docs/wire.md` is the specification.

A message is one ZeroMQ multipart message: a msgpack header, then raw little-endian array frames.
A header is a msgpack array: the type's name, then the fields in the order in which they stand here
(`Hello` and `Welcome` may have more, so that versions can tell each other apart). Unknown types,
wrong numbers of fields and values outside their bounds are `MalformedError`. Arrays are never
inside a header, and never copied.

Strings of the other end end up in logs, on terminals and in JSON. So names are printable ASCII or
malformed, and words become one printable line here, where they come in.
"""

from functools import cache
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, TooLargeError
from pilotfish.base.prose import MOST_CHARACTERS, one_line
from pilotfish.speculation.channel import Channel
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.logits_options import (
    MOST_BIASED,
    NO_LOGITS_OPTIONS,
    Grammar,
    LogitsOptions,
)

VERSION: Final = 3
HEADER_BYTES: Final = 16 * 1024
MAX_FRAMES: Final = 8  # arrays behind one header
MAX_WINDOW: Final = 128
MAX_OPTIONS: Final = 32  # that a protocol may have of its own
MAX_NOTES: Final = 16  # that a protocol may make of a round
MAX_HIDDEN: Final = 65536  # d of a drafter's states
MAX_PROBE: Final = 256 * 1024  # bytes that a ping may carry
PART_BYTES: Final = 64 * 1024  # of a vocabulary, in one part, before it is compressed
MAX_LOGPROBS: Final = 20  # of the likeliest tokens
MAX_GRAMMAR: Final = 64 * 1024  # bytes of a grammar
MAX_VOCABULARY: Final = 64 * 1024 * 1024  # bytes of all its parts
MAX_CHUNK: Final = 256 * 1024  # bytes of a transfer's chunk

U31 = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
Seed = U63
SessionId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
TransferId = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Digest = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Name = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[ -~]*\Z")]
# The other end's own words: `checked` makes one printable line of them.
Text = Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)]


class Header(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """Base of all headers."""


class Limits(Header, frozen=True):
    """What one client may ask of the edge."""

    context: U31  # tokens of a session, prompt and answer together
    window: U31  # draft tokens of a round
    message_bytes: U31  # header and frames of one message together
    sessions: U31  # open sessions of one client


# Device to edge


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="hello", gc=False):
    """First message of a connection. More fields are allowed: newer devices may send some."""

    version: U31
    tokenizer: Text  # fingerprint
    vocab_size: U31  # true
    padded_vocab_size: U31
    hidden_size: U31
    bridges: bool = False  # the device can draft for a target of another vocabulary
    drafter: Name = ""  # the origin of its weights, by which the edge finds a decision head
    # replies with more bytes in frames come in slices; 0: the device takes no slices
    reply_bytes: U31 = 0


class Chunk(Header, tag="chunk", frozen=True):
    """Bytes of a large request: frame 0 holds those from ``offset`` on.

    The message is as `wire.transfer.pack` makes it. Without bytes: a question of how much of it the
    edge has.
    """

    transfer: TransferId
    offset: U31
    total: U31  # bytes of the message


class DecisionConditions(Header, frozen=True):
    """By what an edge decides in a generation beside the options: the drafter, and the link.

    drafter: the origin of the drafter's weights; hidden_size: d of its states. The others are the
    link as the device measured it before the request (wisv §III-A: CSI), None where it does not
    know.
    """

    drafter: Name
    # of 3 and more: below that the length of states does not tell their format
    hidden_size: Annotated[int, msgspec.Meta(ge=3, le=MAX_HIDDEN)]
    rtt_s: float | None = None
    up_bps: float | None = None
    down_bps: float | None = None
    loss: float | None = None

    @property
    def channel(self) -> Channel:
        """The link; `MalformedError` if it makes no sense."""
        try:
            return Channel(
                rtt_s=self.rtt_s, up_bps=self.up_bps, down_bps=self.down_bps, loss=self.loss
            )
        except ValueError as error:
            raise MalformedError(f"The link's state is unusable: {error}") from error


class LogitsOptionsMsg(Header, frozen=True):
    """How a generation's logits are changed before they are sampled from.

    since: tokens of the prompt; the answer's, which are counted, follow. grammar: its kind;
    frame 1 of the `Begin` is its text in UTF-8. "" is no grammar, and no frame 1.
    """

    since: U31
    # token and bias; a token twice is malformed
    logit_bias: Annotated[list[tuple[U31, float]], msgspec.Meta(max_length=MOST_BIASED)] = []
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: Name = ""

    @classmethod
    def from_options(cls, shaping: LogitsOptions, since: int) -> "LogitsOptionsMsg | None":
        """The message of it; None where nothing is changed."""
        if shaping.is_identity:
            return None
        return cls(
            since=since,
            logit_bias=list(shaping.logit_bias.items()),
            repetition_penalty=shaping.repetition_penalty,
            frequency_penalty=shaping.frequency_penalty,
            presence_penalty=shaping.presence_penalty,
            grammar=shaping.grammar.kind if shaping.grammar is not None else "",
        )


class Begin(Header, tag="begin", frozen=True):
    """Starts a generation: keep the first ``keep`` tokens, append frame 0 (ids), sample so.

    A session that the edge does not know starts empty, which only ``keep`` = 0 allows.
    """

    session: SessionId
    generation: U31
    keep: U31
    hash: Digest  # of the kept tokens
    protocol: Name
    seed: Seed
    temperature: float
    top_k: U31
    top_p: float
    # the protocol's own, as far as they are not the default
    options: Annotated[dict[Name, Any], msgspec.Meta(max_length=MAX_OPTIONS)] = {}
    conditions: DecisionConditions | None = (
        None  # for protocols that decide by them; others ignore it
    )
    min_p: float = 0.0
    shape: LogitsOptionsMsg | None = None
    # how many of the likeliest tokens to tell with the log-probability of each; None: tell none
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    # likewise of the tokens that the session then holds; the first reply tells them
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def sampling(self) -> Sampling:
        """How the target's distribution is cut; `MalformedError` if it makes no sense."""
        try:
            return Sampling(
                temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
            )
        except ValueError as error:
            raise MalformedError(f"The sampling parameters are unusable: {error}.") from error

    def logits_options(self, grammar: "Buffer | None") -> LogitsOptions:
        """How the target's logits are changed; `MalformedError` if it makes no sense.

        grammar: frame 1, if there is one.
        """
        if (message := self.shape) is None:
            return NO_LOGITS_OPTIONS
        bias = dict(message.logit_bias)
        if len(bias) < len(message.logit_bias):
            raise MalformedError("logit_bias names a token twice.")
        try:
            return LogitsOptions(
                logit_bias=bias,
                repetition_penalty=message.repetition_penalty,
                frequency_penalty=message.frequency_penalty,
                presence_penalty=message.presence_penalty,
                grammar=None
                if grammar is None
                else Grammar(message.grammar, _decode_grammar(grammar)),
            )
        except ValueError as error:
            raise MalformedError(f"The sampling parameters are unusable: {error}.") from error


class Window(Header, tag="window", frozen=True):
    """One round's draft: frame 0 is ids, the other frames are the protocol's."""

    session: SessionId
    generation: U31
    start: U31  # the position of the window's first token
    hash: Digest  # of the tokens that the edge has committed


class States(Header, tag="states", frozen=True):
    """The answer to an `Inquiry`: frame 0 holds the drafter's hidden states, in its order."""

    session: SessionId
    generation: U31
    start: U31


class Pull(Header, tag="pull", frozen=True):
    """`stream`, `ahead`: let the target generate ``count`` tokens."""

    session: SessionId
    generation: U31
    start: U31
    hash: Digest
    count: U31


class Hint(Header, tag="hint", frozen=True):
    """`ahead`: drafts that may come true. Frame 0 holds their ids [n], frame 1 their odds u8 [n].

    Never answered, and never an error: one that fits nothing is dropped.
    """

    session: SessionId
    generation: U31
    start: U31  # the position of the first of them
    hash: Digest  # of the text before it, committed or hinted


class Cancel(Header, tag="cancel", frozen=True):
    """Stop whatever the generation is doing; it is not answered."""

    session: SessionId
    generation: U31


class Close(Header, tag="close", frozen=True):
    """Forget the session; it is not answered."""

    session: SessionId


class Ping(Header, tag="ping", frozen=True):
    """Answered at once, also while the target is busy; frame 0, if there is one, comes back."""

    nonce: U63


class Fetch(Header, tag="fetch", frozen=True):
    """Asks for one part of the target's vocabulary, counted from 0."""

    vocabulary: Name  # its digest, as the welcome told
    part: U31


class More(Header, tag="more", frozen=True):
    """Asks for at most so many bytes of a reply that comes in slices, from ``offset`` on."""

    transfer: TransferId
    offset: U31
    bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK)]


# Edge to device


class PassTime(Header, frozen=True):
    """How long a target pass over so many tokens of one session took when the edge started."""

    tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    ns: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="welcome", gc=False):
    """The edge's side of the handshake. More fields are allowed."""

    version: U31
    software: Name
    model: Text
    vocab_size: U31
    padded_vocab_size: U31
    hidden_size: U31
    eos_ids: Annotated[list[U31], msgspec.Meta(max_length=256)]
    protocols: Annotated[list[Name], msgspec.Meta(max_length=64)]
    limits: Limits
    received_ns: U63
    sent_ns: U63  # both of the edge's monotonic clock
    passes: Annotated[list[PassTime], msgspec.Meta(max_length=64)] = []
    digest: Name = ""  # of the target's artifact; two precisions of a model differ in it
    tokenizer: Text = ""  # fingerprint
    vocabulary: Name = ""  # SHA-256 (hex) of what `Fetch` gets; "" where there is nothing to get
    vocabulary_bytes: U31 = 0
    # of a drafter beside the target; none if the edge has no such
    drafts: Annotated[list[PassTime], msgspec.Meta(max_length=64)] = []
    chunks: bool = False  # the edge takes large messages in chunks


class Ack(Header, tag="ack", frozen=True):
    """The answer to a device's `Chunk`: the edge has the bytes of the message before ``offset``."""

    transfer: TransferId
    offset: U31


class Slice(Header, tag="slice", frozen=True):
    """Bytes of a large reply: frame 0 holds those from ``offset`` on.

    The first ones come by themselves, the others for a `More`. ``total`` = 0: the edge does not
    have this reply any more.
    """

    transfer: TransferId
    offset: U31
    total: U31  # bytes of the message, which is as `wire.transfer.pack` makes it


class Times(Header, frozen=True):
    """When a request reached the edge, on its monotonic clock, and for how long it was there."""

    received_ns: U63
    held_ns: U63  # until the reply was sent
    queue_ns: U63  # of these: waiting for a target pass
    verify_ns: U63  # of these: target pass and rule


class Verdict(Header, tag="verdict", frozen=True):
    """The path to node ``accepted`` of the window and then ``token`` are committed.

    In a chain that is how many tokens were accepted. Without a token, the device samples it by the
    frames, and it rides on the next window.
    """

    session: SessionId
    generation: U31
    start: U31
    accepted: U31
    token: U31 | None
    times: Times
    # what the protocol's counters note of the round, in their order (`wire.protocols.options`)
    notes: Annotated[list[U31 | NotNegative], msgspec.Meta(max_length=MAX_NOTES)] = []


class StatesRequest(Header, tag="inquiry", frozen=True):
    """The edge cannot decide on a window yet: frame 0 names the tokens whose states it wants.

    They are numbered from 0 in the window, ascending, a byte each.
    """

    session: SessionId
    generation: U31
    start: U31
    times: Times


class Tokens(Header, tag="tokens", frozen=True):
    """`stream`, `ahead`: frame 0 holds the committed ids from position ``start`` on.

    Under `ahead` it says how many drafts were in the pass that made them, whose, and how many of
    them came true: these are the first of the ids.
    """

    session: SessionId
    generation: U31
    start: U31
    times: Times
    source: Name = ""
    drafted: U31 = 0
    accepted: U31 = 0


class Pong(Header, tag="pong", frozen=True):
    """The answer to a `Ping`, with its frame if it had one."""

    nonce: U63
    received_ns: U63
    sent_ns: U63


class Part(Header, tag="part", frozen=True):
    """One part of a vocabulary: frame 0 is zlib's stream of `PART_BYTES` bytes, the last of fewer.

    The parts together are `engines.vocabulary.Vocabulary.encode`.
    """

    vocabulary: Name
    part: U31


class Failure(Header, tag="failure", frozen=True):
    """A typed error; the other fields say what it is about, where that is known."""

    code: Name
    message: Text
    session: SessionId | None = None
    generation: U31 | None = None
    start: U31 | None = None


Request = (
    Hello | Begin | Window | States | Pull | Hint | Cancel | Close | Ping | Fetch | Chunk | More
)
Reply = Welcome | Verdict | StatesRequest | Tokens | Pong | Part | Failure | Ack | Slice

_U32 = np.dtype("<u4")
_encoder = msgspec.msgpack.Encoder()
_requests: "msgspec.msgpack.Decoder[Request]" = msgspec.msgpack.Decoder(Request)
_replies: "msgspec.msgpack.Decoder[Reply]" = msgspec.msgpack.Decoder(Reply)

# Anything that holds the bytes of a frame: what arrived is a view of ZeroMQ's own memory.
Buffer = bytes | memoryview
M = TypeVar("M", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)


def decode_request(header: Buffer) -> Request:
    """A device's header; `MalformedError` says what is wrong with it."""
    return decode_checked(_requests, header)


def is_hint(header: Buffer) -> bool:
    """Whether a header is a hint's, right or wrong, by its first bytes alone."""
    # a msgpack array of fewer than 16 elements, then a string of 4 bytes
    return bytes(header[1:6]) == b"\xa4hint"


def decode_reply(header: Buffer) -> Reply:
    """An edge's header; `MalformedError` says what is wrong with it."""
    return decode_checked(_replies, header)


def decode_checked(
    decoder: "msgspec.msgpack.Decoder[M]", header: Buffer, most: int = HEADER_BYTES
) -> M:
    """A header of the types that ``decoder`` knows; `MalformedError` says what is wrong with it."""
    if len(header) > most:
        raise MalformedError(f"The header has {len(header)} bytes; the limit is {most}.")
    try:
        message = decoder.decode(header)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        why = one_line(str(error))  # it may quote the header
        raise MalformedError(f"The header is not a known message: {why}.") from error
    for name in _text_fields(type(message)):
        msgspec.structs.force_setattr(message, name, one_line(getattr(message, name)))
    return message


@cache
def _text_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields of a message that are words."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type == Text)


def _decode_grammar(grammar: Buffer) -> str:
    if len(grammar) > MAX_GRAMMAR:
        raise TooLargeError(f"The grammar has {len(grammar)} bytes; {MAX_GRAMMAR} is the most.")
    try:
        return bytes(grammar).decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"The grammar is no UTF-8: {error}.") from error


def as_frame(array: NDArray[Any]) -> memoryview:
    """The bytes of an array as a frame, without a copy where it is contiguous already."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
