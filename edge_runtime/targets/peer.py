"""One node as the edge knows it: away, here, or attached.

The connection comes back by itself, and then the node is greeted and attached anew: one that was
gone, for however short, counts as one that holds nothing. A node that cannot be used, since it
serves another model, told nonsense, or goes away at the first step, is left alone for a while and
then asked again: each time for twice as long, until it has given a good answer. What it says
meanwhile is not listened to.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq

from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.errors import KeysError, MalformedError, TargetLostError
from pilotfish.wire.keys import DeviceKeys, EdgeKeys
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import (
    VERSION,
    Attach,
    Attached,
    Greet,
    Ready,
    Refused,
    Scored,
    Step,
    decode_report,
)
from pilotfish.wire.transport import is_loopback

_log = logging.getLogger("pilotfish.edge")

_RETRY_S = (0.5, 30.0)  # how long a node that cannot be used is left alone: doubling, up to this
_MESSAGES = 64  # taken in one turn
# why there may be no handshake; with a key, and without
_MUTE = {
    True: "it answers, but not to this handshake: is the key in the list its present edge.pub?",
    False: "it answers, but not to this handshake: it may demand keys (key = ..., and --keys)",
}


class NodeAddress(NamedTuple):
    """Where a node is. key: its public key in Z85; "" where there are no keys."""

    name: str
    address: str
    key: bytes = b""


class Peer:
    """A connection to one node, and what became of it. Nothing here waits.

    expect: says what is wrong with what the node holds; "" if nothing is. happened: is told what is
    worth counting, in one word. Raises `UnsupportedError` for an address that is none.
    """

    def __init__(
        self,
        place: NodeAddress,
        keys: EdgeKeys | None,
        message_bytes: int,
        expect: Callable[[Ready], str],
        happened: Callable[[str], None],
    ) -> None:
        self.place = place
        self._expect = expect
        self._happened = happened
        own = None
        if keys is not None and place.key:
            own = DeviceKeys(keys.secret, zmq.curve_public(keys.secret), place.key)
        self._channel = EdgeChannel(place.address, own, message_bytes)
        self._connections = 0  # of the channel's, the last one that was noted
        self._broken = 0  # its broken handshakes until then
        self._retry_s = _RETRY_S[0]
        self._alone_until_s = 0.0
        self._greeted = False
        self._doubtful = False  # it was sent a step since it was attached, and not one good answer
        self._reason = "not there yet"
        self.received_bytes = 0  # of all that it said, headers included
        self.ready: Ready | None = None  # what it holds, if that will do
        self._asked: bytes | None = None  # the incarnation that it was asked to be attached as
        self.incarnation: bytes | None = None  # as which it is attached

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """What may be polled to learn of news."""
        return self._channel.sources

    @property
    def unattached(self) -> Ready | None:
        """What the node holds, if it is to be attached now."""
        return None if self._asked else self.ready

    @property
    def trouble(self) -> str:
        """Why it cannot be used at the moment; "" if it can."""
        return "" if self.incarnation else f"{self.place.name}: {self._reason}"

    @property
    def due_s(self) -> float | None:
        """Seconds until it is to be asked again."""
        if self._greeted or not (self._channel.connected or self._channel.given_up):
            return None
        return max(0.0, self._alone_until_s - time.monotonic())

    def receive(self) -> list[tuple[Scored, list[Buffer]]]:
        """Take in what has arrived; its answers, of the attachment that holds."""
        self._watch()
        answers = []
        for _ in range(_MESSAGES):
            taken = self._channel.take(0.0)
            self._watch()
            if taken is None:
                break
            self.received_bytes += taken[2]
            if not self._greeted:
                continue
            try:
                report = decode_report(taken[0])
            except MalformedError as error:
                self._happened("lied")
                self.leave(f"it talks nonsense: {error}")
                continue
            match report:
                case Ready():
                    self._welcome(report)
                case Attached():
                    if report.incarnation == self._asked:
                        self.incarnation = self._asked
                        _log.info("%s is attached", self.place.name)
                case Refused():
                    if report.incarnation in (None, self._asked):
                        if self.incarnation and report.code == TargetLostError.code:
                            self._retry_s = _RETRY_S[0]  # it lost the next one: no fault of its own
                        self.leave(report.message)
                case Scored():
                    if report.incarnation == self.incarnation:
                        answers.append((report, taken[1]))
        return answers

    def attach(self, attach: Attach) -> None:
        """Ask the node to be this edge's; it is when ``incarnation`` says so."""
        self._asked, self.incarnation = attach.incarnation, None
        self._reason, self._doubtful = "being attached", False
        self._send(attach)

    def send(self, step: Step, frames: Sequence[Buffer]) -> int:
        """Hand a step to an attached node; returns its bytes. If it cannot be sent, it is away."""
        self._doubtful = True
        return self._send(step, frames)

    def leave(self, reason: str) -> None:
        """Leave it alone for a while: it cannot be used."""
        if self.ready is not None or reason != self._reason:
            _log.warning("%s cannot be used: %s", self.place.name, reason)
            self._happened("refused")
        self._reason = reason
        self._forget()
        self._put_off()

    def proved(self) -> None:
        """It gave a good answer."""
        self._retry_s, self._doubtful = _RETRY_S[0], False

    def close(self) -> None:
        """Close the connection."""
        self._channel.close(0.0)

    def _watch(self) -> None:
        """Note a connection that was lost, and greet one that is new, or is to be tried again."""
        channel = self._channel
        channel.catch_up()
        if self._connections != channel.connections or not channel.connected:
            self._note_loss()
        if channel.connected:
            self._connections, self._broken = channel.connections, channel.broken_handshakes
        elif channel.denied:
            channel.denied = False
            self.leave("it does not let this edge in: put edge.pub on its allow-list")
        elif channel.broken_handshakes > self._broken:
            self._broken = channel.broken_handshakes
            self._reason = _MUTE[bool(self.place.key)]
        if channel.given_up and not self._alone:
            channel.try_again()
        if channel.connected and not self._greeted and not self._alone:
            self._greeted = True
            self._send(Greet(version=VERSION))

    @property
    def _alone(self) -> bool:
        """It is being left alone."""
        return time.monotonic() < self._alone_until_s

    def _note_loss(self) -> None:
        if self._asked:
            _log.warning("%s is gone", self.place.name)
            self._happened("gone")
            self._reason = "gone"
            if self._doubtful:
                self._put_off()
        self._forget()

    def _forget(self) -> None:
        """Nothing of what it said holds any more."""
        self.ready = self._asked = self.incarnation = None
        self._greeted = self._doubtful = False

    def _put_off(self) -> None:
        self._alone_until_s = time.monotonic() + self._retry_s
        self._retry_s = min(2.0 * self._retry_s, _RETRY_S[1])

    def _welcome(self, ready: Ready) -> None:
        if ready.version != VERSION:
            self.leave(
                f"it speaks version {ready.version} of the nodes' wire, this edge {VERSION}: "
                "install the same Pilotfish release on both"
            )
        elif reason := self._expect(ready):
            self.leave(reason)
        else:
            self.ready = ready

    def _send(self, message: "Greet | Attach | Step", frames: Sequence[Buffer] = ()) -> int:
        try:
            return self._channel.send(message, frames)
        except zmq.Again:  # it went away just now, and will be heard of
            return 0


def expect_locked(path: Path, places: Sequence[NodeAddress], keys: EdgeKeys | None) -> None:
    """Raise unless everything that leaves this machine goes to a node whose key is known."""
    for place in places:
        if place.key and keys is None:
            raise KeysError(f"{path} names a key for {place.name}, but this edge has none: --keys.")
        if not place.key and (keys is not None or not is_loopback(place.address)):
            raise KeysError(
                f"{path} names no key for {place.name} at {place.address}: beyond loopback, and "
                'wherever the edge has keys, each node needs one (key = "its edge.pub").'
            )
