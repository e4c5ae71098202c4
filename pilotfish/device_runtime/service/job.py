"""A job: answers on their way from the lanes to the client's connection."""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from contextvars import copy_context

from pilotfish.bridge import Prompt
from pilotfish.device_runtime.record import Generation, Piece
from pilotfish.drafting.lookup import Owner
from pilotfish.wire.request import Request


class AnswerJob:
    """A client's request for one or more answers to each of its prompts, one after the other.

    Used on the loop. A lane's thread reads constant fields, and `choice`, which does not change
    during an answer.

    each: number of answers to each prompt; those to the first prompt come first. count: number of
    prompts. owner: the owner of the conversation. prompts, request: set by `Lanes.submit`. events:
    each answer's pieces, if streamed, then its `Generation`; an error ends them. pieces: number of
    streamed pieces that may wait to be taken; then the lane waits, too. None: the lane does not
    wait, and `Lanes` gives the job of a slow reader up.
    """

    def __init__(
        self, client: str, each: int = 1, count: int = 1, *, pieces: int | None = None
    ) -> None:
        self.client = client
        self.owner: Owner = None
        self.prompts: Sequence[Prompt] = ()
        self.request = Request()
        self.streamed = False
        self.context = copy_context()  # of the request: the lane's spans go below its span
        self.queued_ns = 0  # when the current or next answer joined the queue (monotonic)
        self._each = each
        self.choices = self.left = each * count  # number of answers; number of unfinished answers
        self.places = each  # places in the queue that the job holds; changed by `Lanes`
        self.given_up: BaseException | None = None  # why the job was given up; the lane checks it
        self._room = None if pieces is None else threading.Semaphore(pieces)
        self._events: deque[Piece | Generation | BaseException] = deque()
        self._news = asyncio.Event()
        self.ended = False

    def await_room(self) -> None:
        """Wait until another piece may be posted, or the job is given up. Called by the lane."""
        if self._room is not None:
            self._room.acquire()

    def give_up(self, reason: BaseException) -> None:
        """Note why the job is given up, and wake its lane if that waits for room."""
        self.given_up = reason
        self._add_room()

    def _add_room(self) -> None:
        if self._room is not None:
            self._room.release()

    def post(self, event: "Piece | Generation | BaseException") -> None:
        """Add an event. On the loop only."""
        if self.ended:
            return
        self.left -= isinstance(event, Generation)
        self.ended = not self.left or isinstance(event, BaseException)
        self._events.append(event)
        self._news.set()

    @property
    def choice(self) -> int:
        """Index of the current or next answer."""
        return self.choices - self.left

    @property
    def prompt(self) -> Prompt:
        """The prompt of the current or next answer."""
        return self.prompts[self.choice // self._each]

    @property
    def number(self) -> int:
        """Index of the current or next answer among the answers to its prompt."""
        return self.choice % self._each

    @property
    def backlog(self) -> int:
        """Number of events that have not been taken yet."""
        return len(self._events)

    @property
    def failed(self) -> bool:
        """Whether the next event is an error."""
        return bool(self._events) and isinstance(self._events[0], BaseException)

    async def ready(self, limit_s: float | None = None) -> bool:
        """Wait for an event, up to ``limit_s``; return whether there is one."""
        if not self._events:
            self._news.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), limit_s)
        return bool(self._events)

    def take(self) -> "Piece | Generation":
        """Return the next event, or raise it if it is an error."""
        event = self._events.popleft()
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Piece):
            self._add_room()
        return event
