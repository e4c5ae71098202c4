"""Read and check the bodies of OpenAI's two completion routes.

In: the bytes of a request. Out: a `CompletionRequest`, or a `RefusalError` that names the field at
fault. Unknown fields are refused, and so are unsupported fields that would change the answer.
Fields that cannot change a text are ignored.

Further fields are vLLM's ``top_k``, ``min_p`` and ``repetition_penalty``, and the object
``pilotfish`` with the options of protocol and drafter (`body`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import structs

from pilotfish.bridge import PromptInput, Talk
from pilotfish.device_runtime.plan import plan
from pilotfish.device_runtime.service.body import (
    BodyFields,
    Format,
    FormatOfText,
    Values,
    read_body,
    request_of,
)
from pilotfish.device_runtime.service.prompts import (
    Effort,
    MessageFields,
    TemplateFields,
    message_of,
    prompt_of,
    thinking_of,
)
from pilotfish.device_runtime.service.refusal import bad_request
from pilotfish.device_runtime.service.tools import (
    Choice,
    ToolList,
    read_choice,
    read_tools,
    with_call_ids,
)
from pilotfish.wire.messages import MAX_LOGPROBS
from pilotfish.wire.request import AUTO, MaxTokens, Request

COMPLETION_TOKENS = 16  # default of /v1/completions, as at OpenAI
MESSAGES = 4096
_CHOICES = 16  # limit of answers to one prompt

Tops = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]


class _PredictedPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class _Prediction(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="content"):
    """OpenAI's ``prediction``: the text that the answer is expected to resemble."""

    content: str | list[_PredictedPart]

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class _CompletionsBody(BodyFields, kw_only=True):
    inert: ClassVar[frozenset[str]] = frozenset(
        (
            "metadata",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        )
    )

    max_tokens: MaxTokens | None = None
    response_format: Format | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=_CHOICES)] | None = None
    prompt_logprobs: Tops | None = None  # vLLM's
    prediction: _Prediction | None = None


class _ChatBody(_CompletionsBody, kw_only=True):
    neutral: ClassVar[Values] = {
        "audio": (None,),
        "function_call": (None, "none"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "verbosity": (None,),
        "web_search_options": (None,),
    }

    messages: Annotated[list[MessageFields], msgspec.Meta(min_length=1, max_length=MESSAGES)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    tools: ToolList | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateFields | None = None


class _TextBody(_CompletionsBody, kw_only=True):
    neutral: ClassVar[Values] = {"suffix": (None, "")}

    prompt: msgspec.Raw
    best_of: Annotated[int, msgspec.Meta(ge=1, le=_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Tops | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A checked request.

    prompt: messages for the chat template, a raw text, or token ids. request: the options of
    each answer. choices: number of answers to make.
    best: number of likeliest answers to send; 0: all. echo: each answer begins with the prompt.
    logprobs, prompt_logprobs: whether to send these. params: `BadGrammarError.part` → the request's
    field that has this part of the grammar.
    """

    chat: bool
    prompt: PromptInput
    request: Request
    model: str | None = None
    choices: int = 1
    best: int = 0
    echo: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    params: Mapping[str, str] = field(default_factory=dict)


def chat_request(body: bytes, defaults: Request) -> CompletionRequest:
    """Read a ``POST /v1/chat/completions``. defaults: the service's own options."""
    fields = read_body(body, _ChatBody)
    messages = with_call_ids(
        [message_of(message, at) for at, message in enumerate(fields.messages)]
    )
    most = fields.max_completion_tokens or fields.max_tokens
    functions = None if fields.tools is None else [tool.function for tool in fields.tools]
    tools = read_tools(functions, read_choice(fields.tool_choice), fields.parallel_tool_calls)
    thinking = thinking_of(fields.chat_template_kwargs, fields.reasoning_effort)
    talk = Talk(messages, tools, thinking)
    of_tools = {
        function.name: f"tools[{at}].function.parameters"
        for at, function in enumerate(functions or ())
    }
    completion = checked_request(
        fields,
        chat=True,
        prompt=talk,
        most=most,
        defaults=defaults,
        format=fields.response_format,
        choices=fields.n or 1,
        logprobs=fields.top_logprobs or 0 if fields.logprobs else None,
        params={"": "response_format", **of_tools},
    )
    if fields.top_logprobs and not fields.logprobs:
        raise bad_request("top_logprobs", "top_logprobs needs logprobs.")
    return _with_prompt_logprobs(fields.prompt_logprobs, _with_prediction(fields, completion))


def _with_prediction(fields: _CompletionsBody, completion: CompletionRequest) -> CompletionRequest:
    """Add the answers' predicted text, if the body has one."""
    if fields.prediction is None:
        return completion
    return with_options(completion, prediction=fields.prediction.text)


def _with_prompt_logprobs(most: int | None, completion: CompletionRequest) -> CompletionRequest:
    """Add the prompt's log-probabilities to the answer, with ``most`` alternatives per token."""
    if most is None:
        return completion
    if completion.stream:
        raise bad_request(
            "prompt_logprobs",
            "prompt_logprobs can only be used with answers that are not streamed.",
        )
    return replace(with_options(completion, prompt_logprobs=most), prompt_logprobs=True)


def with_options(completion: CompletionRequest, **changes: Any) -> CompletionRequest:
    """Change options of the answers."""
    return replace(completion, request=structs.replace(completion.request, **changes))


def text_request(body: bytes, defaults: Request) -> CompletionRequest:
    """Read a ``POST /v1/completions``."""
    fields = read_body(body, _TextBody)
    completion = checked_request(
        fields,
        chat=False,
        prompt=prompt_of(fields.prompt),
        most=fields.max_tokens or defaults.max_tokens or COMPLETION_TOKENS,
        defaults=defaults,
        format=fields.response_format,
        choices=fields.n or 1,
        echo=bool(fields.echo),
        logprobs=fields.logprobs,
        params={"": "response_format"},
    )
    if completion.echo and not completion.stream:
        # echoed tokens have them, too
        completion = with_options(completion, prompt_logprobs=fields.logprobs)
    completion = _with_prediction(fields, completion)
    completion = _with_prompt_logprobs(fields.prompt_logprobs, completion)
    return _best_of(fields.best_of, completion) if fields.best_of is not None else completion


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
        completion = with_options(completion, logprobs=0)  # needed to rank the answers
    return replace(completion, choices=most, best=completion.choices)


def checked_request(
    fields: BodyFields,
    *,
    chat: bool,
    prompt: PromptInput,
    most: int | None,
    defaults: Request,
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
    request = structs.replace(request_of(fields, defaults, format), logprobs=logprobs)
    if most is not None:
        request = structs.replace(request, max_tokens=most)
    if request.protocol not in (None, AUTO):
        plan(request)  # called for its checks, before the request waits in the queue
    stream_options = fields.stream_options
    return CompletionRequest(
        chat=chat,
        prompt=prompt,
        request=request,
        model=fields.model,
        choices=choices,
        echo=echo,
        logprobs=logprobs is not None,
        stream=bool(fields.stream),
        include_usage=stream_options is not None and bool(stream_options.include_usage),
        params=params if format is not None else {**params, "": "structured_outputs"},
    )
