"""The headers between an edge and the nodes of its target; `docs/wire.md` is the specification.

A node holds a whole model (a worker of a federation) or one stage of a pipeline, with as many slots
as the edge has. The edge greets it, attaches it, and sends it steps: passes over some slots. A
worker answers each with the top K of every row; a stage hands the step on to the next stage with
the states that it has made, and the last one answers. As between device and edge a message is a
msgpack header and raw little-endian frames.

An attachment has a name, its *incarnation*, that cannot be guessed. A node that was restarted,
or is attached anew, has forgotten what its slots held: steps of other incarnations are refused.
"""

from typing import Annotated, Final

import msgspec

from pilotfish.wire.messages import MAX_WINDOW, U31, U63, Buffer, Header, Name, Text, decode_checked

VERSION: Final = 1
MAX_ITEMS: Final = 1024
HEADER_BYTES: Final = 256 * 1024  # a step has an item for each slot
Incarnation = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


# To a node


class Greet(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="greet", gc=False):
    """First message of a connection. More fields are allowed."""

    version: U31


class Attach(Header, tag="attach", frozen=True):
    """From now on the node works for this edge, and its slots are empty.

    kept and values: K, and the format of a worker's answers (`wire.codecs.topk`). states: the
    format of states between stages (`wire.codecs.hidden`). next: the stage to hand steps on to, and
    its public key in Z85, empty without keys; an empty address: the edge itself.
    """

    incarnation: Incarnation
    kept: U31 = 0
    values: Name = ""
    states: Name = ""
    next: Text = ""
    next_key: Annotated[bytes, msgspec.Meta(max_length=40)] = b""


class Item(Header, frozen=True):
    """What one slot does in a step.

    kept: of the tree that its last step ended in, these nodes stay, numbered from 0; None: there
    was none, or none of it stays. Then the slot is cut to ``start`` tokens, and ``size`` tokens are
    appended, of which the last ``nodes`` are a tree. rows: answers are wanted for the last ones.
    temperature: that these are meant for; 0 is greedy.
    """

    slot: U31
    start: U31
    size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_WINDOW + 1)]
    nodes: Annotated[int, msgspec.Meta(ge=0, le=MAX_WINDOW)] = 0
    kept: Annotated[list[U31], msgspec.Meta(max_length=MAX_WINDOW)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


class Step(Header, tag="step", frozen=True):
    """A pass over some slots, each at most once.

    Frame 0: to a worker the tokens of all items, u32; to a stage their states. Frame 1: of all
    nodes of all trees the node before them in their tree, i16, −1 for the token before the tree.
    compute_ns: of the stages that the step has been through.
    """

    incarnation: Incarnation
    number: U63
    items: Annotated[list[Item], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
    compute_ns: Annotated[list[U63], msgspec.Meta(max_length=256)] = msgspec.field(
        default_factory=list
    )


# From a node


class Ready(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ready", gc=False):
    """What the node holds. More fields are allowed.

    stage and stages: which of how many; 0 of 0 for a whole model. first_layer and layers: of the
    stage. whole: digest of the artifact that was cut.
    """

    version: U31
    software: Name
    model: Text
    digest: Name
    tokenizer: Text  # fingerprint
    vocab_size: U31
    hidden_size: U31
    slots: U31
    context: U31
    stage: U31 = 0
    stages: U31 = 0
    first_layer: U31 = 0
    layers: U31 = 0
    whole: Name = ""


class AttachReply(Header, tag="attached", frozen=True):
    """The node is the edge's; a stage reaches the next one."""

    incarnation: Incarnation


class Scored(Header, tag="scored", frozen=True):
    """The answer to a step: frame 0 holds a worker's rows, or the last stage's hidden states."""

    incarnation: Incarnation
    number: U63
    compute_ns: Annotated[list[U63], msgspec.Meta(max_length=256)]


class Refused(Header, tag="refused", frozen=True):
    """A typed error. The attachment it concerns is over; it may be attached anew."""

    incarnation: Incarnation | None
    code: Name
    message: Text


Order = Greet | Attach | Step
Report = Ready | AttachReply | Scored | Refused

_orders: "msgspec.msgpack.Decoder[Order]" = msgspec.msgpack.Decoder(Order)
_reports: "msgspec.msgpack.Decoder[Report]" = msgspec.msgpack.Decoder(Report)


def decode_order(header: Buffer) -> Order:
    """A header that came to a node; `MalformedError` says what is wrong with it."""
    return decode_checked(_orders, header, HEADER_BYTES)


def decode_report(header: Buffer) -> Report:
    """A node's header; `MalformedError` says what is wrong with it."""
    return decode_checked(_reports, header, HEADER_BYTES)
