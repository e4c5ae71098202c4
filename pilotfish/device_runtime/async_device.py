"""`AsyncDevice`: the drafting end for asyncio, with several answers at a time.

In:  prompts, from tasks of one event loop. Out: whole answers, or streams of pieces.

The answers run on lanes, as those of the HTTP service do (`service.lanes`): threads with a `Device`
each. So nothing here blocks the loop: one more thread opens the devices, tokenises the prompts one
after the other, and closes the devices.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict
from weakref import WeakKeyDictionary, WeakSet

from pilotfish.base.errors import (
    DeviceClosedError,
    DeviceInUseError,
    PilotfishError,
    UnsupportedError,
)
from pilotfish.base.tracing import TracerProvider
from pilotfish.bridge import Prompt, PromptInput, read_talk
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.link.retry import CancelToken, OnLinkLoss
from pilotfish.device_runtime.record import Generation, Piece, Round
from pilotfish.device_runtime.service.lanes import Lanes, open_beside
from pilotfish.drafting.lookup import DEFAULT_OWNER, Owner
from pilotfish.wire.request import Request

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from pilotfish.bridge.prompt import TalkOptions

_log = logging.getLogger("pilotfish.device")

_PIECES = 32  # pieces that may wait for a slow reader; then its answer waits, too
_END_S = 30.0  # time for interrupted answers to end
_CLIENT = ""  # all answers are of one client of the lanes, so they begin in the order of request


class DeviceOptions(TypedDict, total=False):
    """The keywords of `Device`, for type checkers."""

    provider: str
    threads: int | None
    context: int | None
    on_round: Callable[[Round], None] | None
    on_fetch: Callable[[int, int], None] | None
    lanes: int
    on_link_loss: OnLinkLoss
    patience_s: float
    draft_text: bool
    texts: str | Path | None
    share_texts: bool
    traces: str | TracerProvider | None
    cancel_token: CancelToken | None


class AsyncDevice:
    """A `Device` for asyncio that makes up to ``lanes`` answers at a time.

    The arguments are those of `Device`; ``on_round`` and ``on_fetch`` are called in other threads.
    The device is opened at ``async with`` and closed at its end, and belongs to the loop in which
    it was opened. Each running answer has a lane: a thread and a conversation. Further answers wait
    in the order of request. A prompt that continues an earlier one gets the lane that holds its
    beginning, if this lane is free.

    If a task is cancelled, its answer ends within one round, and the lane is free. After `aclose`,
    and outside of ``async with``, calls raise `DeviceClosedError`.
    """

    def __init__(
        self,
        draft: str | Path,
        edge: str | None = None,
        keys: str | Path | None = None,
        **options: Unpack[DeviceOptions],
    ) -> None:
        self._open = lambda: open_beside(
            Device(draft, edge, keys, **options), options.get("lanes", 1)
        )
        self._lanes: Lanes | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="async-device")
        self._closing: asyncio.Future[None] | None = None
        # by task: the streams that it has read, which end if it is cancelled
        self._streams: WeakKeyDictionary[asyncio.Task[Any], WeakSet[AsyncAnswerStream]]
        self._streams = WeakKeyDictionary()
        self._ending: set[asyncio.Future[None]] = set()

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise DeviceClosedError("A device can be opened once: make another AsyncDevice.")
        self._loop = asyncio.get_running_loop()
        opening = self._thread.submit(self._open)
        try:
            devices = await asyncio.wrap_future(opening)
            self._lanes = Lanes(devices, places=sys.maxsize)
        except BaseException:  # perhaps only this task was cancelled, and the thread still opens it
            self._thread.submit(_close_opened, opening)
            self._thread.shutdown(wait=False)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the device: running and waiting answers end with `DeviceClosedError`.

        Waits until the threads have ended.
        """
        if self._lanes is None:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close(self._lanes))
        await asyncio.shield(self._closing)

    async def _close(self, lanes: Lanes) -> None:
        lanes.interrupt(lambda: DeviceClosedError("The device was closed before the answer's end."))
        if not await asyncio.wrap_future(self._thread.submit(lanes.close, _END_S)):
            _log.error("a lane hangs and is abandoned")
        self._thread.shutdown(wait=False)

    @property
    def device(self) -> Device:
        """The first lane's device, for what returns at once: link_up, link_state, redirect, ….

        Its answers and `Device.probe` would wait for the lane's turn, and so block the loop.
        """
        return self._usable().lanes[0].device

    def _usable(self) -> Lanes:
        """Return the lanes of an open device.

        Raises `DeviceClosedError` if it is not open, and `UnsupportedError` outside of its loop.
        """
        if self._lanes is None:
            raise DeviceClosedError("The device is not open: use it within `async with`.")
        if self._closing is not None:
            raise DeviceClosedError("The device is closed: open another one.")
        loop: asyncio.AbstractEventLoop | None = None
        with suppress(RuntimeError):  # this thread runs no loop
            loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise UnsupportedError(
                "This AsyncDevice belongs to the event loop that opened it: use it in a task there."
            )
        return self._lanes

    # Answers

    async def generate(
        self,
        prompt: PromptInput | Prompt,
        *,
        owner: Owner = DEFAULT_OWNER,
        **options: Unpack[TalkOptions],
    ) -> Generation:
        """Generate a whole answer. Arguments and errors are those of `Device.stream`."""
        source, keywords = read_talk(prompt, options)
        request = Request.from_options(keywords)
        async with aclosing(self._events(source, request, owner, streamed=False)) as events:
            whole = await anext(events)
        assert isinstance(whole, Generation)  # not streamed: no pieces
        return whole

    def stream(
        self,
        prompt: PromptInput | Prompt,
        *,
        owner: Owner = DEFAULT_OWNER,
        **options: Unpack[TalkOptions],
    ) -> AsyncAnswerStream:
        """Return the stream of an answer, which begins when it is first read.

        Arguments and errors are those of `Device.stream`. A slow reader slows its answer down; the
        answer then keeps its lane.
        """
        self._usable()
        source, keywords = read_talk(prompt, options)
        request = Request.from_options(keywords)
        events = self._events(source, request, owner, streamed=True)
        return AsyncAnswerStream(events, self._note_reader)

    async def _events(
        self, source: PromptInput | Prompt, request: Request, owner: Owner, *, streamed: bool
    ) -> AsyncGenerator[Piece | Generation, None]:
        """Yield the pieces of an answer, if streamed, and then the whole answer."""
        lanes = self._usable()
        with lanes.admit(_CLIENT, pieces=_PIECES) as job:
            job.owner = owner
            reading = self._thread.submit(_tokenise, lanes.lanes[0].device, source)
            prompt = await asyncio.wrap_future(reading)
            self._usable()
            lanes.submit(job, prompt, request, streamed=streamed)
            while not job.ended or job.backlog:
                await job.ready()
                yield job.take()

    # Cancelled readers

    def _note_reader(self, stream: AsyncAnswerStream) -> None:
        """Note that the present task reads a stream: the stream ends if the task is cancelled.

        A task that is cancelled between two pieces does not close the stream by itself.
        """
        task = asyncio.current_task()
        if task is None or task is stream.reader:
            return
        stream.reader = task
        if task not in self._streams:
            self._streams[task] = WeakSet()
            task.add_done_callback(self._on_reader_done)
        self._streams[task].add(stream)

    def _on_reader_done(self, task: asyncio.Task[Any]) -> None:
        streams = self._streams.pop(task, ())
        if not task.cancelled():
            return
        for stream in [each for each in streams if each.reader is task]:
            ending = asyncio.ensure_future(stream.aclose())
            self._ending.add(ending)  # the loop itself keeps only weak references to tasks
            ending.add_done_callback(self._ending.discard)


class AsyncAnswerStream(AsyncIterator[Piece]):
    """Yields the pieces of an answer as they arrive, to one task at a time.

    The lane is free after the last piece, after `aclose`, at the end of an ``async with``, when the
    stream is deleted, and when the task that reads it is cancelled.

    generation: the whole answer once it has ended; None before. reader: the task that took the last
    piece.
    """

    def __init__(
        self,
        events: AsyncGenerator[Piece | Generation, None],
        note_reader: Callable[[AsyncAnswerStream], None],
    ) -> None:
        self._events, self._note_reader = events, note_reader
        self.generation: Generation | None = None
        self.reader: asyncio.Task[Any] | None = None
        self._is_read = False  # a task waits for the next piece

    async def __anext__(self) -> Piece:
        self._refuse_second_reader()
        self._note_reader(self)
        self._is_read = True
        try:
            event = await anext(self._events)
        finally:
            self._is_read = False
        if isinstance(event, Piece):
            return event
        self.generation = event
        await self._events.aclose()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the answer if it has not ended.

        Raises `DeviceInUseError` while another task waits for a piece.
        """
        self._refuse_second_reader()
        await self._events.aclose()

    def _refuse_second_reader(self) -> None:
        if self._is_read:
            raise DeviceInUseError(
                "Another task is reading the next piece of this stream: read a stream in one task "
                "at a time, and cancel that task to end its answer."
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _tokenise(device: Device, source: PromptInput | Prompt) -> Prompt:
    """Return the prompt in the last known edge's vocabulary, so that it finds its lane.

    A prompt that fails is returned untokenised: the lane tokenises it after greeting the edge, and
    raises the error if there is one.
    """
    if isinstance(source, Prompt):
        return source
    try:
        return device.prompt(source)
    except PilotfishError:
        return Prompt.unencoded(source, chat=True)


def _close_opened(opening: Future[list[Device]]) -> None:
    """Close devices whose opener no longer waits for them."""
    if not opening.cancelled() and opening.exception() is None:
        for device in opening.result():
            device.close()
