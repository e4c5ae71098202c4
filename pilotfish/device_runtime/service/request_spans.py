"""A span for each HTTP request that the service admits, below the span that its client names.

The client names its span by the header `traceparent` (W3C Trace Context). The names and attributes
are those of OpenTelemetry's conventions for HTTP. They have the route's pattern, but neither path
nor query nor any header, since these come from the client.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotfish.base.tracing import Tracer, read_traceparent
from pilotfish.device_runtime.answer_trace import error_code


class RequestSpans:
    """A wrapper of all routes that makes the spans of admitted POST requests.

    Others read the service's state, some of them every second, and have no spans.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        parent = read_traceparent(Headers(scope=scope).getlist("traceparent"))
        span = self._tracer.start(
            "POST", "server", parent=parent, attributes={"http.request.method": "POST"}
        )
        status = 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        error = ""
        try:
            with self._tracer.current(span):
                await self._app(scope, receive, send_and_note)
        except BaseException as raised:
            error = error_code(raised)
            raise
        finally:
            if (route := getattr(scope.get("route"), "path", None)) is not None:
                span.set({"http.route": route}, f"POST {route}")
            span.set({"http.response.status_code": status})
            span.end(error=error or (str(status) if status >= 500 else ""))
