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
from pilotfish.bridge.bridge import Bridge, SharedTokensBridge, TrivialBridge
from pilotfish.bridge.context import ContextTranslator
from pilotfish.bridge.prompt import Messages, Prompt, PromptInput, Talk, are_messages
from pilotfish.bridge.shared import SharedTokens
from pilotfish.engines.chat_formats.chat_format import system_into_first_user
from pilotfish.engines.dialogue import Dialogue
from pilotfish.engines.engine_errors import TemplateError, TextTooLongError
from pilotfish.engines.vocabulary import Vocabulary


class Pair:
    """Makes prompts and bridges for two vocabularies. Thread-safe.

    vocabulary_subset: i64 [N], the drafter's tokens that its head was cut to; None for a whole
    head.

    Raises `PairMismatchError` if the vocabularies share no token, or if the cut head has no shared
    token.
    """

    def __init__(
        self,
        drafter: Vocabulary,
        target: Vocabulary,
        vocabulary_subset: NDArray[np.int64] | None = None,
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.trivial = (drafter.fingerprint, drafter.vocab_size) == (
            target.fingerprint,
            target.vocab_size,
        )
        self.shared = None if self.trivial else SharedTokens.find(drafter, target)
        self._vocabulary_subset = vocabulary_subset
        if (
            self.shared is not None
            and (self.shared.to_target_ids(vocabulary_subset) == target.vocab_size).all()
        ):
            raise PairMismatchError(
                f"{drafter.model} cannot draft for {target.model}: its head was cut to tokens that "
                "the target lacks. Export it again with --for this target."
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
            return TrivialBridge(self.target.vocab_size, self._vocabulary_subset)
        return SharedTokensBridge(self.shared, self._translator(), self._vocabulary_subset)

    def _translator(self) -> ContextTranslator:
        assert self.shared is not None
        return ContextTranslator(
            self.target.tokenizer, self.drafter.tokenizer, self.shared.specials
        )

    # Prompts

    def prompt(
        self, source: PromptInput, *, chat: bool = True, max_tokens: int | None = None
    ) -> Prompt:
        """Make a prompt from a text, messages or token ids.

        chat: a text becomes one user message if the target has a chat template; otherwise it is
        used unchanged, like token ids. Messages need a template: without one, `UnsupportedError` is
        raised, and `TemplateError` if the template refuses them. Raises `TokenOutOfRangeError` for
        ids outside the target's vocabulary. max_tokens: a prompt that is clearly longer raises
        `PromptTooLongError` early.
        """
        ids: Sequence[int]
        draft_ids: Sequence[int] | None
        try:
            if isinstance(source, str) and not (chat and self.target.template):
                ids = _encode_text(self.target, source, max_tokens)
                draft_ids = None if self.trivial else _encode_text(self.drafter, source)
            elif isinstance(source, str | Talk) or are_messages(source):
                talk = _as_talk(source)
                ids, draft_ids = self._render(talk, max_tokens), self._render_for_drafter(talk)
            else:
                ids, draft_ids = self._check_ids(source, max_tokens), None
        except TextTooLongError:
            raise _too_long_error(max_tokens) from None
        target_ids = np.array(ids, dtype=np.uint32)
        drafter_ids = target_ids if self.trivial else self._draft_ids(target_ids, draft_ids)
        return Prompt(source, chat, target_ids, drafter_ids, self.fingerprint, self.digests)

    def _render(self, talk: Talk, most: int | None) -> list[int]:
        ids = _encode_talk(self.target, talk, most)
        if ids is None:
            raise UnsupportedError(
                f"{self.target.model} has no chat template: give a text instead of messages, "
                "without tools."
            )
        return ids

    def _render_for_drafter(self, talk: Talk) -> list[int] | None:
        """Encode messages by the drafter's template; None if it has no suitable template."""
        if self.trivial:
            return None
        try:
            return _encode_talk(self.drafter, talk)
        except TemplateError:  # for example, a template without system messages
            return None

    def _draft_ids(
        self, target_ids: NDArray[np.uint32], draft_ids: Sequence[int] | None
    ) -> NDArray[Any]:
        ids = (
            self._translate(target_ids)
            if draft_ids is None
            else np.array(draft_ids, dtype=np.int64)
        )
        return ids if len(ids) else self._first_token

    def _translate(self, ids: NDArray[np.uint32]) -> NDArray[Any]:
        """Translate the target's ids to the drafter's ids of the same text and special tokens."""
        draft_ids = self._translator().translate(ids)
        beginning = np.array(self.drafter.tokenizer.beginning, dtype=np.int64)
        if np.array_equal(draft_ids[: len(beginning)], beginning):
            return draft_ids
        return np.concatenate([beginning, draft_ids])

    @cached_property
    def _first_token(self) -> NDArray[Any]:
        """The token id to start from, i64 [1], if the drafter has none of the prompt's tokens."""
        drafter = self.drafter
        candidates = [id for id in (drafter.bos_id, drafter.turn_end, 0) if id is not None]
        return np.array(candidates[:1], dtype=np.int64)

    def _check_ids(self, source: Sequence[Any], most: int | None) -> list[int]:
        if most is not None and len(source) > most:
            raise _too_long_error(most)
        vocab, ids = self.target.vocab_size, list(source)
        invalid = [i for i in ids if not isinstance(i, int | np.integer) or not 0 <= i < vocab]
        if invalid:
            raise TokenOutOfRangeError(
                f"{invalid[0]!r} is not a token id: the vocabulary has {vocab} tokens."
            )
        return ids


def _as_talk(source: "str | Messages | Talk") -> Talk:
    if isinstance(source, Talk):
        return source
    return Talk([{"role": "user", "content": source}] if isinstance(source, str) else source)


def _encode_talk(vocabulary: Vocabulary, talk: Talk, most: int | None = None) -> list[int] | None:
    """Encode a talk by the vocabulary's chat template; None without a template."""
    offered = () if talk.tools is None else talk.tools.tools
    vocabulary = vocabulary.with_tools if offered else vocabulary
    if (dialogue := vocabulary.dialogue) is None:
        return None
    template = vocabulary.chat_template or ""
    try:
        messages, tools = vocabulary.chat_format.to_template(template, talk.messages, offered)
        return _encode_messages(dialogue, messages, tools, talk, most)
    except RecursionError:
        raise TemplateError("the messages or their tools are nested too deeply") from None


def _encode_messages(
    dialogue: Dialogue,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    talk: Talk,
    most: int | None,
) -> list[int]:
    """Encode messages by a dialogue's template.

    If the template takes no system message, tool instructions move to the first user message.
    """
    try:
        return dialogue.ids(messages, most, tools, talk.thinking)
    except TemplateError:
        moved = system_into_first_user(messages)
        if tools is not None or talk.tools is None or moved == messages:
            raise
        return dialogue.ids(moved, most, tools, talk.thinking)


def _encode_text(vocabulary: Vocabulary, text: str, most: int | None = None) -> list[int]:
    tokenizer = vocabulary.tokenizer
    return [*tokenizer.beginning, *tokenizer.encode(text, most=most)]


def _too_long_error(most: int | None) -> PromptTooLongError:
    return PromptTooLongError(
        f"The prompt has more than {most} tokens; drafter and target together accept at most "
        f"{most}."
    )
