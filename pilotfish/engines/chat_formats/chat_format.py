"""A family of models: how they are told of tools, and how they write calls and thoughts.

In:  a chat template's source, messages, tools. Out: what the template is to render. Templates that
     know of no tools are told in words, in the form that the family was trained for.
"""

import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pilotfish.engines.chat_formats.tools import Tool, arguments_of
from pilotfish.engines.engine_errors import TemplateError

Message = Mapping[str, Any]
_ALPHABET = string.ascii_letters + string.digits
_RESULT = "<tool_response>\n{}\n</tool_response>"


class Calls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How calls are written: trigger, opening, the calls with ``between`` between them, closing.

    A call is ``before``, the tool's name, ``behind``, its arguments as JSON, ``end``. The texts
    may name control tokens. trigger: no words of a turn that may have calls contain it or, unless
    ``anywhere``, begin with it. gap: may stand behind it.
    """

    trigger: str
    gap: str = ""
    opening: str = ""
    before: str = '{"name": "'
    behind: str = '", "arguments": '
    end: str = "}"
    between: str = ", "
    closing: str = ""
    anywhere: bool = True

    def format(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Write these calls, each a name and its arguments."""
        texts = [
            f"{self.before}{name}{self.behind}{json.dumps(arguments, ensure_ascii=False)}{self.end}"
            for name, arguments in calls
        ]
        return self.trigger + self.opening + self.between.join(texts) + self.closing


def call_id(prefix: str = "call_", length: int = 24) -> str:
    """Make the id of a call."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(length))


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """One family.

    speaks: whether a chat template is of it. calls: None: it writes none that can be constrained.
    parallel: several calls may be in a turn. taught: whether a template tells of tools by itself,
    in the family's form; tell: with such a one, changes messages and tools to what it takes.
    thought: what begins and ends a thought, where the template names its end. call_id: makes the id
    of a call.
    """

    name: str
    matches: Callable[[str], bool]
    calls: Calls | None
    takes_tools: Callable[[str], bool]
    parallel: bool = True
    convert: Callable[[Sequence[Message], Sequence[Tool]], list[Message]] | None = None
    thought: tuple[str, str] = ("<think>", "</think>")
    call_id: Callable[[], str] = call_id

    def to_template(
        self, template: str, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
        """Return the messages and the tools that the template takes.

        Raises `TemplateError` for calls that are none.
        """
        messages = [_parsed(message) for message in messages]
        if not self.takes_tools(template):
            return self.to_plain_text(messages, tools), None
        if self.convert is not None:
            return self.convert(messages, tools), None
        return messages, [tool.openai_object for tool in tools] or None

    def to_plain_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Write tools, calls and results as plain text."""
        said: list[Message] = []
        written = False  # the last one is in our words
        for message in messages:
            told = self._message_to_plain_text(message)
            ours = told is not message
            # templates may want users and assistants to take turns
            if said and (ours or written) and said[-1].get("role") == told.get("role"):
                before = said.pop().get("content") or ""
                told = {**told, "content": f"{before}\n{told.get('content') or ''}"}
            said.append(told)
            written = ours
        if not tools or self.calls is None:
            return said
        words = _words(self.calls, tools)
        if said and said[0].get("role") == "system":
            return [{**said[0], "content": f"{said[0].get('content')}\n\n{words}"}, *said[1:]]
        return [{"role": "system", "content": words}, *said]

    def _message_to_plain_text(self, message: Message) -> Message:
        if message.get("role") == "tool":
            return {"role": "user", "content": _RESULT.format(message.get("content"))}
        if not (calls := message.get("tool_calls")) or self.calls is None:
            return message
        functions = [call["function"] for call in calls]
        text = self.calls.format([(one["name"], one["arguments"]) for one in functions])
        said = [part for part in (message["content"], text) if part]
        return {"role": "assistant", "content": "\n".join(said)}


def _words(calls: Calls, tools: Sequence[Tool]) -> str:
    form = calls.format([("<name>", "<arguments>")]).replace('"<arguments>"', "<arguments>")
    lines = [json.dumps(tool.openai_object["function"], ensure_ascii=False) for tool in tools]
    return (
        "You may call functions. Their signatures are\n"
        + "\n".join(lines)
        + "\nTo call one, answer with its name and a JSON object of its arguments in this "
        + f"form, and nothing else:\n{form}\nIf no function is of use, answer in words."
    )


def within_first_user(messages: Sequence[Message]) -> list[Message]:
    """Move a system message into the first message of the user, for templates without any."""
    system, *rest = messages
    at = next((at for at, one in enumerate(rest) if one.get("role") == "user"), None)
    if system.get("role") != "system" or at is None:
        return [*messages]
    content = f"{system.get('content')}\n\n{rest[at].get('content')}"
    return [*rest[:at], {**rest[at], "content": content}, *rest[at + 1 :]]


def _parsed(message: Message) -> Message:
    """Return a message whose calls have values as arguments, which templates write as JSON."""
    if not (calls := message.get("tool_calls")):
        return message
    try:
        read = [
            {**call, "function": {**one, "name": one["name"], "arguments": arguments}}
            for call in calls
            for one in (call["function"],)
            for arguments in (arguments_of(one["name"], one.get("arguments")),)
        ]
    except (TypeError, KeyError, AttributeError):
        raise TemplateError(
            'a message\'s tool_calls are a list of {"function": {"name": …, "arguments": …}}'
        ) from None
    return {**message, "content": message.get("content") or "", "tool_calls": read}
