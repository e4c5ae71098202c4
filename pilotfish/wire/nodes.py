"""The message headers between an edge and its target's nodes; `docs/wire.md` specifies them.

A node has a whole model (a worker of a federation) or one stage of a pipeline, with as many slots
(places for a sequence) as the edge. The edge greets a node, attaches it, and sends it steps: passes
over some slots, each with a whole sequence. Of a sequence, only the tokens that are not in the
slot's chain are sent. A worker answers each step with the top K of every row. A stage sends the
step on to the next stage, with the states that it computed, and the last stage answers. As between
device and edge, a message is a msgpack header and raw little-endian frames.

Each attachment has a random name, its *incarnation*. A node that was restarted or attached again
has empty slots, and refuses steps of other incarnations.
"""

from typing import Annotated, Final

import msgspec

from pilotfish.speculation.logits_options import MOST_BIASED
from pilotfish.wire.messages import (
    MAX_WINDOW,
    U31,
    U63,
    Buffer,
    Header,
    HeaderWithOption,
    Name,
    Text,
    decode_checked,
)

VERSION: Final = 3
MAX_ITEMS: Final = 1024
HEADER_BYTES: Final = 256 * 1024  # maximum size of a header: a step may have an item for each slot
Incarnation = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


# To a node


class Greet(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="greet", gc=False):
    """The first message of a connection. A newer version may send more fields."""

    version: U31


class Attach(HeaderWithOption, tag="attach", frozen=True):
    """The order to attach the node to this edge, with empty slots.

    top_k, values: K and the format of a worker's answers (`wire.codecs.topk`). states: the format
    of states between stages (`wire.codecs.hidden`). next, next_key: address and public key (Z85,
    empty without keys) of the next stage; an empty address: the edge itself. mass: with it a worker
    chooses K for each row, the smallest number of tokens whose probabilities have a sum of at least
    ``mass``, and at most ``top_k``; None: K is ``top_k`` in all rows.
    """

    incarnation: Incarnation
    top_k: U31 = 0
    values: Name = ""
    states: Name = ""
    next: Text = ""
    next_key: Annotated[bytes, msgspec.Meta(max_length=40)] = b""
    mass: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None


class Item(Header, frozen=True):
    """One slot's work in a step.

    The slot's sequence is: the first ``start`` tokens of the slot's chain; ``path`` tokens that are
    a path from the root of the slot's last tree; and ``size`` new tokens, the last ``nodes`` of
    which are a tree. The slot drops all else; with ``start`` 0 it is emptied first. rows: the
    number of last tokens for which the node answers. temperature: the sampling temperature of these
    answers; 0 is greedy.
    """

    slot: U31
    start: U31
    size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_WINDOW + 1)]
    nodes: Annotated[int, msgspec.Meta(ge=0, le=MAX_WINDOW)] = 0
    path: Annotated[int, msgspec.Meta(ge=0, le=MAX_WINDOW)] = 0
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


class ItemOptions(Header, frozen=True):
    """Changes of the logits of an item's rows, before a worker takes the likeliest tokens.

    since: number of the sequence's tokens before the answer, for the penalties. biases: number of
    biased tokens. The penalties are those of `wire.messages.LogitsOptionsMsg`. masked: whether each
    row of the item has a mask.
    """

    since: U31
    biases: Annotated[int, msgspec.Meta(ge=0, le=MOST_BIASED)] = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    masked: bool = False


class Step(HeaderWithOption, tag="step", frozen=True):
    """A pass over some slots, each at most once.

    Frame 0: path and new tokens of all items, u32. Frame 1: the parents of all tree nodes, i16,
    numbered within their tree; −1: the token before the tree. Frame 2, only for a stage: the states
    of all new tokens. compute_ns: compute time of each stage that has run the step.

    options: an entry for each item, only for a worker and only if an item has changes of logits.
    Such a step has two more frames. Frame 2: the biases of all items, each a token u32 and its bias
    f32. Frame 3: the masks of all masked items' rows (`wire.codecs.masks`); empty without such
    rows.
    """

    incarnation: Incarnation
    number: U63
    items: Annotated[list[Item], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
    compute_ns: Annotated[list[U63], msgspec.Meta(max_length=256)] = msgspec.field(
        default_factory=list
    )
    options: Annotated[list[ItemOptions | None], msgspec.Meta(max_length=MAX_ITEMS)] | None = None


# From a node


class Ready(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ready", gc=False):
    """The node's model and slots. A newer version may send more fields.

    stage, stages: number of the stage and of all stages; 0 and 0 for a whole model. first_layer,
    layers: the stage's first layer and number of layers. whole: digest of the artifact that was
    cut into stages.
    """

    version: U31
    software: Name
    model: Text
    digest: Name
    tokenizer: Text  # fingerprint of the tokenizer
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
    """The answer to `Attach`: the node serves this edge, and a stage has reached the next stage."""

    incarnation: Incarnation


class Scored(Header, tag="scored", frozen=True):
    """The answer to a `Step`: frame 0 holds a worker's rows, or the last stage's hidden states."""

    incarnation: Incarnation
    number: U63
    compute_ns: Annotated[list[U63], msgspec.Meta(max_length=256)]


class Refused(Header, tag="refused", frozen=True):
    """A typed error, which ends the attachment; the node may be attached again."""

    incarnation: Incarnation | None
    code: Name
    message: Text


Order = Greet | Attach | Step
Report = Ready | AttachReply | Scored | Refused

_orders: "msgspec.msgpack.Decoder[Order]" = msgspec.msgpack.Decoder(Order)
_reports: "msgspec.msgpack.Decoder[Report]" = msgspec.msgpack.Decoder(Report)


def decode_order(header: Buffer) -> Order:
    """Decode a header sent to a node; raises `MalformedError`."""
    return decode_checked(_orders, header, HEADER_BYTES)


def decode_report(header: Buffer) -> Report:
    """Decode a header sent by a node; raises `MalformedError`."""
    return decode_checked(_reports, header, HEADER_BYTES)
