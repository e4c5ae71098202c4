"""Read and check the bodies of OpenAI's two completion routes.

In: the bytes of a request. Out: a `CompletionRequest`, or a `RefusalError` that names the field at
fault. Unknown fields are refused, and so are unsupported fields that would change the answer.
Fields that cannot change a text are ignored.

Further fields are vLLM's ``top_k``, ``min_p`` and ``repetition_penalty``, and the object
``pilotfish`` for measurements (`extension`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar, cast

import msgspec

from pilotfish.base.reading import without_bom
from pilotfish.device_runtime.bridge import PromptInput, Talk
from pilotfish.device_runtime.plan import AUTO, Options, plan
from pilotfish.device_runtime.service.extension import Mass, Temperature, Top, extend
from pilotfish.device_runtime.service.formats import (
    Format,
    FormatOfText,
    StructuredOutputs,
    grammar_of,
)
from pilotfish.device_runtime.service.prompts import (
    Effort,
    MessageFields,
    TemplateFields,
    bad_value,
    fields_of,
    message_of,
    present_fields,
    prompt_of,
    refuse_unless_neutral,
    thinking_of,
    unknown_field,
    unknown_name,
)
from pilotfish.device_runtime.service.refusal import RefusalError, bad_request
from pilotfish.device_runtime.service.tools import (
    Choice,
    ToolList,
    read_choice,
    read_tools,
    with_call_ids,
)
from pilotfish.speculation.logits_options import (
    LEAST_FACTOR,
    MOST_BIAS,
    MOST_BIASED,
    MOST_FACTOR,
    MOST_PENALTY,
)
from pilotfish.wire.messages import MAX_LOGPROBS

COMPLETION_TOKENS = 16  # default of /v1/completions, as at OpenAI
MESSAGES = 4096
_STOPS, _STOP_CHARACTERS = 16, 1024
_CHOICES = 16  # limit of answers to one prompt

# Fields that are ignored, since they cannot change a text.
_INERT = frozenset(
    (
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)
# Unsupported fields that would change a text: only these values, without effect, are accepted.
_NEUTRAL_CHAT: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "verbosity": (None,),
    "web_search_options": (None,),
}
_NEUTRAL_TEXT: dict[str, tuple[object, ...]] = {
    "suffix": (None, ""),
}
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Stop = Annotated[str, msgspec.Meta(max_length=_STOP_CHARACTERS)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-MOST_PENALTY, le=MOST_PENALTY)]
Factor = Annotated[float, msgspec.Meta(ge=LEAST_FACTOR, le=MOST_FACTOR)]
Tops = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
Bias = Annotated[float, msgspec.Meta(ge=-MOST_BIAS, le=MOST_BIAS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored


class RequestFields(msgspec.Struct):
    """The fields that all routes share."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: Mass | None = None
    top_k: Top | None = None
    min_p: Share | None = None
    logit_bias: Annotated[dict[Top, Bias], msgspec.Meta(max_length=MOST_BIASED)] | None = None
    repetition_penalty: Factor | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    structured_outputs: StructuredOutputs | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    stop: str | Annotated[list[Stop], msgspec.Meta(max_length=_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    pilotfish: msgspec.Raw = msgspec.Raw(b"null")  # see `extension`


class _CompletionsBody(RequestFields):
    max_tokens: Count | None = None
    response_format: Format | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=_CHOICES)] | None = None
    prompt_logprobs: Tops | None = None  # vLLM's


class _ChatRequest(_CompletionsBody, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[MessageFields], msgspec.Meta(min_length=1, max_length=MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    tools: ToolList | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateFields | None = None


class _TextRequest(_CompletionsBody, forbid_unknown_fields=True, kw_only=True):
    prompt: msgspec.Raw
    best_of: Annotated[int, msgspec.Meta(ge=1, le=_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Tops | None = None


# A body's fields, values undecoded: an unknown field ends decoding at once.
_ChatBody = fields_of("_ChatBody", (*_ChatRequest.__struct_fields__, *_NEUTRAL_CHAT, *_INERT))
_TextBody = fields_of("_TextBody", (*_TextRequest.__struct_fields__, *_NEUTRAL_TEXT, *_INERT))


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A checked request.

    prompt: messages for the chat template, a raw text, or token ids. options: for `Device.stream`;
    without ``max_tokens`` the answer may fill the context. choices: number of answers to make.
    best: number of likeliest answers to send; 0: all. echo: each answer begins with the prompt.
    logprobs, prompt_logprobs: whether to send these. params: `BadGrammarError.part` → the request's
    field that has this part of the grammar.
    """

    chat: bool
    prompt: PromptInput
    options: Options = field(default_factory=Options)
    model: str | None = None
    choices: int = 1
    best: int = 0
    echo: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    params: Mapping[str, str] = field(default_factory=dict)


def chat_request(body: bytes, defaults: Options) -> CompletionRequest:
    """Read a ``POST /v1/chat/completions``. defaults: the service's own options."""
    request = read_body(body, _ChatBody, _ChatRequest, _NEUTRAL_CHAT)
    messages = with_call_ids(
        [message_of(message, at) for at, message in enumerate(request.messages)]
    )
    most = request.max_completion_tokens or request.max_tokens
    functions = None if request.tools is None else [tool.function for tool in request.tools]
    tools = read_tools(functions, read_choice(request.tool_choice), request.parallel_tool_calls)
    thinking = thinking_of(request.chat_template_kwargs, request.reasoning_effort)
    talk = Talk(messages, tools, thinking)
    of_tools = {
        function.name: f"tools[{at}].function.parameters"
        for at, function in enumerate(functions or ())
    }
    completion = checked_request(
        request,
        chat=True,
        prompt=talk,
        most=most,
        defaults=defaults,
        format=request.response_format,
        choices=request.n or 1,
        logprobs=request.top_logprobs or 0 if request.logprobs else None,
        params={"": "response_format", **of_tools},
    )
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs", "top_logprobs needs logprobs.")
    return _with_prompt_logprobs(request.prompt_logprobs, completion)


def _with_prompt_logprobs(most: int | None, completion: CompletionRequest) -> CompletionRequest:
    """Add the prompt's log-probabilities to the answer, with ``most`` alternatives per token."""
    if most is None:
        return completion
    if completion.stream:
        raise bad_request(
            "prompt_logprobs",
            "prompt_logprobs can only be used with answers that are not streamed.",
        )
    completion.options["prompt_logprobs"] = most
    return replace(completion, prompt_logprobs=True)


def text_request(body: bytes, defaults: Options) -> CompletionRequest:
    """Read a ``POST /v1/completions``."""
    request = read_body(body, _TextBody, _TextRequest, _NEUTRAL_TEXT)
    completion = checked_request(
        request,
        chat=False,
        prompt=prompt_of(request.prompt),
        most=request.max_tokens or defaults.get("max_tokens") or COMPLETION_TOKENS,
        defaults=defaults,
        format=request.response_format,
        choices=request.n or 1,
        echo=bool(request.echo),
        logprobs=request.logprobs,
        params={"": "response_format"},
    )
    if completion.echo and not completion.stream:
        completion.options["prompt_logprobs"] = request.logprobs  # echoed tokens have them, too
    completion = _with_prompt_logprobs(request.prompt_logprobs, completion)
    return _best_of(request.best_of, completion) if request.best_of is not None else completion


def _best_of(most: int, completion: CompletionRequest) -> CompletionRequest:
    """Make ``most`` answers, and send the likeliest: as many as the request has choices."""
    if most < completion.choices or (completion.stream and most > completion.choices):
        raise bad_request(
            "best_of",
            f"best_of must be at least n ({completion.choices}), and equal to n if the answer is "
            "streamed.",
        )
    if most == completion.choices:
        return completion
    if not completion.logprobs:
        completion.options["logprobs"] = 0  # needed to rank the answers
    return replace(completion, choices=most, best=completion.choices)


_Kind = TypeVar("_Kind", bound=RequestFields)


def read_body(
    body: bytes,
    full_body: type[msgspec.Struct],
    kind: type[_Kind],
    neutral: Mapping[str, tuple[object, ...]],
) -> _Kind:
    """Read a body.

    full_body: type with all known fields. kind: type with the supported fields. neutral: as for
    `refuse_unless_neutral`.
    """
    try:
        fields = present_fields(msgspec.json.decode(without_bom(body), type=full_body))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (name := unknown_name(error)) is not None:
            raise unknown_field(name) from None
        raise RefusalError(
            400, f"The body is not a JSON object: {error}.", code="malformed"
        ) from None
    except RecursionError:
        raise RefusalError(400, "The body is nested too deeply.", code="malformed") from None
    refuse_unless_neutral(fields, neutral)
    try:
        known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
        return msgspec.json.decode(msgspec.json.encode(known), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_value(error, str(error)) from None


def checked_request(
    request: RequestFields,
    *,
    chat: bool,
    prompt: PromptInput,
    most: int | None,
    defaults: Options,
    format: Format | FormatOfText | None,
    choices: int = 1,
    echo: bool = False,
    logprobs: int | None = None,
    params: Mapping[str, str],
) -> CompletionRequest:
    """Check the fields that all routes share.

    most: limit of the answer's tokens. params: as in `CompletionRequest`; the key "" has the field
    of the answer's format.
    """
    options = _options(request, defaults, format)
    options["logprobs"] = logprobs
    if most is not None:
        options["max_tokens"] = most
    protocol = options.get("protocol")
    if isinstance(protocol, str) and protocol != AUTO:
        plan(**options)  # called for its checks, before the request waits in the queue
    usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    return CompletionRequest(
        chat=chat,
        prompt=prompt,
        options=options,
        model=request.model,
        choices=choices,
        echo=echo,
        logprobs=logprobs is not None,
        stream=bool(request.stream),
        include_usage=usage,
        params=params if format is not None else {**params, "": "structured_outputs"},
    )


def _options(
    request: RequestFields, defaults: Options, format: Format | FormatOfText | None
) -> Options:
    options = defaults.copy()
    sampling = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    options.update(cast(Options, sampling))
    if (grammar := grammar_of(format, request.structured_outputs)) is not None:
        options["grammar"] = grammar
        options.pop("schema", None)
    if request.stop is not None:
        options["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    extend(options, request.pilotfish)
    return options
