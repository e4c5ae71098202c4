"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as in vLLM.

In: bodies. Out: bodies, or a `RefusalError` that names the field at fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec

from pilotfish.bridge import PromptInput, Talk
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.service.body import STRICT, read_fields
from pilotfish.device_runtime.service.field_check import (
    IgnoredFields,
    RequestFields,
    Values,
)
from pilotfish.device_runtime.service.prompts import (
    MessageFields,
    TemplateFields,
    message_of,
    prompt_for,
    thinking_of,
)
from pilotfish.device_runtime.service.refusal import Body, RefusalError, bad_request
from pilotfish.device_runtime.service.tools import ToolList, functions_of, read_tools

_MOST = 1 << 20  # limit of tokens to detokenise
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Tokenize(RequestFields):
    neutral: ClassVar[Values] = {
        "add_generation_prompt": (None, True),
        "chat_template": (None, ""),
        "continue_final_message": (None, False),
        "mm_processor_kwargs": (None, {}),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[MessageFields], msgspec.Meta(min_length=1, max_length=4096)] | None = (
        None
    )
    tools: ToolList | None = None
    chat_template_kwargs: TemplateFields | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class _Detokenize(RequestFields):
    tokens: Annotated[list[_Token], msgspec.Meta(max_length=_MOST)]
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class TokenizeRequest:
    """A checked request for a prompt's tokens.

    model: the name of the model that the client asks for. chat: whether the prompt consists of
    messages. whole: None: a text is read as a raw prompt;
    otherwise names of control tokens in it are control tokens, as in vLLM, and the tokens that
    belong before a text are added (True) or not. words: whether to return the tokens' texts.
    """

    prompt: PromptInput
    model: str | None = None
    chat: bool = False
    whole: bool | None = None
    words: bool = False


def tokenize_request(body: bytes, ignored: IgnoredFields = STRICT) -> TokenizeRequest:
    """Read a ``POST /tokenize``."""
    request = read_fields(body, _Tokenize, ignored)
    model, words = request.model, bool(request.return_token_strs)
    if request.messages is not None:
        if request.prompt is not None:
            raise bad_request("prompt", "Give either a prompt or messages, not both.")
        if request.add_special_tokens:
            raise _only_with("a prompt", "add_special_tokens")
        messages = [message_of(message, at) for at, message in enumerate(request.messages)]
        tools = read_tools(functions_of(request.tools or (), ignored).values())
        template = request.chat_template_kwargs or TemplateFields()
        thinking = thinking_of(None, template.enable_thinking, template.thinking)
        talk = Talk(messages, tools, thinking)
        return TokenizeRequest(prompt=talk, model=model, chat=True, words=words)
    if request.prompt is None:
        raise bad_request("prompt", "Give a prompt or messages.")
    if request.tools:
        raise _only_with("messages", "tools")
    if request.chat_template_kwargs is not None:
        raise _only_with("messages", "chat_template_kwargs")
    return TokenizeRequest(
        prompt=request.prompt, model=model, whole=request.add_special_tokens, words=words
    )


def _only_with(other: str, field: str) -> RefusalError:
    return bad_request(field, f"{field} can only be used with {other}.")


def tokenize_response(device: Device, request: TokenizeRequest) -> Body:
    """Return the tokens of a prompt, in the vocabulary of the last known edge."""
    if request.whole is None:
        ids = prompt_ids(device, request.prompt, chat=request.chat)
    else:
        _expect_vocabulary(device.knows_target)
        assert isinstance(request.prompt, str)
        tokenizer = device.tokenizer
        ids = tokenizer.encode(request.prompt, special=True, most=_MOST)
        ids = [*tokenizer.beginning, *ids] if request.whole else ids
    pieces = [device.tokenizer.piece(id) for id in ids] if request.words else None
    return {
        "count": len(ids), "max_model_len": device.context, "tokens": ids, "token_strs": pieces,
    }  # fmt: skip


def prompt_ids(device: Device, prompt_input: PromptInput, *, chat: bool) -> list[int]:
    """Return the ids of a prompt's tokens, in the vocabulary of the last known edge."""
    prompt = prompt_for(device, prompt_input, chat=chat)
    _expect_vocabulary(bool(prompt.vocabulary))
    ids: list[int] = prompt.ids.tolist()
    return ids


def tokenizer_info(device: Device) -> Body:
    """Describe the tokenizer of the last known edge, by the names in a tokenizer_config.json."""
    _expect_vocabulary(device.knows_target)
    vocabulary, tokenizer = device.vocabulary, device.tokenizer
    named: Body = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"))
    if vocabulary.eos_ids:
        named["eos_token"] = tokenizer.piece(vocabulary.eos_ids[0])
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        **{name: token for name, token in vocabulary.named_tokens.items() if token},
        "additional_special_tokens": sorted(
            token.content for token in tokenizer.special_tokens.values()
        ),
        "add_bos_token": bool(tokenizer.beginning),
        "model_max_length": device.context,
        "vocab_size": vocabulary.vocab_size,
        "chat_template": vocabulary.chat_template,
    }


def capabilities(device: Device) -> list[str]:
    """List what the model of the last known edge can do, by Ollama's and LM Studio's names."""
    source = device.vocabulary.with_tools.chat_template
    if source is None:
        return ["completion"]
    chat_format = device.vocabulary.with_tools.chat_format
    tools = ["tools", "tool_use"] if chat_format.takes_tools(source) else []
    return ["completion", "chat", *tools]


def _expect_vocabulary(known: bool) -> None:
    if not known:
        raise RefusalError(
            503, "The edge's vocabulary is not known yet.", code="no_edge", reason="no-edge"
        )


def detokenize_request(
    body: bytes, ignored: IgnoredFields = STRICT
) -> tuple[str | None, Sequence[int]]:
    """Read a ``POST /detokenize``: (the model's name, the tokens)."""
    request = read_fields(body, _Detokenize, ignored)
    return request.model, request.tokens


def detokenize_response(device: Device, tokens: Sequence[int]) -> Body:
    """Return the text of tokens."""
    size = device.tokenizer.vocab_size
    if (token := max(tokens, default=0)) >= size:
        raise bad_request(
            "tokens", f"Token {token} is out of range: the vocabulary has {size} tokens."
        )
    return {"prompt": device.tokenizer.decode(tokens, special=True)}
