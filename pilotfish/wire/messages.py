"""The headers of all messages, typed and bounded; `docs/wire.md` is the specification.

A message is one ZeroMQ multipart message: a msgpack header, then raw little-endian array frames. A
header is a msgpack array: the type's name, then the fields in the order of declaration. Only
`Hello` and `Welcome` may have more fields, so that newer versions can extend them. Unknown types,
wrong numbers of fields and values outside their bounds raise `MalformedError`. Arrays are never
inside a header, and never copied.

Strings from the peer reach logs, terminals and JSON. So a `Name` must be printable ASCII, and
`decode_checked` makes each `Text` one printable line.
"""

from functools import cache
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError
from pilotfish.base.prose import MOST_CHARACTERS, one_line
from pilotfish.base.tracing import TRACEPARENT, TRACEPARENT_LENGTH
from pilotfish.speculation.channel import Channel
from pilotfish.speculation.logits_options import MOST_BIASED

VERSION: Final = 4
HEADER_BYTES: Final = 16 * 1024
MAX_FRAMES: Final = 8  # maximum number of array frames in a message
MAX_WINDOW: Final = 128
MAX_OPTIONS: Final = 32  # maximum number of options of a protocol
MAX_NOTES: Final = 16  # maximum number of notes of a round
MAX_HIDDEN: Final = 65536  # maximum width of a drafter's hidden states
MAX_PROBE: Final = 256 * 1024  # maximum bytes of a ping
MAX_TRAIN: Final = 16  # maximum pongs of a train
MAX_TRAIN_BYTES: Final = 8 * 1024  # maximum bytes of a pong's frame in a train
PART_BYTES: Final = 64 * 1024  # bytes of a vocabulary's part before compression
MAX_LOGPROBS: Final = 20  # maximum number of likeliest tokens with log-probabilities, per position
MAX_GRAMMAR: Final = 64 * 1024  # maximum bytes of a grammar
MAX_VOCABULARY: Final = 64 * 1024 * 1024  # maximum bytes of all parts of a vocabulary together
MAX_CHUNK: Final = 256 * 1024  # maximum bytes of a transfer's chunk

U31 = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
Seed = U63
SessionId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
TransferId = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Digest = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Name = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[ -~]*\Z")]
# Free text; `decode_checked` makes it one printable line.
Text = Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)]
# W3C Trace Context, version 00; an error about one does not quote it.
Traceparent = Annotated[str, msgspec.Meta(max_length=TRACEPARENT_LENGTH, pattern=TRACEPARENT)]


class Header(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """Base of all headers."""


class HeaderWithOption(Header, frozen=True):
    """A header whose last fields take no byte while they are None: `encode` leaves them out.

    omittable: the number of these fields.
    """

    omittable: ClassVar[int] = 1


class Limits(Header, frozen=True):
    """Limits for one client."""

    context: U31  # maximum tokens of a session, prompt and answer together
    window: U31  # maximum draft tokens of a round
    message_bytes: U31  # maximum bytes of a message, header and frames together
    sessions: U31  # maximum open sessions of one client


# Device to edge


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="hello", gc=False):
    """The first message of a connection. A newer device may send more fields.

    Fields with defaults may be missing, so that an edge can read the version of any device.
    """

    version: U31
    tokenizer: Text  # fingerprint of the drafter's tokenizer
    vocab_size: U31  # without padding
    padded_vocab_size: U31
    hidden_size: U31
    bridges: bool = False  # the device can draft for a target of another vocabulary
    drafter: Name = ""  # origin of the drafter's weights; selects the edge's decision head
    # a reply with more bytes of frames crosses in slices; 0: the device accepts no slices
    reply_bytes: U31 = 0


class Chunk(Header, tag="chunk", frozen=True):
    """Bytes of a large request from ``offset`` on, in frame 0.

    `wire.transfer.pack` makes the bytes of the message. An empty chunk asks how many bytes of the
    message the edge has.
    """

    transfer: TransferId
    offset: U31
    total: U31  # bytes of the message


class DecisionConditions(Header, frozen=True):
    """The drafter and the link, as inputs of an edge's decision head.

    drafter: the origin of the drafter's weights. hidden_size: width d of its states. The other
    fields are the state of the link, which the device measured before the request (wisv §III-A:
    CSI); None: unknown.
    """

    drafter: Name
    # at least 3: the length of narrower states does not determine their format
    hidden_size: Annotated[int, msgspec.Meta(ge=3, le=MAX_HIDDEN)]
    rtt_s: float | None = None
    up_bps: float | None = None
    down_bps: float | None = None
    loss: float | None = None

    @property
    def channel(self) -> Channel:
        """The link's state; raises `MalformedError` for impossible values."""
        try:
            return Channel(
                rtt_s=self.rtt_s, up_bps=self.up_bps, down_bps=self.down_bps, loss=self.loss
            )
        except ValueError as error:
            raise MalformedError(f"The link's state is unusable: {error}") from error


class LogitsOptionsMsg(Header, frozen=True):
    """Changes to a generation's logits before sampling.

    since: number of prompt tokens; the penalties count the answer's tokens, which follow. grammar:
    the grammar's kind (frame 1 of the `Begin` has its text in UTF-8); "": no grammar, no frame.
    """

    since: U31
    # token and bias; a duplicate token is malformed
    logit_bias: Annotated[list[tuple[U31, float]], msgspec.Meta(max_length=MOST_BIASED)] = []
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: Name = ""


class Begin(HeaderWithOption, tag="begin", frozen=True):
    """The start of a generation: the edge keeps the session's first ``keep`` tokens.

    It appends the ids in frame 0. A session that the edge does not know starts empty, so it needs
    ``keep`` = 0. The last frame has ``predicted`` ids that the answer is expected to have, encoded
    as in frame 0; None: there is no such frame. traceparent: the device's span, whose child the
    edge's is; only for an edge whose `Welcome` has ``traces``.
    """

    omittable: ClassVar[int] = 2

    session: SessionId
    generation: U31
    keep: U31
    hash: Digest  # hash of the kept tokens
    protocol: Name
    seed: Seed
    temperature: float
    top_k: U31
    top_p: float
    # options that differ from their defaults: the protocol's, and those of the request that have no
    # field here (`wire.begin`)
    options: Annotated[dict[Name, Any], msgspec.Meta(max_length=MAX_OPTIONS)] = {}
    # for protocols that decide by the state of the link
    conditions: DecisionConditions | None = None
    min_p: float = 0.0
    shape: LogitsOptionsMsg | None = None
    # number of likeliest tokens to send with each token's log-probability; None: send none
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    # like ``logprobs``, but for the tokens before the answer; sent with the first reply
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    predicted: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    traceparent: Traceparent | None = None


class Window(Header, tag="window", frozen=True):
    """A round's draft: frame 0 holds the ids, the protocol defines the other frames."""

    session: SessionId
    generation: U31
    start: U31  # position of the window's first token
    hash: Digest  # hash of the committed tokens


class States(Header, tag="states", frozen=True):
    """The answer to a `StatesRequest`: frame 0 holds the drafter's hidden states, in that order."""

    session: SessionId
    generation: U31
    start: U31


class Pull(Header, tag="pull", frozen=True):
    """A request that the target generate ``count`` tokens (`stream`, `ahead`)."""

    session: SessionId
    generation: U31
    start: U31
    hash: Digest
    count: U31


class Hint(Header, tag="hint", frozen=True):
    """Drafts for the target's next passes (`ahead`).

    Frame 0: ids [n]; frame 1: acceptance probabilities u8 [n]. The edge never answers a hint, and
    drops a hint that does not fit.
    """

    session: SessionId
    generation: U31
    start: U31  # position of the first draft
    hash: Digest  # hash of the tokens before the first draft, committed or hinted


class Cancel(Header, tag="cancel", frozen=True):
    """A request to stop the generation; not answered."""

    session: SessionId
    generation: U31


class Close(Header, tag="close", frozen=True):
    """A request to end the session; not answered."""

    session: SessionId


class Ping(Header, tag="ping", frozen=True):
    """A request for a `Pong` at once, even while the target is busy; may have a frame."""

    nonce: U63


class Train(Header, tag="train", frozen=True):
    """A request for ``pongs`` `Pong`s at once, each with ``bytes`` random bytes in a frame.

    The train itself may have a frame, which no pong returns.
    """

    nonce: U63
    pongs: Annotated[int, msgspec.Meta(ge=1, le=MAX_TRAIN)]
    bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_TRAIN_BYTES)]  # 0: no frame


class Fetch(Header, tag="fetch", frozen=True):
    """A request for a part of the target's vocabulary; ``part`` counts from 0."""

    vocabulary: Name  # digest of the vocabulary, from the `Welcome`
    part: U31


class More(Header, tag="more", frozen=True):
    """A request for at most ``bytes`` bytes of a sliced reply, from ``offset`` on."""

    transfer: TransferId
    offset: U31
    bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK)]


# Edge to device


class PassTime(Header, frozen=True):
    """Duration of a target pass over ``tokens`` tokens of a session, measured at start-up."""

    tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    ns: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="welcome", gc=False):
    """The answer to `Hello`. A newer edge may send more fields."""

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
    sent_ns: U63  # received_ns and sent_ns: on the edge's monotonic clock
    passes: Annotated[list[PassTime], msgspec.Meta(max_length=64)]
    digest: Name  # digest of the target's artifact, different for each precision
    tokenizer: Text  # fingerprint of the target's tokenizer
    vocabulary: Name  # SHA-256 (hex) of the vocabulary; "": `Fetch` is not offered
    vocabulary_bytes: U31
    # pass times of the edge's own drafter, if it has one
    drafts: Annotated[list[PassTime], msgspec.Meta(max_length=64)]
    paced: bool  # the edge's TCP sends at a pace (BBR), and not as fast as the link takes it
    traces: bool = False  # the edge takes the ``traceparent`` of a `Begin`; older edges do not


class Ack(Header, tag="ack", frozen=True):
    """The answer to a `Chunk`: the edge has the message's bytes before ``offset``."""

    transfer: TransferId
    offset: U31


class Slice(Header, tag="slice", frozen=True):
    """Bytes of a large reply from ``offset`` on, in frame 0.

    The edge sends the first slice in place of the reply, and each further slice as the answer to a
    `More`. ``total`` = 0: the edge no longer has this reply.
    """

    transfer: TransferId
    offset: U31
    total: U31  # bytes of the message as packed by `wire.transfer.pack`


class Times(Header, frozen=True):
    """The arrival of a request on the edge's monotonic clock, and the parts of its stay there."""

    received_ns: U63
    held_ns: U63  # time from the arrival until the reply was sent
    queue_ns: U63  # part of held_ns: waiting for a target pass
    verify_ns: U63  # part of held_ns: target pass and verification


class Verdict(Header, tag="verdict", frozen=True):
    """The verdict on a window, which commits the path to node ``accepted``, and then ``token``.

    In a chain ``accepted`` is the number of accepted tokens. Without a token the device samples it
    from the frames and sends it with the next window.
    """

    session: SessionId
    generation: U31
    start: U31
    accepted: U31
    token: U31 | None
    times: Times
    # values of the protocol's counters for this round (`wire.protocols.options`)
    notes: Annotated[list[U31 | NotNegative], msgspec.Meta(max_length=MAX_NOTES)] = []


class StatesRequest(Header, tag="inquiry", frozen=True):
    """A request for the drafter's hidden states, by which the edge will decide on a window.

    Frame 0: indices of the tokens in the window, from 0, ascending, one byte each.
    """

    session: SessionId
    generation: U31
    start: U31
    times: Times


class Tokens(HeaderWithOption, tag="tokens", frozen=True):
    """Committed ids from position ``start`` on, in frame 0 (`stream`, `ahead`).

    Under `ahead`: the pass included ``drafted`` drafts of this ``source``; the first ``accepted``
    ids are accepted drafts. omitted_mass: from a federation, the probability that its workers left
    out, summed over the positions of these drafts and the next one; None in repeated tokens.
    """

    session: SessionId
    generation: U31
    start: U31
    times: Times
    source: Name = ""
    drafted: U31 = 0
    accepted: U31 = 0
    omitted_mass: NotNegative | None = None


class Pong(Header, tag="pong", frozen=True):
    """The answer to a `Ping`, with the ping's frame if it had one, or an answer to a `Train`.

    segments, repeated: TCP data segments that the edge has sent on this connection, and how many of
    them again; both 0 if it does not know, and in answers to a `Train`.
    """

    nonce: U63
    received_ns: U63
    sent_ns: U63
    segments: U31 = 0
    repeated: U31 = 0


class Part(Header, tag="part", frozen=True):
    """A part of a vocabulary: frame 0 is a zlib stream of `PART_BYTES` bytes (the last: fewer).

    The parts together are the bytes of `engines.vocabulary.Vocabulary.encode`.
    """

    vocabulary: Name
    part: U31


class Failure(Header, tag="failure", frozen=True):
    """A typed error; the optional fields name the request, if it is known."""

    code: Name
    message: Text
    session: SessionId | None = None
    generation: U31 | None = None
    start: U31 | None = None


DeviceMessage = (
    Hello
    | Begin
    | Window
    | States
    | Pull
    | Hint
    | Cancel
    | Close
    | Ping
    | Train
    | Fetch
    | Chunk
    | More
)
Reply = Welcome | Verdict | StatesRequest | Tokens | Pong | Part | Failure | Ack | Slice

_U32 = np.dtype("<u4")
_encoder = msgspec.msgpack.Encoder()
_device_messages: "msgspec.msgpack.Decoder[DeviceMessage]" = msgspec.msgpack.Decoder(DeviceMessage)
_replies: "msgspec.msgpack.Decoder[Reply]" = msgspec.msgpack.Decoder(Reply)

# The bytes of a frame; a received frame is a view of ZeroMQ's memory.
Buffer = bytes | memoryview
M = TypeVar("M", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """Encode the header frame of a message."""
    if not isinstance(message, HeaderWithOption):
        return _encoder.encode(message)
    fields = msgspec.structs.astuple(message)
    sent = len(fields)
    while sent > len(fields) - message.omittable and fields[sent - 1] is None:
        sent -= 1
    if sent == len(fields):
        return _encoder.encode(message)
    return _encoder.encode([message.__struct_config__.tag, *fields[:sent]])


def decode_device_message(header: Buffer) -> DeviceMessage:
    """Decode a device's header; raises `MalformedError`."""
    return decode_checked(_device_messages, header)


def is_hint(header: Buffer) -> bool:
    """Return whether a header, valid or not, is a `Hint`'s, by its first bytes alone."""
    # a msgpack array of fewer than 16 elements, then a string of 4 bytes
    return header[1:6] == b"\xa4hint"


def decode_reply(header: Buffer) -> Reply:
    """Decode an edge's header; raises `MalformedError`."""
    return decode_checked(_replies, header)


def decode_checked(
    decoder: "msgspec.msgpack.Decoder[M]", header: Buffer, most: int = HEADER_BYTES
) -> M:
    """Decode a header of at most ``most`` bytes; raises `MalformedError`."""
    if len(header) > most:
        raise MalformedError(f"The header has {len(header)} bytes; the limit is {most}.")
    try:
        message = decoder.decode(header)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        why = one_line(str(error))  # the error may quote the header
        raise MalformedError(f"The header is not a known message: {why}.") from error
    for name in _text_fields(type(message)):
        msgspec.structs.force_setattr(message, name, one_line(getattr(message, name)))
    return message


@cache
def _text_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the names of a message's `Text` fields."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type == Text)


def as_frame(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array as a frame, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
