"""`/tokenize` and `/detokenize`, as in vLLM: the tokens of a prompt, and their text.

In: bodies. Out: bodies, or a `RefusalError` that names the field at fault.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from pilotfish.base.reading import without_bom
from pilotfish.bridge import PromptInput, Talk
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.service.prompts import (
    MessageFields,
    TemplateFields,
    message_of,
    prompt_for,
    thinking_of,
    unknown_field,
    unknown_name,
)
from pilotfish.device_runtime.service.refusal import RefusalError, bad_request
from pilotfish.device_runtime.service.tools import ToolList, read_tools

Body = dict[str, Any]
_MOST = 1 << 20  # limit of tokens to detokenise
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Tokenize(msgspec.Struct, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[MessageFields], msgspec.Meta(min_length=1, max_length=4096)] | None = (
        None
    )
    tools: ToolList | None = None
    chat_template_kwargs: TemplateFields | None = None
    return_token_strs: bool | None = None


class _Detokenize(msgspec.Struct, forbid_unknown_fields=True):
    tokens: Annotated[list[_Token], msgspec.Meta(max_length=_MOST)]
    model: str | None = None


def tokenize_request(body: bytes) -> tuple[PromptInput, bool, bool]:
    """Read a ``POST /tokenize``: (prompt, whether it is a chat, whether to return token texts)."""
    request = _read(body, _Tokenize)
    words = bool(request.return_token_strs)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("prompt", "Give a prompt or messages.")
    if request.messages is not None:
        messages = [message_of(message, at) for at, message in enumerate(request.messages)]
        tools = read_tools([tool.function for tool in request.tools or ()], None, None)
        thinking = thinking_of(request.chat_template_kwargs)
        return Talk(messages, tools, thinking), True, words
    if request.tools or request.chat_template_kwargs is not None:
        raise bad_request("tools", "tools can only be used with messages.")
    assert request.prompt is not None
    return request.prompt, False, words


def tokenize_response(
    device: Device, prompt_input: PromptInput, *, chat: bool, words: bool
) -> Body:
    """Return the tokens of a prompt, in the vocabulary of the last known edge."""
    ids = prompt_ids(device, prompt_input, chat=chat)
    pieces = [device.tokenizer.piece(id) for id in ids] if words else None
    return {
        "count": len(ids), "max_model_len": device.context, "tokens": ids, "token_strs": pieces,
    }  # fmt: skip


def prompt_ids(device: Device, prompt_input: PromptInput, *, chat: bool) -> list[int]:
    """Return the ids of a prompt's tokens in this vocabulary; refuse if it is not known yet."""
    prompt = prompt_for(device, prompt_input, chat=chat)
    if not prompt.vocabulary:
        raise RefusalError(
            503, "The edge's vocabulary is not known yet.", code="no_edge", reason="no-edge"
        )
    ids: list[int] = prompt.ids.tolist()
    return ids


def detokenize_request(body: bytes) -> Sequence[int]:
    """Read a ``POST /detokenize``."""
    tokens: list[int] = _read(body, _Detokenize).tokens
    return tokens


def detokenize_response(device: Device, tokens: Sequence[int]) -> Body:
    """Return the text of tokens."""
    size = device.tokenizer.vocab_size
    if (token := max(tokens, default=0)) >= size:
        raise bad_request(
            "tokens", f"Token {token} is out of range: the vocabulary has {size} tokens."
        )
    return {"prompt": device.tokenizer.decode(tokens, special=True)}


def _read(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(without_bom(body), type=kind)
    except RecursionError:
        raise RefusalError(400, "The body is nested too deeply.", code="malformed") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (name := unknown_name(error)) is not None:
            raise unknown_field(name) from None
        raise bad_request(None, f"{error}.") from None
