"""A relay that reads the messages that pass, as ZeroMQ frames them without keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from tests.support.relay import Relay

GREETING = 64  # bytes of ZMTP 3 before the first frame
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame


class Message(NamedTuple):
    """A message's kind, its bytes, and the same if each number of its header took one.

    Times differ in length from run to run, and of the link a device may not know all yet.
    """

    kind: str
    size: int
    steady: int


class Tap(Relay):
    """Relays, and lists the messages of all connections, up and down, until they are cleared."""

    def __init__(self, target: str) -> None:
        self.up: list[Message] = []
        self.down: list[Message] = []
        super().__init__(target)

    def readers(self) -> tuple[Callable[[bytes], None], Callable[[bytes], None]]:
        """Return what takes the bytes of a new connection, up and down."""
        return Reader(self.up).feed, Reader(self.down).feed


class Reader:
    """Reads one direction of a connection; whole messages go to ``messages``."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages
        self._stream = bytearray()
        self._at = GREETING
        self._frames: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """Take in bytes."""
        self._stream += data
        while self._at + 1 < len(self._stream):
            flags = self._stream[self._at]
            begin = self._at + (9 if flags & LONG else 2)
            end = begin + int.from_bytes(self._stream[self._at + 1 : begin], "big")
            if end > len(self._stream):
                return
            self._at = end
            if not flags & COMMAND:
                self._frames.append(bytes(self._stream[begin:end]))
                if not flags & MORE:
                    self._messages.append(_message(self._frames))
                    self._frames = []


def _message(frames: Sequence[bytes]) -> Message:
    header = msgspec.msgpack.decode(frames[0])
    steady = len(msgspec.msgpack.encode(_without_numbers(header)))
    size = sum(map(len, frames))
    return Message(header[0], size, size - len(frames[0]) + steady)


def _without_numbers(value: Any) -> Any:
    """Return a header with 0 for every number and for what is not known."""
    if isinstance(value, list):
        return [_without_numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_numbers(each) for key, each in value.items()}
    return 0 if value is None or type(value) in (int, float) else value
