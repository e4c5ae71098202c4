"""Run a stage of a pipeline: consecutive layers of a model (decentralized §2.2).

A stage receives states and sends states to the next stage; the last stage sends hidden states to
the edge.
"""

import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from pilotfish.base.errors import MalformedError, TargetLostError, UnsupportedError
from pilotfish.edge_runtime.node.work import NodeWork, add_compute_time, make_ready
from pilotfish.edge_runtime.steps import WorkFrames, decode_works, engine_refusals
from pilotfish.engines.engine import StageEngine
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.codecs.hidden import HIDDEN_FORMATS, decode_hidden, encode_hidden
from pilotfish.wire.keys import DeviceKeys, EdgeKeys
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import Attach, Refused, Step, decode_report
from pilotfish.wire.transport import is_loopback

_JOIN_S = 10.0  # time limit (s) for connecting to the next stage
_REPLY_BYTES = 1 << 16  # upper limit of the next stage's messages (bytes), which are only refusals


class StageWork(NodeWork):
    """Stage with its connection to the next stage.

    keys: the node's keys, for this connection. feed_watchdog: function to call before each pass of
    a step.
    """

    def __init__(
        self,
        engine: StageEngine,
        keys: EdgeKeys | None,
        feed_watchdog: Callable[[], None] = lambda: None,
    ) -> None:
        stage = engine.stage
        manifest, cut = stage.artifact.manifest, stage.cut
        self._engine = engine
        self._feed_watchdog = feed_watchdog
        self._vocab = manifest.vocab_size
        self._cut = cut
        self._width = stage.width
        self._keys = keys
        self._form = HIDDEN_FORMATS[0]
        self._next: EdgeChannel | None = None
        self._join_by_s = 0.0
        # number of the channel's connection over which the next stage was reached; 0: not reached
        self._reached = 0
        self.ready = msgspec.structs.replace(
            make_ready(stage, stage.answer_width),
            stage=cut.index,
            stages=cut.count,
            first_layer=cut.first_layer,
            layers=cut.layers,
            whole=cut.whole,
        )

    def attach(self, attach: Attach) -> None:
        """Empty the slots, set the format of states, and connect to the next stage."""
        if attach.states not in HIDDEN_FORMATS or self._cut.first:
            raise UnsupportedError(
                f"This node is {self._cut} of a pipeline: it accepts hidden states in the formats "
                f"{', '.join(HIDDEN_FORMATS)}. (Stage 1 runs in the edge itself.)"
            )
        if self._cut.last == bool(attach.next):
            raise UnsupportedError(
                f"This node is {self._cut}: every stage except the last needs the address of the "
                "next stage, and the last must have none."
            )
        self._expect_safe(attach)
        self.close()
        self._engine.clear_all()
        self._form = attach.states
        if attach.next:
            self._next = EdgeChannel(attach.next, self._keys_for(attach.next_key), _REPLY_BYTES)
            self._join_by_s, self._reached = time.monotonic() + _JOIN_S, 0

    def run_step(self, step: Step, frames: Sequence[Buffer]) -> list[Buffer] | None:
        """Run the layers; send the states to the next stage, or return the last stage's frame."""
        begun_ns = time.monotonic_ns()
        if len(frames) != 3:
            raise MalformedError(f"A step to a stage has 3 frames, not {len(frames)}.")
        sent = WorkFrames(step.items, *frames[:2])
        works = decode_works(sent, self._engine, self._vocab)
        states = decode_hidden(frames[2], sent.size, self._width, self._form)
        with engine_refusals():
            outputs = self._engine.run(works, states, self._feed_watchdog)
        try:
            frame = encode_hidden(outputs, self._form) if len(outputs) else b""
        except ValueError as error:
            raise UnsupportedError(f"{error} Configure another format of states.") from error
        if self._next is None:
            return [frame]
        try:
            self._next.send(add_compute_time(step, begun_ns), (*frames[:2], frame))
        except zmq.Again as error:
            raise TargetLostError(f"{self._cut} can no longer reach the next stage.") from error
        return None

    @property
    def joined(self) -> bool:
        """Whether the next stage is connected; raises `TargetLostError` if that has failed."""
        if self._next is None:
            return True
        self._read_next(self._next)
        if self._next.attempts.refuses_key:
            raise TargetLostError(
                f"The next stage at {self._next.endpoint} refuses the key of {self._cut}: put "
                "this node's edge.pub on the allow-list there."
            )
        if self._reached and self._reached != self._next.connections:
            raise TargetLostError(f"{self._cut} has lost the next stage.")
        if not self._next.connected:
            if self._reached or time.monotonic() > self._join_by_s:
                raise TargetLostError(
                    f"{self._cut} cannot reach the next stage at {self._next.endpoint}."
                )
            return False
        self._reached = self._next.connections
        return True

    def _read_next(self, following: EdgeChannel) -> None:
        """Read the next stage's messages; raise `TargetLostError` for a refusal."""
        following.read_events()
        while (message := following.receive_raw(0.0)) is not None:
            report = decode_report(message[0])
            if isinstance(report, Refused):
                raise TargetLostError(f"The stage after {self._cut} refuses: {report.message}")

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """Sockets and descriptors of the connection to the next stage."""
        return () if self._next is None else self._next.sources

    def close(self) -> None:
        """Close the connection to the next stage."""
        if self._next is not None:
            self._next.close(0.0)
            self._next = None

    def _expect_safe(self, attach: Attach) -> None:
        """Raise `UnsupportedError` if the connection to the next stage would be unsafe.

        The connection must be encrypted, or loopback on a node without keys.
        """
        if attach.next and not attach.next.startswith("tcp://"):
            raise UnsupportedError(
                f"{attach.next!r} is not an address of a node; write tcp://HOST:PORT."
            )
        bare = attach.next and not attach.next_key
        if bare and (self._keys is not None or not is_loopback(attach.next)):
            raise UnsupportedError(
                f"{self._cut} sends nothing to {attach.next} without the public key of that node: "
                "name the key in the list of stages."
            )

    def _keys_for(self, key: bytes) -> DeviceKeys | None:
        if not key:
            return None
        if self._keys is None:
            raise UnsupportedError(
                f"{self._cut} has no keys, but its next stage has keys: use --keys."
            )
        return DeviceKeys(self._keys.secret, zmq.curve_public(self._keys.secret), key)
