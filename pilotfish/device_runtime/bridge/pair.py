"""A pair of vocabularies, the drafter's and the target's: its prompts and bridges."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import (
    PairMismatchError,
    PromptTooLongError,
    TokenOutOfRangeError,
    UnsupportedError,
)
from pilotfish.device_runtime.bridge.bridge import Bridge, SharedTokensBridge, TrivialBridge
from pilotfish.device_runtime.bridge.context import ContextTranslator
from pilotfish.device_runtime.bridge.prompt import Messages, Prompt, PromptInput, Talk, are_messages
from pilotfish.device_runtime.bridge.shared import SharedTokens
from pilotfish.engines.chat_formats.chat_format import system_into_first_user
from pilotfish.engines.dialogue import Dialogue
from pilotfish.engines.engine_errors import TemplateError, TextTooLongError
from pilotfish.engines.vocabulary import Vocabulary


class Pair:
    """Makes prompts and bridges for two vocabularies. Thread-safe.

    kept: i64 [N], the drafter's tokens that its head was cut to; None for a whole head.

    Raises `PairMismatchError` if the two have no token in common, or the head can say none of them.
    """

    def __init__(
        self, drafter: Vocabulary, target: Vocabulary, kept: NDArray[np.int64] | None = None
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.trivial = (drafter.fingerprint, drafter.vocab_size) == (
            target.fingerprint,
            target.vocab_size,
        )
        self.shared = None if self.trivial else SharedTokens.find(drafter, target)
        self._kept = kept
        if self.shared is not None and (self.shared.to_target_ids(kept) == target.vocab_size).all():
            raise PairMismatchError(
                f"{drafter.model} cannot draft for {target.model}: none of the tokens that its "
                "head was cut to is a token of both. Export it again with --for this target."
            )

    @property
    def digests(self) -> tuple[str, str]:
        """The digests of the drafter's vocabulary and the target's."""
        return self.drafter.digest, self.target.digest

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the target's vocabulary."""
        return self.target.fingerprint

    def bridge(self) -> Bridge:
        """Make a bridge for one lane."""
        if self.shared is None:
            return TrivialBridge(self.target.vocab_size, self._kept)
        return SharedTokensBridge(self.shared, self._context(), self._kept)

    def _context(self) -> ContextTranslator:
        assert self.shared is not None
        return ContextTranslator(
            self.target.tokenizer, self.drafter.tokenizer, self.shared.specials
        )

    # Prompts

    def prompt(self, asked: PromptInput, *, chat: bool = True, most: int | None = None) -> Prompt:
        """Make a prompt of a text, messages or token ids.

        chat: a text becomes one user message if the target has a chat template; otherwise it is
        used as it is, like token ids. Messages need a template: `UnsupportedError` without one,
        `TemplateError` if it refuses them. Raises `TokenOutOfRangeError` for ids outside the
        target's vocabulary. most: tokens; clearly longer prompts raise `PromptTooLongError` early.
        """
        ids: Sequence[int]
        own: Sequence[int] | None
        try:
            if isinstance(asked, str) and not (chat and self.target.template):
                ids = _raw(self.target, asked, most)
                own = None if self.trivial else _raw(self.drafter, asked)
            elif isinstance(asked, str | Talk) or are_messages(asked):
                talk = _talk(asked)
                ids, own = self._rendered(talk, most), self._in_own_template(talk)
            else:
                ids, own = self._checked(asked, most), None
        except TextTooLongError:
            raise _too_long(most) from None
        told = np.array(ids, dtype=np.uint32)
        read = told if self.trivial else self._read(told, own)
        return Prompt(asked, chat, told, read, self.fingerprint, self.digests)

    def _rendered(self, talk: Talk, most: int | None) -> list[int]:
        ids = _ids_of(self.target, talk, most)
        if ids is None:
            raise UnsupportedError(
                f"{self.target.model} has no chat template: give it a text, without tools."
            )
        return ids

    def _in_own_template(self, talk: Talk) -> list[int] | None:
        """Render messages in the drafter's template; None without a suitable one."""
        if self.trivial:
            return None
        try:
            return _ids_of(self.drafter, talk)
        except TemplateError:  # such as that of a template without system messages
            return None

    def _read(self, told: NDArray[np.uint32], own: Sequence[int] | None) -> NDArray[Any]:
        read = self._translated(told) if own is None else np.array(own, dtype=np.int64)
        return read if len(read) else self._something

    def _translated(self, ids: NDArray[np.uint32]) -> NDArray[Any]:
        """Translate the target's ids to the drafter's: the same text and shared special tokens."""
        own = self._context().translate(ids)
        beginning = np.array(self.drafter.tokenizer.beginning, dtype=np.int64)
        if np.array_equal(own[: len(beginning)], beginning):
            return own
        return np.concatenate([beginning, own])

    @cached_property
    def _something(self) -> NDArray[Any]:
        """Return a token to start from when the drafter has none of the prompt's tokens."""
        own = self.drafter
        known = [id for id in (own.bos_id, own.turn_end, 0) if id is not None]
        return np.array(known[:1], dtype=np.int64)

    def _checked(self, asked: Sequence[Any], most: int | None) -> list[int]:
        if most is not None and len(asked) > most:
            raise _too_long(most)
        vocab, ids = self.target.vocab_size, list(asked)
        wrong = [i for i in ids if not isinstance(i, int | np.integer) or not 0 <= i < vocab]
        if wrong:
            raise TokenOutOfRangeError(
                f"{wrong[0]!r} is no token id: the vocabulary has {vocab} tokens."
            )
        return ids


def _talk(asked: "str | Messages | Talk") -> Talk:
    if isinstance(asked, Talk):
        return asked
    return Talk([{"role": "user", "content": asked}] if isinstance(asked, str) else asked)


def _ids_of(vocabulary: Vocabulary, talk: Talk, most: int | None = None) -> list[int] | None:
    """Encode a talk by the vocabulary's chat template; None without one."""
    offered = () if talk.tools is None else talk.tools.tools
    vocabulary = vocabulary.with_tools if offered else vocabulary
    if (dialogue := vocabulary.dialogue) is None:
        return None
    template = vocabulary.chat_template or ""
    try:
        messages, tools = vocabulary.chat_format.to_template(template, talk.messages, offered)
        return _told(dialogue, messages, tools, talk, most)
    except RecursionError:
        raise TemplateError("the messages or their tools are nested too deeply") from None


def _told(
    dialogue: Dialogue,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    talk: Talk,
    most: int | None,
) -> list[int]:
    """Encode what a template is told; where it takes no system message, without one of ours."""
    try:
        return dialogue.ids(messages, most, tools, talk.thinking)
    except TemplateError:
        moved = system_into_first_user(messages)
        if tools is not None or talk.tools is None or moved == messages:
            raise
        return dialogue.ids(moved, most, tools, talk.thinking)


def _raw(vocabulary: Vocabulary, text: str, most: int | None = None) -> list[int]:
    tokenizer = vocabulary.tokenizer
    return [*tokenizer.beginning, *tokenizer.encode(text, most=most)]


def _too_long(most: int | None) -> PromptTooLongError:
    return PromptTooLongError(
        f"The prompt has more than {most} tokens; drafter and target together take at most {most}."
    )
