"""A prompt in the target's tokens and in the drafter's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.engines.chat_formats import Tools
from pilotfish.wire.request import Options

Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
_TALK_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "thinking")


@dataclass(frozen=True)
class Talk:
    """Messages, tools, and whether the model thinks first (None: the model's default).

    With tool choice "none" the tools are in the prompt, too, so that its cached prefix stays valid.
    """

    messages: Messages
    tools: Tools | None = None
    thinking: bool | None = None


# A text (one user message, if the target has a chat template), token ids, messages, or a talk.
PromptInput: TypeAlias = "str | Sequence[int] | Messages | Talk"


def are_messages(source: PromptInput) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a prompt is a list of messages; an empty list is not."""
    return not isinstance(source, str | Talk) and len(source) > 0 and isinstance(source[0], Mapping)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt in the vocabularies of one pair.

    source: the text, messages or token ids. chat: whether a text is a user message. ids: the
    target's tokens u32 [n], to be committed. draft_ids: the drafter's tokens [m], m ≥ 1 unless n is
    0. vocabulary: fingerprint of the target's vocabulary. pair: digests of the drafter's and the
    target's vocabularies; another drafter or template would give other tokens.
    """

    source: PromptInput
    chat: bool
    ids: NDArray[np.uint32]
    draft_ids: NDArray[Any]
    vocabulary: str
    pair: tuple[str, str]

    @classmethod
    def unencoded(cls, source: PromptInput, chat: bool) -> Prompt:
        """Make a prompt without tokens; it is tokenised once the vocabularies are known."""
        no_ids = np.empty(0, dtype=np.uint32)
        return cls(source, chat, no_ids, no_ids, "", ("", ""))

    @property
    def can_reencode(self) -> bool:
        """Whether another vocabulary can encode the prompt: its source is not token ids."""
        return isinstance(self.source, str | Talk) or are_messages(self.source)

    @property
    def tools(self) -> Tools | None:
        """The tools of the talk, if there are any."""
        return self.source.tools if isinstance(self.source, Talk) else None

    @property
    def is_chat_turn(self) -> bool:
        """Whether the answer is a turn of a chat, if the target has a chat template."""
        return self.can_reencode and (self.chat or not isinstance(self.source, str))

    def __len__(self) -> int:
        return len(self.ids)


class TalkOptions(Options, total=False):
    """`wire.request.Options`, and the options that turn a text or messages into a `Talk`.

    tools: functions that the model may call, as in OpenAI's API, with tool_choice ("auto", "none",
    "required", or a name) and parallel_tool_calls. thinking: whether the model thinks first
    (``enable_thinking`` of its template).
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | None
    parallel_tool_calls: bool | None
    thinking: bool | None


def read_talk(
    prompt: PromptInput | Prompt, options: TalkOptions
) -> tuple[PromptInput | Prompt, Options]:
    """Make a `Talk` of the prompt and the options about tools and thinking.

    Returns the talk, or the unchanged prompt if there are no such options, and the other options.
    Raises `UnsupportedError` for these options with a `Talk`, a `Prompt` or token ids, and for a
    prompt or an option of a wrong type.
    """
    if not isinstance(prompt, str | Sequence | np.ndarray | Talk | Prompt):
        raise UnsupportedError(
            f"A prompt must be a text, token ids, messages, or a Talk, not {type(prompt).__name__}."
        )
    for name in ("parallel_tool_calls", "thinking"):
        if not isinstance(options.get(name), bool | None):
            raise UnsupportedError(f"{name} must be true or false, not {options.get(name)!r}.")
    rest = {name: value for name, value in options.items() if name not in _TALK_OPTIONS}
    values = (options.get("tools"), options.get("tool_choice"), options.get("parallel_tool_calls"))
    try:
        tools = Tools.read(*values)
    except ValueError as error:
        raise UnsupportedError(f"{error}.") from error
    thinking = options.get("thinking")
    if tools is None and thinking is None:
        return prompt, cast("Options", rest)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(messages, Prompt | Talk) or not are_messages(messages):
        raise UnsupportedError(
            "The options for tools and thinking need a text or messages as prompt: a Talk has its "
            "own tools, and token ids cannot have any."
        )
    return Talk(messages, tools, thinking), cast("Options", rest)
