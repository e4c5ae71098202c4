"""The HTTP service as an ASGI application: access control, routes, and the form of errors.

A request is admitted, read within bounds, checked, and then answered by a lane (`routes`). Errors
have the form of OpenAI's error objects, or on Anthropic's routes of Anthropic's.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotfish.base.errors import PilotfishError
from pilotfish.device_runtime.service.access import PREFLIGHT, preflight_headers
from pilotfish.device_runtime.service.completion import json_response
from pilotfish.device_runtime.service.device_service import DeviceService
from pilotfish.device_runtime.service.messages_events import error_body
from pilotfish.device_runtime.service.refusal import RefusalError, refusal_of
from pilotfish.device_runtime.service.request_spans import RequestSpans
from pilotfish.device_runtime.service.routes import MESSAGES_PATH, routes


def application(service: DeviceService) -> ASGIApp:
    """Build the service as an ASGI application."""

    async def refuse(request: HttpRequest, error: Exception) -> Response:
        refusal = refusal_of(_as_refusal(error))
        service.count_refusal(refusal)
        headers = error.headers if isinstance(error, HTTPException) and error.headers else {}
        return _refusal_response(request.scope["path"], refusal, headers)

    expected = (HTTPException, RefusalError, PilotfishError)
    app = Starlette(
        routes=routes(service),
        # Starlette raises unexpected errors again: uvicorn logs them and closes the connection
        exception_handlers=dict.fromkeys([*expected, Exception], refuse),
    )
    app.router.redirect_slashes = False
    tracer = service.device.tracer
    # spans within the access control: a request that it refuses has none
    return AccessControl(app if tracer is None else RequestSpans(app, tracer), service)


def _as_refusal(error: Exception) -> Exception:
    if isinstance(error, HTTPException):
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        return RefusalError(error.status_code, f"{error.detail}.", code=code, reason="route")
    return error


def _refusal_response(path: str, refusal: RefusalError, headers: Mapping[str, str]) -> Response:
    """Return the response with an error, in the form of the API that the path belongs to."""
    is_anthropics = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
    body = error_body(refusal) if is_anthropics else refusal.body
    return json_response(body, refusal.status, {**headers, **refusal.headers})


class AccessControl:
    """A wrapper of all routes that admits clients and times requests.

    It also answers the preflight requests of browsers, and tells browsers which pages may read the
    answers (CORS).
    """

    def __init__(self, app: ASGIApp, service: DeviceService) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        began_s = time.monotonic()
        status = 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admitted(scope, receive, send_and_note)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._service.metrics.add_request(route, status, time.monotonic() - began_s)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        headers: Mapping[str, str] = Headers(scope=scope)
        cors = service.access.cors_headers(headers)
        send = partial(_send_with, cors, send)
        peer: str = (scope.get("client") or ("local", 0))[0]
        try:
            is_open = _is_open(scope["path"]) or (cors and scope["method"] == "OPTIONS")
            client = service.access.client(headers, peer, needs_key=not is_open)
        except RefusalError as refusal:
            service.count_refusal(refusal)
            await _refusal_response(scope["path"], refusal, {})(scope, receive, send)
            return
        if cors and scope["method"] == "OPTIONS" and PREFLIGHT in headers:
            await Response(status_code=204, headers=preflight_headers(headers))(
                scope, receive, send
            )
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        state["client"] = client
        await self._app(scope, receive, send)


async def _send_with(headers: Mapping[str, str], send: Send, message: Message) -> None:
    """Send a message, with these headers if it begins an answer."""
    if headers and message["type"] == "http.response.start":
        more = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        message = {**message, "headers": [*message.get("headers", ()), *more]}
    await send(message)


def _is_open(path: str) -> bool:
    """Return whether a route is public: the page's files and `/health`."""
    return path in ("/", "/health") or path.startswith("/page/")
