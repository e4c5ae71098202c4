"""Read and check the bodies of OpenAI's two completion routes.

In: the bytes of a request. Out: a `CompletionRequest`, or a `RefusalError` that names the field at
fault. Unsupported fields that would change the answer are refused. Unknown fields are ignored, or
refused by a strict service. Fields that cannot change a text are ignored.

Further fields are vLLM's ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos`` and
``stop_token_ids``, and the object ``pilotfish`` with the options of protocol and drafter (`body`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeAlias

import msgspec
from msgspec import structs

from pilotfish.bridge import PromptInput, Talk
from pilotfish.device_runtime.plan import plan
from pilotfish.device_runtime.service.body import (
    STRICT,
    BodyFields,
    Format,
    FormatOfText,
    read_body,
    request_of,
)
from pilotfish.device_runtime.service.field_check import IgnoredFields, RequestFields, Values
from pilotfish.device_runtime.service.prompts import (
    Effort,
    MessageFields,
    TemplateFields,
    message_of,
    prompts_of,
    thinking_of,
)
from pilotfish.device_runtime.service.refusal import bad_request
from pilotfish.device_runtime.service.tools import (
    Choice,
    ToolList,
    functions_of,
    read_choice,
    read_tools,
    with_call_ids,
)
from pilotfish.wire.messages import MAX_LOGPROBS
from pilotfish.wire.request import AUTO, Request

COMPLETION_TOKENS = 16  # default of /v1/completions, as at OpenAI
MESSAGES = 4096
_CHOICES = 16  # limit of answers to one prompt
_ANSWERS = 1024  # limit of answers to all prompts of a request

# -1 is llama.cpp's "no limit", as if the field were left out.
Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
Tops = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]


class _PredictedPart(RequestFields, tag_field="type", tag="text"):
    text: str


class _Prediction(RequestFields, tag_field="type", tag="content"):
    """OpenAI's ``prediction``: the text that the answer is expected to resemble."""

    content: str | list[_PredictedPart]

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class _CompletionsBody(BodyFields, kw_only=True):
    max_tokens: Limit | None = None
    response_format: Format | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=_CHOICES)] | None = None
    prompt_logprobs: Tops | None = None  # vLLM's
    prediction: _Prediction | None = None


class _Reasoning(RequestFields):
    """OpenRouter's ``reasoning``."""

    inert: ClassVar[frozenset[str]] = frozenset(("exclude", "summary"))
    unsupported_hints: ClassVar[Values] = {"max_tokens": (None,)}

    effort: Effort | None = None
    enabled: bool | None = None


class _ChatBody(_CompletionsBody, kw_only=True):
    neutral: ClassVar[Values] = {
        **BodyFields.neutral,
        "add_generation_prompt": (None, True),
        "add_special_tokens": (None, False),
        "audio": (None,),
        "best_of": (None, 1),
        "continue_final_message": (None, False),
        "echo": (None, False),
        "function_call": (None, "none"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
    }

    messages: Annotated[list[MessageFields], msgspec.Meta(min_length=1, max_length=MESSAGES)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    tools: ToolList | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: _Reasoning | None = None
    enable_thinking: bool | None = None  # as in ``chat_template_kwargs``
    chat_template_kwargs: TemplateFields | None = None


class _TextBody(_CompletionsBody, kw_only=True):
    neutral: ClassVar[Values] = {
        **BodyFields.neutral,
        "add_special_tokens": (None, True),
        "suffix": (None, ""),
    }

    prompt: msgspec.Raw
    best_of: Annotated[int, msgspec.Meta(ge=1, le=_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Tops | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A checked request.

    prompts: the messages for the chat template; or raw prompts, each a text or token ids. request:
    the options of each answer. choices: number of answers to make to each prompt. best: number of
    likeliest answers to send for each prompt; 0: all. scores: send none of the answers' tokens.
    echo: each answer begins with the prompt. logprobs, prompt_logprobs: whether to send these.
    params: `BadGrammarError.part` → the request's field that has this part of the grammar.
    """

    chat: bool
    prompts: Sequence[PromptInput]
    request: Request
    model: str | None = None
    choices: int = 1
    best: int = 0
    scores: bool = False
    echo: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    params: Mapping[str, str] = field(default_factory=dict)


def chat_request(
    body: bytes, defaults: Request, ignored: IgnoredFields = STRICT
) -> CompletionRequest:
    """Read a ``POST /v1/chat/completions``.

    defaults: the service's own options. ignored: as in `read_body`.
    """
    fields = read_body(body, _ChatBody, ignored)
    messages = with_call_ids(
        [message_of(message, at) for at, message in enumerate(fields.messages)]
    )
    functions = functions_of(fields.tools or (), ignored)
    tools = read_tools(
        functions.values(), read_choice(fields.tool_choice), fields.parallel_tool_calls
    )
    reasoning = fields.reasoning or _Reasoning()
    template = fields.chat_template_kwargs or TemplateFields()
    thinking = thinking_of(
        fields.reasoning_effort or reasoning.effort,
        template.enable_thinking,
        template.thinking,
        fields.enable_thinking,
        reasoning.enabled,
    )
    talk = Talk(messages, tools, thinking)
    of_tools = {
        function.name: f"tools[{at}].function.parameters" for at, function in functions.items()
    }
    completion = checked_request(
        fields,
        chat=True,
        prompts=[talk],
        most=limit_of("max_completion_tokens", fields.max_completion_tokens)
        or limit_of("max_tokens", fields.max_tokens),
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


def text_request(
    body: bytes, defaults: Request, ignored: IgnoredFields = STRICT
) -> CompletionRequest:
    """Read a ``POST /v1/completions``; otherwise as `chat_request`."""
    fields = read_body(body, _TextBody, ignored)
    most = fields.max_tokens
    if most is None:
        most = defaults.max_tokens or COMPLETION_TOKENS
    completion = checked_request(
        fields,
        chat=False,
        prompts=prompts_of(fields.prompt),
        most=most if most > 0 else 1 if most == 0 else None,
        defaults=defaults,
        format=fields.response_format,
        choices=fields.n or 1,
        echo=bool(fields.echo),
        logprobs=fields.logprobs,
        params={"": "response_format"},
    )
    completion = replace(completion, scores=most == 0)
    if len(completion.prompts) * (fields.best_of or completion.choices) > _ANSWERS:
        raise bad_request("n", f"A request may have at most {_ANSWERS} answers in total.")
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


def limit_of(field: str, most: int | None) -> int | None:
    """Return an answer's limit of tokens; None if there is none."""
    if most == 0:
        raise bad_request(field, f"{field} must be at least 1: only /v1/completions takes 0.")
    return None if most == -1 else most


def _has_tools(prompts: Sequence[PromptInput]) -> bool:
    return any(isinstance(prompt, Talk) and prompt.tools is not None for prompt in prompts)


def checked_request(
    fields: BodyFields,
    *,
    chat: bool,
    prompts: Sequence[PromptInput],
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
    if request.ignore_eos and (request.grammar is not None or _has_tools(prompts)):
        raise bad_request(
            "ignore_eos", "ignore_eos cannot be used with tools or a format: both end the answer."
        )
    stream_options = fields.stream_options
    return CompletionRequest(
        chat=chat,
        prompts=prompts,
        request=request,
        model=fields.model,
        choices=choices,
        echo=echo,
        logprobs=logprobs is not None,
        stream=bool(fields.stream),
        include_usage=bool(stream_options and stream_options.include_usage),
        params=params if format is not None else {**params, "": "structured_outputs"},
    )
