"""A client of a node that can send anything an edge could."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.speculation.ensemble import top_rows
from pilotfish.wire.codecs.topk import decode_topk
from pilotfish.wire.keys import DeviceKeys, EdgeKeys
from pilotfish.wire.messages import encode
from pilotfish.wire.nodes import (
    Attach,
    AttachReply,
    Item,
    Refused,
    Report,
    Scored,
    Step,
    decode_report,
)
from tests.conftest import CONTEXT, VOCAB
from tests.support.federating import SESSIONS
from tests.support.hostile import WAIT_S, RawClient

KEPT = 8
# a node's refusals; "internal" would be a fault of the node
CODES = {"malformed", "too-large", "token-out-of-range", "unsupported", "conflict"}


class RawEdge(RawClient):
    """A bare socket to a node. folder: the edge's keys; node: the node's public key."""

    def __init__(self, endpoint: str, folder: Path | None = None, node: bytes = b"") -> None:
        keys = None
        if folder is not None:
            secret = EdgeKeys.load(folder).secret
            keys = DeviceKeys(secret, zmq.curve_public(secret), node)
        super().__init__(endpoint, keys)

    def report(self, timeout_s: float = WAIT_S) -> tuple[Report, list[bytes]]:
        """Receive the node's next report."""
        assert self.socket.poll(int(timeout_s * 1000)), "the node said nothing"
        header, *frames = self.socket.recv_multipart()
        return decode_report(header), frames

    def order(self, order: msgspec.Struct, *frames: bytes) -> tuple[Report, list[bytes]]:
        """Send a well-formed message and receive the node's report."""
        self.send(encode(order), *frames)
        return self.report()

    def refused(self, code: str) -> Refused:
        """Assert that the node's next report is a refusal of this kind."""
        reply, _ = self.report()
        assert isinstance(reply, Refused), reply
        assert reply.code == code, reply
        return reply


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<u4").tobytes()


def parents(*nodes: int) -> bytes:
    return np.array(nodes, "<i2").tobytes()


def item(**changes: Any) -> Item:
    return Item(**{"slot": 0, "start": 0, "size": 1, "rows": 1} | changes)


class Tenant:
    """A raw edge that has attached a worker, and its steps."""

    def __init__(self, edge: RawEdge) -> None:
        self.edge = edge
        self.attach()

    def attach(self) -> None:
        self.number = 0
        self.incarnation = secrets.token_bytes(16)
        attach = Attach(incarnation=self.incarnation, top_k=KEPT, values="fp32")
        reply, _ = self.edge.order(attach)
        assert reply == AttachReply(incarnation=self.incarnation)

    def step(self, items: Sequence[Item], *frames: bytes) -> tuple[Any, list[bytes]]:
        self.number += 1
        step = Step(incarnation=self.incarnation, number=self.number, items=list(items))
        return self.edge.order(step, *frames)

    def proves(self, expected: NDArray[np.float32]) -> None:
        """Assert that the worker answers a valid step correctly."""
        reply, frames = self.step([item(size=3, rows=2)], ids(5, 6, 7), b"")
        assert isinstance(reply, Scored)
        assert reply.number == self.number
        np.testing.assert_array_equal(decode_topk(frames[0], 2, KEPT, VOCAB).values, expected)


def expected_of(model: Path) -> NDArray[np.float32]:
    """Compute the answer to the step of `Tenant.proves`: probabilities f32 [2, K]."""
    decoder = Decoder(model, slots=SESSIONS, context=CONTEXT, threads=1)
    (output,) = decoder.forward([Pass(0, np.array([5, 6, 7]), 2)])
    values: NDArray[np.float32] = top_rows(output.logits, 0.0, KEPT).values
    return values
