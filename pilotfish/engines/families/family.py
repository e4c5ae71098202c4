"""A family of models: how they are told of tools, and how they write calls and thoughts.

In:  a chat template's source, messages, tools. Out: what the template is to render. Templates that
     know of no tools are told in words, in the format that the family was trained for.
"""

import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pilotfish.engines.errors import TemplateError
from pilotfish.engines.families.tools import Tool, arguments_of

Message = Mapping[str, Any]
_ALPHABET = string.ascii_letters + string.digits


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are written: trigger, opening, the calls with ``between`` between them, closing.

    A call is ``before``, the tool's name, ``behind``, its arguments as JSON, ``end``. The texts
    may name control tokens. trigger: no plain text of a turn contains it or, unless ``anywhere``,
    begins with it. gap: may stand behind it. parallel: several calls may be in a turn.
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
    parallel: bool = True

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Write these calls, each a name and its arguments."""
        texts = [
            f"{self.before}{name}{self.behind}{json.dumps(arguments, ensure_ascii=False)}{self.end}"
            for name, arguments in calls
        ]
        return self.trigger + self.opening + self.between.join(texts) + self.closing


def _parsed(message: Message) -> Message:
    """Return a message whose calls have values as arguments, which templates write as JSON."""
    if not (calls := message.get("tool_calls")):
        return message
    try:
        read = [
            {**call, "function": {**one, "arguments": arguments_of(one.get("arguments"))}}
            for call in calls
            for one in (call["function"],)
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise TemplateError(f"a message's tool_calls: {error}") from None
    return {**message, "content": message.get("content") or "", "tool_calls": read}


def _call_id() -> str:
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family.

    speaks: whether a chat template is of it. calls: None: it writes none that can be constrained.
    taught: what stands in a template that tells of tools by itself. tell: with that, changes
    messages and tools to what the template takes. thought: what begins and ends a thought, where
    the template names them. call_id: makes the id of a call.
    """

    name: str
    speaks: Callable[[str], bool]
    calls: Calls | None
    taught: str
    tell: Callable[[Sequence[Message], Sequence[Tool]], tuple[Sequence[Message], Any]] | None = None
    thought: tuple[str, str] = ("<think>", "</think>")
    call_id: Callable[[], str] = _call_id

    def told(
        self, template: str, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
        """Return the messages and the tools that the template takes.

        Raises `TemplateError` for calls whose arguments are no JSON.
        """
        messages = [_parsed(message) for message in messages]
        if self.taught in template:
            if self.tell is not None:
                return self.tell(messages, tools)
            return messages, [tool.told for tool in tools] or None
        return self.in_words(messages, tools), None

    def in_words(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Write tools, calls and results as plain text."""
        assert self.calls is not None or not tools
        said = [self._in_words(message) for message in messages]
        if not tools:
            return said
        assert self.calls is not None
        form = self.calls.written([("<name>", "<arguments>")]).replace(
            '"<arguments>"', "<arguments>"
        )
        lines = [json.dumps(tool.told["function"], ensure_ascii=False) for tool in tools]
        words = (
            "You may call functions. Their signatures are\n"
            + "\n".join(lines)
            + "\nTo call one, answer with its name and a JSON object of its arguments in this "
            + f"form, and nothing else:\n{form}\nIf no function is of use, answer in words."
        )
        if said and said[0]["role"] == "system":
            return [{**said[0], "content": f"{said[0]['content']}\n\n{words}"}, *said[1:]]
        return [{"role": "system", "content": words}, *said]

    def _in_words(self, message: Message) -> Message:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            return {"role": "user", "content": text}
        if not (calls := message.get("tool_calls")) or self.calls is None:
            return message
        functions = [call["function"] for call in calls]
        text = self.calls.written([(one["name"], one["arguments"]) for one in functions])
        said = [part for part in (message["content"], text) if part]
        return {"role": "assistant", "content": "\n".join(said)}
