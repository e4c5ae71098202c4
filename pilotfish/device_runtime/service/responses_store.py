"""Store responses for a while, so that clients can read them again and continue them.

In:  responses, their turns, and the messages that they answered. Out: the same, to the same client
only. Responses stay in memory for an hour; their number and their total size are limited.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pilotfish.device_runtime.service.chat_messages import Message, assistant_message
from pilotfish.device_runtime.service.refusal import Body, RefusalError
from pilotfish.engines.chat_formats.reader import Turn

_LIFETIME_S = 3600.0
_MOST, _MOST_BYTES = 256, 1 << 24  # limits of all clients together: responses, bytes


class _StoredResponse(NamedTuple):
    """A response. body: as sent. conversation: its messages in JSON, the answer last."""

    client: str
    until_s: float
    body: bytes
    conversation: bytes

    @property
    def size(self) -> int:
        """The size in memory in bytes, roughly."""
        return len(self.body) + len(self.conversation)


class ResponseStore:
    """The stored responses by id, the oldest first. Used on the serving loop only.

    Beyond a limit, the client with the largest share loses its oldest response.
    """

    def __init__(
        self,
        *,
        most: int = _MOST,
        most_bytes: int = _MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._clock = clock
        self._responses: dict[str, _StoredResponse] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def store(self, client: str, messages: Sequence[Message], response: Body, turn: Turn) -> None:
        """Store a response to these messages, unless it alone exceeds the limit of bytes."""
        self.expire()
        stored = _StoredResponse(
            client,
            self._clock() + _LIFETIME_S,
            msgspec.json.encode(response),
            msgspec.json.encode([*messages, assistant_message(turn)]),
        )
        if stored.size > self._most_bytes:
            return
        self._responses[response["id"]] = stored
        self._bytes += stored.size
        while len(self._responses) > self._most or self._bytes > self._most_bytes:
            self._drop(self._surplus())

    def body(self, client: str, name: str) -> bytes:
        """Return a client's response; raises `RefusalError` (404) for an unknown id."""
        return self._find(client, name, "response_id").body

    def conversation(self, client: str, name: str) -> list[Message]:
        """Return a response's messages, its answer last; raise as `body` does."""
        stored = self._find(client, name, "previous_response_id")
        messages: list[Message] = msgspec.json.decode(stored.conversation)
        return messages

    def forget(self, client: str, name: str) -> None:
        """Delete a client's response; raises as `body` does."""
        self._find(client, name, "response_id")
        self._drop(name)

    def expire(self) -> None:
        """Delete expired responses."""
        now_s = self._clock()
        while self._responses and now_s >= next(iter(self._responses.values())).until_s:
            self._drop(next(iter(self._responses)))

    def _find(self, client: str, name: str, param: str) -> _StoredResponse:
        self.expire()
        stored = self._responses.get(name)
        if stored is None or stored.client != client:
            raise RefusalError(
                404,
                f"There is no response {name[:80]!r} here: the service keeps only the latest "
                f"responses, for {_LIFETIME_S / 60:g} minutes, and loses them at a restart. Send "
                "the whole conversation as input.",
                code="response_not_found",
                param=param,
                reason="response",
            )
        return stored

    def _surplus(self) -> str:
        """Return the id of the oldest response of the client with the largest share."""
        shares: Counter[str] = Counter()
        for stored in self._responses.values():
            shares[stored.client] += stored.size * self._most + self._most_bytes
        ((client, _),) = shares.most_common(1)
        return next(name for name, stored in self._responses.items() if stored.client == client)

    def _drop(self, name: str) -> None:
        self._bytes -= self._responses.pop(name).size
