"""The routes of the HTTP service. Those of the chat page are served by `chat_page`."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from pilotfish.bridge import Prompt
from pilotfish.device_runtime.service import chat_page as page
from pilotfish.device_runtime.service.access import Client
from pilotfish.device_runtime.service.answers import CompletionFormat
from pilotfish.device_runtime.service.completion import (
    AnswerFormat,
    Completion,
    bounded_body,
    json_response,
)
from pilotfish.device_runtime.service.device_service import DeviceService
from pilotfish.device_runtime.service.field_check import IgnoredFields
from pilotfish.device_runtime.service.messages import (
    count_request,
    count_response,
    message_request,
)
from pilotfish.device_runtime.service.messages_events import MessageFormat
from pilotfish.device_runtime.service.openai import (
    CompletionRequest,
    chat_request,
    text_request,
    with_options,
)
from pilotfish.device_runtime.service.refusal import Body, RefusalError
from pilotfish.device_runtime.service.responses import response_request
from pilotfish.device_runtime.service.responses_events import ResponseFormat
from pilotfish.device_runtime.service.service_metrics import CONTENT_TYPE
from pilotfish.device_runtime.service.tokens import (
    capabilities,
    detokenize_request,
    detokenize_response,
    tokenize_request,
    tokenize_response,
    tokenizer_info,
)
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, STREAM
from pilotfish.wire.request import Request

MESSAGES_PATH = "/v1/messages"
_Read = TypeVar("_Read")


def routes(service: DeviceService) -> list[Route]:
    """List all routes."""
    return [
        *_completions(service),
        *_responses(service),
        *_messages(service),
        *_tokens(service),
        *_models(service),
        *_state(service),
        *(_route(path, serve) for path, serve in page.ROUTES.items()),
    ]


def _route(
    path: str, endpoint: Callable[[HttpRequest], Awaitable[Response]], *methods: str
) -> Route:
    """Return a route for exactly these methods; GET and HEAD if none is named."""
    return Route(path, endpoint, methods=methods or ["GET"])  # Starlette adds HEAD to GET


def _completions(service: DeviceService) -> list[Route]:
    async def complete(
        request: HttpRequest,
        parse: Callable[[bytes, Request, IgnoredFields], CompletionRequest],
    ) -> Completion:
        completion, headers = await _read_body(
            service, request, lambda body, ignored: parse(body, service.defaults, ignored)
        )
        completion = _check(service, completion)
        prompts = completion.prompts
        echo = (lambda at: service.text_of(prompts[at])) if completion.echo else None
        words = service.device.tokenizer if completion.logprobs else None
        model = service.config.model
        usage = completion.include_usage
        answer = CompletionFormat(
            chat=completion.chat,
            model=model,
            choices=completion.choices,
            echo=echo,
            id_prompts={at for at, prompt in enumerate(prompts) if not isinstance(prompt, str)},
            words=words,
            usage=usage,
            best=completion.best,
            scores=completion.scores,
            prompt_words=service.device.tokenizer if completion.prompt_logprobs else None,
        )
        return _begin(service, request, completion, answer, headers)

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
        owner = _client(request).identity
        before = partial(store.conversation, owner)
        parsed, headers = await _read_body(
            service,
            request,
            lambda body, ignored: response_request(body, service.defaults, before, ignored),
        )
        completion = _check(service, parsed.completion)
        keep = partial(store.store, owner, parsed.messages) if parsed.store else None
        answer = ResponseFormat(
            parsed, model=service.config.model, keep=keep, tokens=service.tokens_in
        )
        return _begin(service, request, completion, answer, headers)

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


def _messages(service: DeviceService) -> list[Route]:
    async def respond(request: HttpRequest) -> Completion:
        parsed, headers = await _read_body(
            service, request, lambda body, ignored: message_request(body, service.defaults, ignored)
        )
        completion = _check(service, parsed.completion)
        answer = MessageFormat(parsed, model=service.config.model, tokens=service.tokens_in)

        async def read(completion: CompletionRequest) -> list[Prompt]:
            (prompt,) = await service.read(_client(request).name, completion)
            answer.prompt_tokens = len(prompt)
            return [prompt]

        return _begin(service, request, completion, answer, headers, read)

    async def count(request: HttpRequest) -> Response:
        (model, talk), headers = await _read_body(service, request, count_request)
        _check_model(service, model)
        work = partial(count_response, service.device, talk)
        return json_response(
            await service.run_in_thread(_client(request).name, work), headers=headers
        )

    return [
        _route(MESSAGES_PATH, respond, "POST"),
        _route(f"{MESSAGES_PATH}/count_tokens", count, "POST"),
    ]


def _client(request: HttpRequest) -> Client:
    client: Client = request.scope["state"]["client"]
    return client


def _check(service: DeviceService, completion: CompletionRequest) -> CompletionRequest:
    """Refuse an impossible request. An answer without a limit of tokens may fill the context."""
    _check_sound(service)
    _check_model(service, completion.model)
    if service.config.edge is None:
        _check_local(completion)
    if completion.request.max_tokens is not None:
        return completion
    return with_options(completion, max_tokens=service.context)


async def _read_body(
    service: DeviceService, request: HttpRequest, parse: Callable[[bytes, IgnoredFields], _Read]
) -> tuple[_Read, dict[str, str]]:
    """Return what a body asks for, and the answer's headers."""
    ignored = service.new_ignored()
    parsed = parse(await bounded_body(request, service.body_bytes), ignored)
    return parsed, service.note_ignored(_client(request).name, ignored)


def _begin(
    service: DeviceService,
    request: HttpRequest,
    completion: CompletionRequest,
    answer: AnswerFormat,
    headers: Mapping[str, str],
    read: Callable[[CompletionRequest], Awaitable[Sequence[Prompt]]] | None = None,
) -> Completion:
    """Return the response that makes an answer. read: see `Completion`; None: reads as usual."""
    client = _client(request)
    read = read or partial(service.read, client.name)
    return Completion(
        service.lanes, client, completion, answer, read, service.count_refusal, headers
    )


def _tokens(service: DeviceService) -> list[Route]:
    async def tokenize(request: HttpRequest) -> Response:
        parsed, headers = await _read_body(service, request, tokenize_request)
        _check_model(service, parsed.model)
        work = partial(tokenize_response, service.device, parsed)
        body = await service.run_in_thread(_client(request).name, work)
        return json_response(body, headers=headers)

    async def detokenize(request: HttpRequest) -> Response:
        (model, tokens), headers = await _read_body(service, request, detokenize_request)
        _check_model(service, model)
        work = partial(detokenize_response, service.device, tokens)
        body = await service.run_in_thread(_client(request).name, work)
        return json_response(body, headers=headers)

    async def info(_: HttpRequest) -> Response:
        return json_response(tokenizer_info(service.device))

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
        _route("/tokenizer_info", info),
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


def _check_model(service: DeviceService, name: str | None) -> None:
    """Refuse the name of another model; a request may name none."""
    if name not in (None, service.config.model):
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
            "root": service.config.model,
            "parent": None,
            "permission": [],
            "max_model_len": service.context,  # vLLM's
            "context_length": service.context,  # OpenRouter's
            "capabilities": capabilities(service.device),
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
