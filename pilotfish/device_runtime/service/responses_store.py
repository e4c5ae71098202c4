"""Keep responses for a while: to be read again, and to be continued.

In:  responses, their turns, and what these answered. Out: the same, to the client that they were
     made for, as long as they are kept: in memory, for an hour, up to a number and a size.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pilotfish.device_runtime.service.refusal import Body, RefusalError
from pilotfish.device_runtime.service.responses_input import Message, assistant_message
from pilotfish.engines.chat_formats.reader import Turn

_KEPT_S = 3600.0
_MOST, _MOST_BYTES = 256, 1 << 24  # of all clients together


class _StoredResponse(NamedTuple):
    """A response. body: as it was answered; conversation: messages, the answer's the last."""

    client: str
    until_s: float
    body: bytes
    conversation: bytes

    @property
    def size(self) -> int:
        """Bytes in memory, roughly."""
        return len(self.body) + len(self.conversation)


class ResponseStore:
    """Responses by their id, the oldest first. Used on the serving loop only.

    Where they are too many or too large, the oldest one of the client with most of them goes.
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
        self._kept: dict[str, _StoredResponse] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def store(self, client: str, messages: Sequence[Message], response: Body, turn: Turn) -> None:
        """Keep a response to these messages, unless it alone is too large."""
        self.expire()
        info = _StoredResponse(
            client,
            self._clock() + _KEPT_S,
            msgspec.json.encode(response),
            msgspec.json.encode([*messages, assistant_message(turn)]),
        )
        if info.size > self._most_bytes:
            return
        self._kept[response["id"]] = info
        self._bytes += info.size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._drop(self._surplus())

    def body(self, client: str, name: str) -> bytes:
        """Return a client's response; raises `RefusalError` (404) for an unknown id."""
        return self._find(client, name, "response_id").body

    def conversation(self, client: str, name: str) -> list[Message]:
        """Return the messages that a response answered, and its own; raises as `body` does."""
        result = self._find(client, name, "previous_response_id")
        messages: list[Message] = msgspec.json.decode(result.conversation)
        return messages

    def forget(self, client: str, name: str) -> None:
        """Delete a client's response; raises as `body` does."""
        self._find(client, name, "response_id")
        self._drop(name)

    def expire(self) -> None:
        """Delete what has been kept long enough."""
        now_s = self._clock()
        while self._kept and now_s >= next(iter(self._kept.values())).until_s:
            self._drop(next(iter(self._kept)))

    def _find(self, client: str, name: str, param: str) -> _StoredResponse:
        self.expire()
        value = self._kept.get(name)
        if value is None or value.client != client:
            raise RefusalError(
                404,
                f"There is no response {name[:80]!r} here: the latest are kept for "
                f"{_KEPT_S / 60:g} minutes, and not beyond a restart. Send the whole conversation "
                "as input.",
                code="response_not_found",
                param=param,
                reason="response",
            )
        return value

    def _surplus(self) -> str:
        """Return the oldest response of the client that takes the largest share."""
        shares: Counter[str] = Counter()
        for item in self._kept.values():
            shares[item.client] += item.size * self._most + self._most_bytes
        ((client, _),) = shares.most_common(1)
        return next(name for name, item in self._kept.items() if item.client == client)

    def _drop(self, name: str) -> None:
        self._bytes -= self._kept.pop(name).size
