"""A model's vocabulary: the data to read and write its tokens, without weights.

An edge sends it to devices whose drafter has another vocabulary (docs/wire.md); they use it to
encode prompts and decode answers.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import msgspec

from pilotfish.base.reading import reading_file
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.chat_formats import ChatFormat, chat_format_of
from pilotfish.engines.engine_errors import ArtifactError, TemplateError
from pilotfish.engines.foreign import MAX_TEMPLATE, MAX_TOKENS, check_foreign
from pilotfish.engines.manifest import TOKENIZER_NAME, Positive, TokenId
from pilotfish.engines.tokenizer import Tokenizer, tokenizer_text

if TYPE_CHECKING:
    from pilotfish.engines.chat import ChatTemplate
    from pilotfish.engines.dialogue import Dialogue
    from pilotfish.engines.grammar import Grammars


_Template = Annotated[str, msgspec.Meta(max_length=MAX_TEMPLATE)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Token = Annotated[str, msgspec.Meta(max_length=1024)]
TOOL_USE = "tool_use"
_ANSWER = "0f3a9c"  # a text that no template contains


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, dict=True, omit_defaults=True):
    """Tokenizer, chat templates and end tokens of a model.

    tokenizer_json: content of its `tokenizer.json`. vocab_size: without padding. chat_templates:
    templates besides the usual one, by name. special_tokens: tokens that templates may name, such
    as bos_token; None: from an older release that did not store them; its two names follow from the
    ids. Without these two fields, the encoding equals that of releases that did not have them.
    """

    model: Annotated[str, msgspec.Meta(max_length=1024)]
    tokenizer_json: str
    vocab_size: Positive
    bos_id: TokenId | None
    eos_ids: Annotated[list[TokenId], msgspec.Meta(max_length=256)]
    chat_template: _Template | None
    chat_templates: Annotated[dict[_Name, _Template], msgspec.Meta(max_length=8)] = {}
    special_tokens: Annotated[dict[_Name, _Token], msgspec.Meta(max_length=1024)] | None = None

    @classmethod
    def from_artifact(cls, artifact: Artifact) -> Vocabulary:
        """Read an artifact's vocabulary. Raises `ArtifactError` if its tokenizer is unreadable."""
        manifest, path = artifact.manifest, artifact.tokenizer_path
        vocabulary = cls(
            model=manifest.model,
            tokenizer_json=tokenizer_text(path),
            vocab_size=manifest.vocab_size,
            bos_id=manifest.bos_id,
            eos_ids=manifest.eos_ids,
            chat_template=manifest.chat_template,
            chat_templates=used_templates(manifest.chat_templates),
            special_tokens=manifest.special_tokens,
        )
        vocabulary.__dict__["fingerprint"] = (
            manifest.tokenizer_fingerprint
        )  # known without the tokenizer
        vocabulary.__dict__["_tokenizer_name"] = str(path)
        return vocabulary

    @classmethod
    def decode(cls, data: bytes, model: str) -> Vocabulary:
        """Decode `encode`'s bytes, for a model of this name; raises `ArtifactError` if invalid."""
        with reading_file(lambda problem: ArtifactError(f"this is not a vocabulary: {problem}")):
            nameless = msgspec.msgpack.decode(data, type=cls)
        vocabulary = msgspec.structs.replace(nameless, model=model)
        if vocabulary.vocab_size > MAX_TOKENS:
            raise ArtifactError(f"{vocabulary.vocab_size} tokens are more than any vocabulary has")
        check_foreign(vocabulary.tokenizer_json)
        tokenizer, size = vocabulary.tokenizer, vocabulary.vocab_size
        ids = [*vocabulary.eos_ids, vocabulary.bos_id or 0, *tokenizer.beginning]
        if tokenizer.vocab_size > size or max(ids) >= size:
            raise ArtifactError("this vocabulary names tokens that it does not have")
        return vocabulary

    def encode(self) -> bytes:
        """Encode as bytes, without the model's name: models may share a vocabulary."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self, model=""))

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the encoded bytes."""
        return hashlib.sha256(self.encode()).hexdigest()

    @cached_property
    def _tokenizer_name(self) -> str:
        """The name of its `tokenizer.json` in errors."""
        return TOKENIZER_NAME

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return Tokenizer.from_json(self.tokenizer_json, self._tokenizer_name)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiler of grammars over its tokens."""
        from pilotfish.engines.grammar import Grammars

        return Grammars(self.tokenizer, self.vocab_size, self.eos_ids)

    @cached_property
    def fingerprint(self) -> str:
        """The hash of its token strings; with equal hashes, equal ids are equal tokens."""
        return self.tokenizer.fingerprint

    @cached_property
    def with_tools(self) -> Vocabulary:
        """This vocabulary for chats with tools: with its template "tool_use", if any.

        If that template takes no tools in a known chat format, the usual one stays.
        """
        template = self.chat_templates.get(TOOL_USE)
        if template is None or not chat_format_of(template).takes_tools(template):
            return self
        other = msgspec.structs.replace(self, chat_template=template, chat_templates={})
        other.__dict__["tokenizer"] = self.tokenizer
        return other

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Its chat template; None for a model without one. Raises `TemplateError` if broken."""
        if self.chat_template is None:
            return None
        from pilotfish.engines.chat import (
            ChatTemplate,
        )  # Jinja imports slowly, and no edge needs it

        return ChatTemplate(self.chat_template, self._named_tokens)

    @property
    def _named_tokens(self) -> dict[str, str]:
        """The tokens that templates may name."""
        if self.special_tokens is not None:
            return self.special_tokens
        piece = self.tokenizer.piece
        return {
            "bos_token": "" if self.bos_id is None else piece(self.bos_id),
            "eos_token": piece(self.eos_ids[0]) if self.eos_ids else "",
        }

    @cached_property
    def dialogue(self) -> Dialogue | None:
        """Encoder of messages as a prompt; None for a model without a chat template."""
        if self.template is None:
            return None
        from pilotfish.engines.dialogue import Dialogue

        return Dialogue(self.template, self.tokenizer)

    @cached_property
    def chat_format(self) -> ChatFormat:
        """Its syntax of calls and thoughts, recognised by its chat template."""
        return chat_format_of(self.chat_template or "")

    @cached_property
    def turn_end(self) -> int | None:
        """The token that ends the model's turn in a chat; None if it has no end token.

        Of several end tokens, it is the one that the chat template puts after an answer.
        """
        if not self.eos_ids:
            return None
        ends = [id for id in self.tokenizer.encode(self._turns, special=True) if id in self.eos_ids]
        return ends[-1] if ends else self.eos_ids[0]

    @cached_property
    def turn_mark(self) -> int | None:
        """The control token that the chat template puts after an answer, an end token or not."""
        _, answer, rest = self._turns.rpartition(_ANSWER)
        ids = self.tokenizer.encode(rest, special=True) if answer else []
        return next((id for id in ids if self.tokenizer.is_special(id)), None)

    @cached_property
    def _turns(self) -> str:
        """A question and an answer in the chat template; "" without one, or if it refuses them."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
        try:
            return self.template.render(turns, add_generation_prompt=False) if self.template else ""
        except TemplateError:
            return ""


def used_templates(templates: dict[str, str]) -> dict[str, str]:
    """Return the templates that are used here; the others need not cross a link."""
    return {name: source for name, source in templates.items() if name == TOOL_USE}
