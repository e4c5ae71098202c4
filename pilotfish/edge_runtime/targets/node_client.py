"""Connection of the edge to one node, which is lost, connected or attached.

After a loss ZeroMQ connects again, even after a long time. The node is then greeted, and attached
with empty slots. A node that is unusable (wrong model, malformed answer, or lost during its first
step) is ignored for a pause and then greeted again. The pause doubles each time until the node
gives a good answer.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq

from pilotfish.base.errors import KeysError, MalformedError, TargetLostError
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.keys import DeviceKeys, EdgeKeys
from pilotfish.wire.link.attempts import ConnectFailure
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import (
    VERSION,
    Attach,
    AttachReply,
    Greet,
    Ready,
    Refused,
    Scored,
    Step,
    decode_report,
)
from pilotfish.wire.transport import is_loopback

_log = logging.getLogger("pilotfish.edge")

_RETRY_S = (0.5, 30.0)  # first and longest pause (s) before an unusable node is greeted again
_MESSAGES = 64  # upper limit of messages that are received in one turn
# whether a key is configured → likely reason for a failed handshake
_MUTE = {
    True: "it does not complete the handshake: check that the key in the list is its present "
    "edge.pub",
    False: "it does not complete the handshake: it may require keys (key = ... in the list, and "
    "--keys)",
}


class NodeAddress(NamedTuple):
    """Name, address and public key (Z85; empty without keys) of a node."""

    name: str
    address: str
    key: bytes = b""


class NodeClient:
    """Connection to one node; its methods never wait.

    check: function that returns the reason why the node's artifact, slots or context do not fit; ""
    if they fit. on_event: function that is called with the name of each event. Raises
    `UnsupportedError` for a malformed address.
    """

    def __init__(
        self,
        node: NodeAddress,
        keys: EdgeKeys | None,
        message_bytes: int,
        check: Callable[[Ready], str],
        on_event: Callable[[str], None],
    ) -> None:
        self.node = node
        self._check = check
        self._on_event = on_event
        device_keys = None
        if keys is not None and node.key:
            device_keys = DeviceKeys(keys.secret, zmq.curve_public(keys.secret), node.key)
        self._channel = EdgeChannel(node.address, device_keys, message_bytes)
        self._connections = 0  # number of the channel's last known connection
        self._failed = 0  # number of the channel's failed handshakes so far
        self._retry_s = _RETRY_S[0]
        self._paused_until_s = 0.0
        self._greeted = False
        self._doubtful = False  # whether the node got a step but has given no good answer yet
        self._reason = "not there yet"
        self.received_bytes = 0  # bytes received, including headers
        self.ready: Ready | None = None  # the node's reply to the greeting, if the node fits
        self._requested: bytes | None = None  # incarnation of the last attach request
        self.incarnation: bytes | None = None  # incarnation of the attachment; None: not attached

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """Sockets and descriptors to poll for events."""
        return self._channel.sources

    @property
    def unattached(self) -> Ready | None:
        """The node's reply to the greeting, if the node fits and no attachment is requested."""
        return None if self._requested else self.ready

    @property
    def problem(self) -> str:
        """Reason why the node cannot be used now; "" if it can be used."""
        return "" if self.incarnation else f"{self.node.name}: {self._reason}"

    @property
    def due_s(self) -> float | None:
        """Seconds until the node is to be contacted again; None: no contact is planned."""
        if self._greeted or not (self._channel.connected or self._channel.attempts.stopped):
            return None
        paused_s = self._paused_until_s - time.monotonic()
        return max(paused_s, self._channel.attempts.wait_s)

    def receive(self) -> list[tuple[Scored, list[Buffer]]]:
        """Read the node's messages; return the answers of the present attachment."""
        self._check_connection()
        answers = []
        for _ in range(_MESSAGES):
            message = self._channel.receive_raw(0.0)
            self._check_connection()
            if message is None:
                break
            self.received_bytes += message[2]
            if not self._greeted:
                continue
            try:
                report = decode_report(message[0])
            except MalformedError as error:
                self._on_event("lied")
                self.detach(f"it sent a malformed message: {error}")
                continue
            match report:
                case Ready():
                    self._welcome(report)
                case AttachReply():
                    if report.incarnation == self._requested:
                        self.incarnation = self._requested
                        _log.info("%s is attached", self.node.name)
                case Refused():
                    if report.incarnation in (None, self._requested):
                        if self.incarnation and report.code == TargetLostError.code:
                            self._retry_s = _RETRY_S[0]  # the next stage failed, not this node
                        self.detach(report.message)
                case Scored():
                    if report.incarnation == self.incarnation:
                        answers.append((report, message[1]))
        return answers

    def attach(self, attach: Attach) -> None:
        """Request the attachment; ``incarnation`` is set when the node confirms the request."""
        self._requested, self.incarnation = attach.incarnation, None
        self._reason, self._doubtful = "being attached", False
        self._send(attach)

    def send(self, step: Step, frames: Sequence[Buffer]) -> int:
        """Send a step to an attached node; return the sent bytes, or 0 if the node is lost."""
        self._doubtful = True
        return self._send(step, frames)

    def detach(self, reason: str) -> None:
        """Detach the node because it is unusable, and ignore it for a pause."""
        self._record_refusal(reason)
        self._forget()
        self._pause()

    def record_success(self) -> None:
        """Record a good answer, so that the next pause is short again."""
        self._retry_s, self._doubtful = _RETRY_S[0], False

    def close(self) -> None:
        """Close the connection."""
        self._channel.close(0.0)

    def _check_connection(self) -> None:
        """Detect a lost connection; greet the node over a new connection, or after a pause."""
        channel, attempts = self._channel, self._channel.attempts
        channel.read_events()
        if self._connections != channel.connections or not channel.connected:
            self._record_loss()
        if channel.connected:
            self._connections = channel.connections
        elif attempts.handshakes_failed > self._failed:
            self._failed = attempts.handshakes_failed
            if attempts.failure is ConnectFailure.KEY:
                # no pause is needed, since the channel's pauses between attempts grow
                self._record_refusal("it refuses this edge's key: put edge.pub on its allow-list")
            elif attempts.failure is ConnectFailure.TIMEOUT:
                self._reason = "it accepts the connection, but sends nothing"
            else:
                self._reason = _MUTE[bool(self.node.key)]
        if channel.connected and not self._greeted and not self._paused:
            self._greeted = True
            self._send(Greet(version=VERSION))

    @property
    def _paused(self) -> bool:
        """Whether the node is ignored now, for a pause."""
        return time.monotonic() < self._paused_until_s

    def _record_refusal(self, reason: str) -> None:
        if self.ready is not None or reason != self._reason:
            _log.warning("%s cannot be used: %s", self.node.name, reason)
            self._on_event("refused")
        self._reason = reason

    def _record_loss(self) -> None:
        if self._requested:
            _log.warning("%s is gone", self.node.name)
            self._on_event("gone")
            self._reason = "gone"
            if self._doubtful:
                self._pause()
        self._forget()

    def _forget(self) -> None:
        """Forget the node's greeting and attachment."""
        self.ready = self._requested = self.incarnation = None
        self._greeted = self._doubtful = False

    def _pause(self) -> None:
        self._paused_until_s = time.monotonic() + self._retry_s
        self._retry_s = min(2.0 * self._retry_s, _RETRY_S[1])

    def _welcome(self, ready: Ready) -> None:
        if ready.version != VERSION:
            older = "the node" if ready.version < VERSION else "this edge"
            self.detach(
                f"it uses version {ready.version} of the node protocol, but this edge uses "
                f"version {VERSION}: upgrade {older}, so that both have the same Pilotfish release"
            )
        elif reason := self._check(ready):
            self.detach(reason)
        else:
            self.ready = ready

    def _send(self, message: "Greet | Attach | Step", frames: Sequence[Buffer] = ()) -> int:
        try:
            return self._channel.send(message, frames)
        except zmq.Again:  # the connection was just lost; its event will follow
            return 0


def expect_encrypted(path: Path, nodes: Sequence[NodeAddress], keys: EdgeKeys | None) -> None:
    """Raise `KeysError` if a connection to a node would not be encrypted.

    Each node must have a key in the list, except loopback nodes of an edge without keys. A listed
    key needs an edge with keys.
    """
    for node in nodes:
        if node.key and keys is None:
            raise KeysError(
                f"{path} names a key for {node.name}, but this edge has no keys: use --keys."
            )
        if not node.key and (keys is not None or not is_loopback(node.address)):
            raise KeysError(
                f"{path} names no key for {node.name} at {node.address}: each node "
                'needs a key (key = "its edge.pub"), unless it is on loopback and the edge has no '
                "keys."
            )
