"""The HTTP service's routes, access control and errors.

A request is admitted, read within bounds, checked, and then answered by a lane. All errors have the
form of OpenAI's error objects. All routes are listed here and in `chat_page`.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotfish.base.errors import PilotfishError
from pilotfish.device_runtime.service import chat_page as page
from pilotfish.device_runtime.service.access import Client
from pilotfish.device_runtime.service.answers import Body, CompletionFormat
from pilotfish.device_runtime.service.completion import Completion, bounded_body, json_response
from pilotfish.device_runtime.service.device_service import DeviceService
from pilotfish.device_runtime.service.openai import (
    CompletionRequest,
    chat_request,
    text_request,
    with_options,
)
from pilotfish.device_runtime.service.refusal import RefusalError, refusal_of
from pilotfish.device_runtime.service.responses import response_request
from pilotfish.device_runtime.service.responses_events import ResponseFormat
from pilotfish.device_runtime.service.service_metrics import CONTENT_TYPE
from pilotfish.device_runtime.service.tokens import (
    detokenize_request,
    detokenize_response,
    tokenize_request,
    tokenize_response,
)
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, STREAM
from pilotfish.wire.request import Request


def application(service: DeviceService) -> ASGIApp:
    """Build the service as an ASGI application."""

    async def refuse(_: HttpRequest, error: Exception) -> Response:
        refusal = refusal_of(_as_refusal(error))
        service.count_refusal(refusal)
        headers = error.headers if isinstance(error, HTTPException) and error.headers else {}
        return json_response(refusal.body, refusal.status, {**headers, **refusal.headers})

    expected = (HTTPException, RefusalError, PilotfishError)
    app = Starlette(
        routes=[
            *_completions(service),
            *_responses(service),
            *_tokens(service),
            *_models(service),
            *_state(service),
            *(_route(path, serve) for path, serve in page.ROUTES.items()),
        ],
        # Starlette raises unexpected errors again: uvicorn logs them and closes the connection
        exception_handlers=dict.fromkeys([*expected, Exception], refuse),
    )
    app.router.redirect_slashes = False
    return AccessControl(app, service)


def _as_refusal(error: Exception) -> Exception:
    if isinstance(error, HTTPException):
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        return RefusalError(error.status_code, f"{error.detail}.", code=code, reason="route")
    return error


def _route(
    path: str, endpoint: Callable[[HttpRequest], Awaitable[Response]], *methods: str
) -> Route:
    """Return a route for exactly these methods, GET if none is named."""
    route = Route(path, endpoint, methods=methods or None)
    route.methods = set(methods or ["GET"])  # Starlette adds HEAD to GET
    return route


def _completions(service: DeviceService) -> list[Route]:
    async def complete(
        request: HttpRequest, parse: Callable[[bytes, Request], CompletionRequest]
    ) -> Completion:
        body = await bounded_body(request, service.body_bytes)
        completion = parse(body, service.defaults)
        completion = _check(service, completion)
        echo = partial(service.text_of, completion.prompt) if completion.echo else None
        words = service.device.tokenizer if completion.logprobs else None
        model = service.config.model
        usage = completion.include_usage
        answer = CompletionFormat(
            chat=completion.chat,
            model=model,
            echo=echo,
            marked=not isinstance(completion.prompt, str),
            words=words,
            usage=usage,
            best=completion.best,
            prompt_words=service.device.tokenizer if completion.prompt_logprobs else None,
        )
        client = _client(request)
        read = partial(service.read, client.name)
        return Completion(service.lanes, client, completion, answer, read, service.count_refusal)

    async def chat(request: HttpRequest) -> Completion:
        return await complete(request, chat_request)

    async def text(request: HttpRequest) -> Completion:
        return await complete(request, text_request)

    return [
        _route("/v1/chat/completions", chat, "POST"),
        _route("/v1/completions", text, "POST"),
    ]


def _responses(service: DeviceService) -> list[Route]:
    store = service.responses

    async def respond(request: HttpRequest) -> Completion:
        client = _client(request)
        owner = client.identity
        body = await bounded_body(request, service.body_bytes)
        parsed = response_request(body, service.defaults, partial(store.conversation, owner))
        completion = _check(service, parsed.completion)
        keep = partial(store.store, owner, parsed.messages) if parsed.store else None
        answer = ResponseFormat(
            parsed, model=service.config.model, keep=keep, tokens=service.tokens_in
        )
        read = partial(service.read, client.name)
        return Completion(service.lanes, client, completion, answer, read, service.count_refusal)

    async def again(request: HttpRequest) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise RefusalError(
                400,
                "This service streams a response only once, while it generates the response.",
                code="unsupported_parameter",
                param="stream",
                reason="unsupported",
            )
        body = store.body(_client(request).identity, request.path_params["name"])
        return Response(body, media_type="application/json")

    async def forget(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        store.forget(_client(request).identity, name)
        return json_response({"id": name, "object": "response", "deleted": True})

    return [
        _route("/v1/responses", respond, "POST"),
        _route("/v1/responses/{name}", again),
        _route("/v1/responses/{name}", forget, "DELETE"),
    ]


def _client(request: HttpRequest) -> Client:
    client: Client = request.scope["state"]["client"]
    return client


def _check(service: DeviceService, completion: CompletionRequest) -> CompletionRequest:
    """Refuse an impossible request. An answer without a limit of tokens may fill the context."""
    _check_sound(service)
    if completion.model is not None:
        _check_model(service, completion.model)
    if service.config.edge is None:
        _check_local(completion)
    if completion.request.max_tokens is not None:
        return completion
    return with_options(completion, max_tokens=service.context)


def _tokens(service: DeviceService) -> list[Route]:
    async def tokenize(request: HttpRequest) -> Response:
        prompt, chat, words = tokenize_request(await bounded_body(request, service.body_bytes))
        work = partial(tokenize_response, service.device, prompt, chat=chat, words=words)
        return json_response(await service.run_in_thread(_client(request).name, work))

    async def detokenize(request: HttpRequest) -> Response:
        tokens = detokenize_request(await bounded_body(request, service.body_bytes))
        work = partial(detokenize_response, service.device, tokens)
        return json_response(await service.run_in_thread(_client(request).name, work))

    async def embeddings(_: HttpRequest) -> Response:
        raise RefusalError(
            404,
            "This service has no embeddings: drafter and target only generate text.",
            code="unsupported",
            reason="route",
        )

    return [
        _route("/tokenize", tokenize, "POST"),
        _route("/detokenize", detokenize, "POST"),
        _route("/v1/embeddings", embeddings, "GET", "POST"),
    ]


def _check_sound(service: DeviceService) -> None:
    """Refuse if the drafter's files are damaged: without the edge, the drafter writes answers."""
    if service.inspection.damage:
        raise RefusalError(
            503,
            "The drafter's files are damaged; the service's log names the files, and its operator "
            "must replace them.",
            code="damaged",
            reason="damaged",
        )


def _check_model(service: DeviceService, name: str) -> None:
    if name != service.config.model:
        raise RefusalError(
            404,
            f"There is no model {name[:100]!r} here; the model is {service.config.model!r}.",
            code="model_not_found",
            param="model",
            reason="model",
        )


def _check_local(completion: CompletionRequest) -> None:
    protocol = completion.request.protocol
    if protocol in PROTOCOL_REGISTRY or protocol == STREAM:
        raise RefusalError(
            400,
            f"Protocol {protocol} needs an edge, but this service has no edge.",
            code="unsupported",
            param="pilotfish.protocol",
            reason="unsupported",
        )


def _models(service: DeviceService) -> list[Route]:
    def model() -> Body:
        return {
            "id": service.config.model,
            "object": "model",
            "created": service.started_s,
            "owned_by": "pilotfish",
            "max_model_len": service.context,
        }

    async def models(_: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [model()]})

    async def named_model(request: HttpRequest) -> Response:
        _check_model(service, request.path_params["name"])
        return json_response(model())

    return [_route("/v1/models", models), _route("/v1/models/{name:path}", named_model)]


def _state(service: DeviceService) -> list[Route]:
    async def health(_: HttpRequest) -> Response:
        well, body = service.health()
        return json_response(body, 200 if well else 503)

    async def metrics(_: HttpRequest) -> Response:
        service.metrics.set_link(service.link_status, service.link_state)
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE)

    async def status(_: HttpRequest) -> Response:
        edge, welcome = service.config.edge, service.device.welcome
        service.status.set_link(service.link_status, service.link_state)
        snapshot = service.status.snapshot(
            edge=edge,
            target=welcome.model if welcome else None,
            on_link_loss=None if edge is None else service.config.on_link_loss,
            protocols=service.protocols,
        )
        return json_response(snapshot)

    return [_route("/health", health), _route("/metrics", metrics), _route("/status", status)]


class AccessControl:
    """A wrapper of all routes that admits clients and times requests."""

    def __init__(self, app: ASGIApp, service: DeviceService) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        began_s = time.monotonic()
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admitted(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._service.metrics.add_request(route, status, time.monotonic() - began_s)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        headers: Mapping[str, str] = Headers(scope=scope)
        peer: str = (scope.get("client") or ("local", 0))[0]
        try:
            client = service.access.client(headers, peer, needs_key=not _is_open(scope["path"]))
        except RefusalError as refusal:
            service.count_refusal(refusal)
            response = json_response(refusal.body, refusal.status, refusal.headers)
            await response(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        state["client"] = client
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    """Return whether a route is public: the page's files and `/health`."""
    return path in ("/", "/health") or path.startswith("/page/")
