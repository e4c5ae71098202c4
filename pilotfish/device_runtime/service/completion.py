"""Answer one request over HTTP: wait in the queue, run on a lane, send pieces as they come.

The HTTP status is sent with the first piece or after `QUIET_S`, so that an error before then gets
its own status. A later error is an event that ends the stream. While there are no pieces (for
example, the edge is lost), a sign of life every `QUIET_S` keeps the client from giving up.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pilotfish.base.errors import BadGrammarError
from pilotfish.bridge import Prompt
from pilotfish.device_runtime.record import Generation, Piece
from pilotfish.device_runtime.service.access import Client
from pilotfish.device_runtime.service.job import AnswerJob
from pilotfish.device_runtime.service.lanes import Lanes
from pilotfish.device_runtime.service.openai import CompletionRequest
from pilotfish.device_runtime.service.refusal import Body, RefusalError, client_gone, refusal_of

QUIET_S = 3.0
BODY_S = 10.0  # limit for a whole body to arrive
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def bounded_body(request: Request, limit_bytes: int) -> bytes:
    """Read the body of a request; refuse one that is too long or too slow."""
    too_long = RefusalError(
        413,
        f"The body is longer than {limit_bytes:,} bytes.",
        code="body_too_large",
        reason="too-long",
        close=True,
    )
    if int(request.headers.get("content-length", "0")) > limit_bytes:
        raise too_long
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RefusalError(
            415, "Send the body without a content encoding.", code="encoding", close=True
        )
    body = bytearray()
    loop = asyncio.get_running_loop()
    until_s = loop.time() + BODY_S
    while True:
        try:
            message = await asyncio.wait_for(request.receive(), max(0.01, until_s - loop.time()))
        except asyncio.TimeoutError:
            raise RefusalError(
                408, f"The body took longer than {BODY_S:g} s.", code="slow", close=True
            ) from None
        if message["type"] == "http.disconnect":
            raise RefusalError(400, "The body ended early.", code="malformed", close=True)
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise too_long
        if not message.get("more_body", False):
            return bytes(body)


class AnswerFormat(Protocol):
    """The format of a route's answers: one body, or a stream of events.

    quiet: what a stream sends as a sign of life while there are no pieces.
    """

    quiet: bytes

    def full_body(self, generations: Sequence[Generation]) -> Body:
        """Return the body of an answer that is not streamed."""

    def start_events(self) -> list[Body]:
        """Return the events before the first piece of a choice, once per choice."""

    def piece_events(self, piece: Piece) -> list[Body]:
        """Return the events of one piece; before a choice's first piece, also `start_events`."""

    def end_events(self, generation: Generation) -> list[Body]:
        """Return the events after the last piece of a choice."""

    def error_event(self, refusal: RefusalError) -> Body:
        """Return the event that ends a stream with an error."""

    def encode_event(self, body: Body) -> bytes:
        """Encode an event."""

    def closing_events(self) -> bytes:
        """Return the end of a stream without an error."""


class Completion(Response):
    """The answer to a checked request.

    read: tokenises the prompts in a thread, since this may take long. refused: called with each
    error that occurs after the answer has begun. headers: further headers of the answer.
    """

    def __init__(
        self,
        lanes: Lanes,
        client: Client,
        request: CompletionRequest,
        answer: AnswerFormat,
        read: Callable[[CompletionRequest], Awaitable[Sequence[Prompt]]],
        refused: Callable[[RefusalError], None],
        headers: Mapping[str, str] = {},
    ) -> None:
        super().__init__()
        self._lanes = lanes
        self._client = client
        self._request = request
        self._answer = answer
        self._read = read
        self._refused = refused
        self._more_headers = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; raise an error that occurs before the HTTP status is sent."""
        request = self._request
        prompts = len(request.prompts)
        with self._lanes.admit(self._client.name, request.choices, prompts) as job:
            job.owner = self._client.owner
            watch = asyncio.ensure_future(self._watch(job, receive))
            try:
                prompt, *more = await self._read(request)
                self._lanes.submit(job, prompt, request.request, more=more, streamed=request.stream)
                if request.stream:
                    await self._stream(job, scope, receive, send)
                else:
                    whole: list[Generation] = []
                    while len(whole) < job.choices:
                        await job.ready()
                        event = job.take()
                        assert isinstance(event, Generation)  # not streamed: no pieces
                        whole.append(event)
                    body = self._answer.full_body(whole)
                    await json_response(body, headers=self._more_headers)(scope, receive, send)
            except BadGrammarError as error:
                raise refusal_of(error, request.params) from error
            finally:
                watch.cancel()

    async def _watch(self, job: AnswerJob, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._lanes.give_up(job, client_gone())

    async def _stream(self, job: AnswerJob, scope: Scope, receive: Receive, send: Send) -> None:
        pending: list[bytes] = []
        if await job.ready(QUIET_S):
            pending, ended = self._take_events(job)  # an error here still gets its own HTTP status
        else:
            ended = False
        pending = pending or self._encode(self._answer.start_events())
        head = Response(
            headers={**_STREAM_HEADERS, **self._more_headers}, media_type="text/event-stream"
        )
        del head.headers["content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": head.raw_headers})
        while True:
            if chunk := b"".join(pending):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if ended:
                break
            if not await job.ready(QUIET_S):
                pending = [self._answer.quiet]
                continue
            try:
                pending, ended = self._take_events(job)
            except Exception as error:
                refusal = refusal_of(error, self._request.params)
                self._refused(refusal)
                pending, ended = self._encode([self._answer.error_event(refusal)]), True
        await send({"type": "http.response.body", "body": b""})

    def _take_events(self, job: AnswerJob) -> tuple[list[bytes], bool]:
        """Take the job's events so far; return them encoded, and whether the answer has ended."""
        events: list[bytes] = []
        while job.backlog:
            if events and job.failed:
                break  # send the events that precede the error first
            event = job.take()
            if isinstance(event, Generation):
                events += self._encode(self._answer.end_events(event))
                if job.ended and not job.backlog:
                    return [*events, self._answer.closing_events()], True
            else:
                events += self._encode(self._answer.piece_events(event))
        return events, False

    def _encode(self, bodies: Sequence[Body]) -> list[bytes]:
        return [self._answer.encode_event(body) for body in bodies]


def json_response(
    body: Any, status: int = 200, headers: "dict[str, str] | None" = None
) -> Response:
    """Encode a body as a JSON response."""
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )
