"""A chat format: a model family's way to present tools, and to write calls and thoughts.

In:  a chat template's source, messages, tools. Out: the messages and tools to render. If a template
does not render tools, they are added to the messages as plain text, in the form that the family was
trained on.
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
    """The syntax of calls: trigger, opening, the calls (separated by ``between``), closing.

    A call is ``before``, the tool's name, ``behind``, the arguments as JSON, ``end``. These texts
    may contain control tokens. trigger: text that starts the calls. If ``anywhere``, plain text of
    a turn cannot contain the trigger; otherwise plain text only cannot start with the trigger. gap:
    optional text after the trigger.
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
        """Write calls, given as pairs of name and arguments."""
        texts = [
            f"{self.before}{name}{self.behind}{json.dumps(arguments, ensure_ascii=False)}{self.end}"
            for name, arguments in calls
        ]
        return self.trigger + self.opening + self.between.join(texts) + self.closing


def call_id(prefix: str = "call_", length: int = 24) -> str:
    """Make a random call id."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(length))


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """The chat format of one model family.

    matches: function that recognises the family's chat templates. calls: syntax of calls; None if
    calls cannot be constrained. parallel: whether a turn may have several calls. takes_tools:
    function that returns whether a template renders tools. convert: function that rewrites messages
    and tools for the family's templates. thought: begin and end of a thought, used if the template
    contains the end. call_id: function that makes the id of a call.
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
        """Return the messages and the tools that the template should render.

        Raises `TemplateError` for malformed calls.
        """
        messages = [_parse_arguments(message) for message in messages]
        if not self.takes_tools(template):
            return self.to_plain_text(messages, tools), None
        if self.convert is not None:
            return self.convert(messages, tools), None
        return messages, [tool.openai_object for tool in tools] or None

    def to_plain_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Rewrite messages so that tools, calls and results are plain text."""
        plain: list[Message] = []
        last_is_converted = False
        for message in messages:
            converted = self._message_to_plain_text(message)
            is_converted = converted is not message
            # templates may require that user and assistant alternate
            if (
                plain
                and (is_converted or last_is_converted)
                and plain[-1].get("role") == converted.get("role")
            ):
                before = plain.pop().get("content") or ""
                converted = {**converted, "content": f"{before}\n{converted.get('content') or ''}"}
            plain.append(converted)
            last_is_converted = is_converted
        if not tools or self.calls is None:
            return plain
        instructions = _tool_instructions(self.calls, tools)
        if plain and plain[0].get("role") == "system":
            return [
                {**plain[0], "content": f"{plain[0].get('content')}\n\n{instructions}"},
                *plain[1:],
            ]
        return [{"role": "system", "content": instructions}, *plain]

    def _message_to_plain_text(self, message: Message) -> Message:
        if message.get("role") == "tool":
            return {"role": "user", "content": _RESULT.format(message.get("content"))}
        if not (calls := message.get("tool_calls")) or self.calls is None:
            return message
        functions = [call["function"] for call in calls]
        text = self.calls.format(
            [(function["name"], function["arguments"]) for function in functions]
        )
        parts = [part for part in (message["content"], text) if part]
        return {"role": "assistant", "content": "\n".join(parts)}


def _tool_instructions(calls: Calls, tools: Sequence[Tool]) -> str:
    example = calls.format([("<name>", "<arguments>")]).replace('"<arguments>"', "<arguments>")
    lines = [json.dumps(tool.openai_object["function"], ensure_ascii=False) for tool in tools]
    return (
        "You may call functions. Their signatures are\n"
        + "\n".join(lines)
        + "\nTo call one, answer with its name and a JSON object of its arguments in this "
        + f"form, and nothing else:\n{example}\nIf no function is of use, answer in words."
    )


def system_into_first_user(messages: Sequence[Message]) -> list[Message]:
    """Move a system message into the first user message, for templates without system messages."""
    system, *rest = messages
    index = next(
        (index for index, message in enumerate(rest) if message.get("role") == "user"), None
    )
    if system.get("role") != "system" or index is None:
        return [*messages]
    content = f"{system.get('content')}\n\n{rest[index].get('content')}"
    return [*rest[:index], {**rest[index], "content": content}, *rest[index + 1 :]]


def _parse_arguments(message: Message) -> Message:
    """Parse the arguments of a message's calls; templates write values as JSON."""
    if not (calls := message.get("tool_calls")):
        return message
    try:
        parsed = [
            {**call, "function": {**function, "name": function["name"], "arguments": arguments}}
            for call in calls
            for function in (call["function"],)
            for arguments in (arguments_of(function["name"], function.get("arguments")),)
        ]
    except (TypeError, KeyError, AttributeError):
        raise TemplateError(
            'a message\'s tool_calls must be a list of {"function": {"name": …, "arguments": …}}'
        ) from None
    return {**message, "content": message.get("content") or "", "tool_calls": parsed}
