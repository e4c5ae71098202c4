"""Read the conversation of Anthropic's ``/v1/messages``: a system prompt, and messages of blocks.

In:  the system prompt and the messages. Out: messages for a chat template, as the chat route makes
them, or a `RefusalError` that names the field at fault. As at Anthropic, successive messages of one
role are one message; its texts are joined by line breaks.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import ClassVar, Final, Literal, TypeAlias

import msgspec

from pilotfish.device_runtime.service.chat_messages import NO_TURN, Conversation, Message
from pilotfish.device_runtime.service.field_check import RequestFields
from pilotfish.device_runtime.service.refusal import bad_request
from pilotfish.device_runtime.service.tools import arguments_text
from pilotfish.engines.chat_formats.reader import ToolCall

_CALL_NOTES: Final = frozenset(("cache_control", "caller", "toolset_name"))


class TextBlock(RequestFields, tag="text"):
    """A text."""

    inert: ClassVar[frozenset[str]] = frozenset(("cache_control", "citations"))

    text: str


class ThinkingBlock(RequestFields, tag="thinking"):
    """A thought of an earlier answer; the signature is not verified."""

    inert: ClassVar[frozenset[str]] = frozenset(("cache_control", "signature"))

    thinking: str


class RedactedThinkingBlock(RequestFields, tag="redacted_thinking"):
    """A thought that only Anthropic can read; it is ignored."""

    inert: ClassVar[frozenset[str]] = frozenset(("cache_control", "data"))


class ToolUseBlock(RequestFields, tag="tool_use"):
    """A call of an earlier answer."""

    inert: ClassVar[frozenset[str]] = _CALL_NOTES

    id: str
    name: str
    input: msgspec.Raw

    def __post_init__(self) -> None:
        """Refuse an input that is no object."""
        if bytes(memoryview(self.input)[:1]) != b"{":
            raise ValueError("The input of a tool_use must be an object")


class _UnreadBlock(msgspec.Struct):
    def __post_init__(self) -> None:
        """Refuse the block."""
        raise ValueError("This service reads only text: it takes no images, documents or files")


class ImageBlock(_UnreadBlock, tag="image"):
    """An image."""


class DocumentBlock(_UnreadBlock, tag="document"):
    """A document."""


ResultBlock: TypeAlias = TextBlock | ImageBlock | DocumentBlock


class ToolResultBlock(RequestFields, tag="tool_result"):
    """The result of a call."""

    inert: ClassVar[frozenset[str]] = _CALL_NOTES

    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


Block: TypeAlias = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
)


class MessageItem(RequestFields):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def conversation_of(
    system: "str | Sequence[TextBlock] | None", items: Sequence[MessageItem]
) -> list[Message]:
    """Return the messages of a request. The last one may not be the assistant's."""
    if items[-1].role == "assistant":
        where = f"messages[{len(items) - 1}]"
        raise bad_request(
            where,
            f"{where} is the assistant's, and this service does not continue such a message "
            "(prefill): the last message must be of role user.",
        )
    conversation = _Conversation()
    if system is not None:
        conversation.add_text("system", _text_of(system))
    for at, item in enumerate(items):
        conversation.add(item, f"messages[{at}]")
    return _merge_successive(conversation.end_turn())


def _merge_successive(messages: Sequence[Message]) -> list[Message]:
    """Merge successive messages of the user and of the system. A tool's results stay apart."""
    merged: list[Message] = []
    for role, group in groupby(messages, itemgetter("role")):
        if role in ("user", "system"):
            text = _joined(message["content"] for message in group)
            merged.append({"role": role, "content": text})
        else:
            merged += group
    return merged


def _text_of(content: "str | Sequence[ResultBlock] | None") -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


class _Conversation(Conversation):
    """A conversation to which messages of blocks are added.

    The texts and thoughts of the assistant's turn are joined when it ends: a body may have 50,000,
    and a text that grows with each block would be copied as often.
    """

    def __init__(self) -> None:
        super().__init__()
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def end_turn(self) -> list[Message]:
        """End the assistant's turn, if there is one; return the messages."""
        if self.turn is not None:
            self.turn = self.turn._replace(
                content=_joined(self._texts), reasoning=_joined(self._thoughts)
            )
            self._texts, self._thoughts = [], []
        return super().end_turn()

    def add(self, item: MessageItem, where: str) -> None:
        """Add a message. where: its path, for errors."""
        content = item.content
        if isinstance(content, str):
            self.add_text(item.role, content)
            return
        if not content:  # an answer without any text has no blocks
            self.add_text(item.role, "")
        for at, block in enumerate(content):
            self._add_block(item.role, block, f"{where}.content[{at}]")

    def add_text(self, role: str, text: str) -> None:
        """Add a text to the assistant's turn, or as a message of another role."""
        if role == "assistant":
            self.turn = self.turn or NO_TURN
            self._texts.append(text)
        else:
            self.end_turn().append({"role": role, "content": text})

    def _add_block(self, role: str, block: Block, where: str) -> None:
        match block, role:
            case TextBlock(text=text), _:
                self.add_text(role, text)
            case ThinkingBlock(thinking=thought), "assistant":
                self.turn = self.turn or NO_TURN
                self._thoughts.append(thought)
            case RedactedThinkingBlock(), "assistant":
                self.turn = self.turn or NO_TURN
            case ToolUseBlock(id=call_id, name=name), "assistant":
                self.add_call(ToolCall(call_id, name, arguments_text(block.input)))
            case ToolResultBlock(tool_use_id=call_id), "user":
                text = _text_of(block.content)
                if block.is_error:  # chat templates have no other form for it
                    text = f"Error: {text}"
                self.add_result(call_id, text, f"{where}.tool_use_id")
            case _:
                kind = type(block).__struct_config__.tag
                raise bad_request(
                    where, f"{where}: a message of role {role} may not have a block of type {kind}."
                )


def _joined(texts: Iterable[str]) -> str:
    return "\n".join(text for text in texts if text)
