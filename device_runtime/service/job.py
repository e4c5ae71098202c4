"""A job: one answer that a client waits for, between the lane that makes it and who sends it."""

import asyncio
from collections import deque
from contextlib import suppress

from pilotfish.device_runtime.bridge import Prompt
from pilotfish.device_runtime.plan import Options
from pilotfish.device_runtime.record import Generation, Piece


class AnswerJob:
    """One answer that a client waits for. Belongs to the loop; a lane reads what never changes.

    prompt: there from `Lanes.submit` on. events: pieces, if they are wanted, and at last the
    `Generation` or the error.
    """

    def __init__(self, client: str) -> None:
        self.client = client
        self.prompt: Prompt
        self.options: Options = {}
        self.streamed = False
        self.given_up: BaseException | None = None  # why nobody wants it any more; lanes look here
        self._events: deque[Piece | Generation | BaseException] = deque()
        self._news = asyncio.Event()
        self.ended = False

    def post(self, event: "Piece | Generation | BaseException") -> None:
        """Called on the loop."""
        if self.ended:
            return
        self.ended = not isinstance(event, Piece)
        self._events.append(event)
        self._news.set()

    @property
    def behind(self) -> int:
        """Events that the client has not been sent."""
        return len(self._events)

    @property
    def failed(self) -> bool:
        """Whether the next event is an error."""
        return bool(self._events) and isinstance(self._events[0], BaseException)

    async def ready(self, limit_s: float | None = None) -> bool:
        """Wait until there is an event, so long at most."""
        if not self._events:
            self._news.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), limit_s)
        return bool(self._events)

    def take(self) -> "Piece | Generation":
        """The next event; raises it where it is an error."""
        event = self._events.popleft()
        if isinstance(event, BaseException):
            raise event
        return event
