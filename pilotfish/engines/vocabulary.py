"""A model's vocabulary: everything needed to encode and decode its tokens, without weights.

An edge sends the vocabulary to devices whose drafter has another one (docs/wire.md). These devices
use it to encode prompts and decode answers.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import msgspec

from pilotfish.base.reading import reading_file
from pilotfish.base.struct_types import gathered
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
    """The tokenizer, the chat templates and the end tokens of a model.

    tokenizer_json: content of the model's `tokenizer.json`. vocab_size: number of tokens, without
    padding. chat_templates: templates by name, besides `chat_template`. special_tokens: tokens that
    templates may name, such as bos_token; None if an older release did not store them: then
    bos_token and eos_token follow from the ids. If these two fields have their defaults, the
    encoding equals that of older releases.
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
        """Read an artifact's vocabulary; raise `ArtifactError` if its tokenizer is unreadable."""
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
        )  # stored, so that the tokenizer need not be loaded to compute it
        vocabulary.__dict__["_tokenizer_name"] = str(path)
        return vocabulary

    @classmethod
    def decode(cls, data: bytes, model: str) -> Vocabulary:
        """Decode the bytes that `encode` returned; raise `ArtifactError` if they are invalid."""
        with reading_file(lambda problem: ArtifactError(f"this is not a vocabulary: {problem}")):
            nameless = msgspec.msgpack.decode(data, type=gathered(cls))
        vocabulary = msgspec.structs.replace(nameless, model=model)
        if vocabulary.vocab_size > MAX_TOKENS:
            raise ArtifactError(
                f"a vocabulary of {vocabulary.vocab_size} tokens is larger than any known one"
            )
        check_foreign(vocabulary.tokenizer_json)
        tokenizer, size = vocabulary.tokenizer, vocabulary.vocab_size
        ids = [*vocabulary.eos_ids, vocabulary.bos_id or 0, *tokenizer.beginning]
        if tokenizer.vocab_size > size or max(ids) >= size:
            raise ArtifactError("this vocabulary has token ids beyond its size")
        return vocabulary

    def encode(self) -> bytes:
        """Encode the vocabulary without the model's name, since several models may share it."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self, model=""))

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the encoded bytes."""
        return hashlib.sha256(self.encode()).hexdigest()

    @cached_property
    def _tokenizer_name(self) -> str:
        """The name that errors give to the vocabulary's `tokenizer.json`."""
        return TOKENIZER_NAME

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded at the first use."""
        return Tokenizer.from_json(self.tokenizer_json, self._tokenizer_name)

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler of grammars over this vocabulary."""
        from pilotfish.engines.grammar import Grammars

        return Grammars(self.tokenizer, self.vocab_size, self.eos_ids)

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the token strings; with equal hashes, an id means the same token."""
        return self.tokenizer.fingerprint

    @cached_property
    def with_tools(self) -> Vocabulary:
        """The vocabulary for chats with tools, with the template "tool_use" if there is one.

        If that template takes no tools in a known chat format, `chat_template` is used.
        """
        template = self.chat_templates.get(TOOL_USE)
        if template is None or not chat_format_of(template).takes_tools(template):
            return self
        other = msgspec.structs.replace(self, chat_template=template, chat_templates={})
        other.__dict__["tokenizer"] = self.tokenizer
        return other

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None if there is none. Raises `TemplateError` if it is broken."""
        if self.chat_template is None:
            return None
        from pilotfish.engines.chat import (
            ChatTemplate,
        )  # imported here, because Jinja loads slowly and an edge never needs it

        return ChatTemplate(self.chat_template, self.named_tokens)

    @property
    def named_tokens(self) -> dict[str, str]:
        """The special tokens by the names that templates use."""
        if self.special_tokens is not None:
            return self.special_tokens
        piece = self.tokenizer.piece
        return {
            "bos_token": "" if self.bos_id is None else piece(self.bos_id),
            "eos_token": piece(self.eos_ids[0]) if self.eos_ids else "",
        }

    @cached_property
    def dialogue(self) -> Dialogue | None:
        """The encoder of messages; None for a model without a chat template."""
        if self.template is None:
            return None
        from pilotfish.engines.dialogue import Dialogue

        return Dialogue(self.template, self.tokenizer)

    @cached_property
    def chat_format(self) -> ChatFormat:
        """The syntax of calls and thoughts, recognised from the chat template."""
        return chat_format_of(self.chat_template or "")

    @cached_property
    def turn_end(self) -> int | None:
        """The id of the token that ends the model's turn in a chat; None without end tokens.

        If there are several end tokens, this is the one that the chat template puts after an
        answer.
        """
        if not self.eos_ids:
            return None
        ends = [id for id in self.tokenizer.encode(self._turns, special=True) if id in self.eos_ids]
        return ends[-1] if ends else self.eos_ids[0]

    @cached_property
    def turn_mark(self) -> int | None:
        """The id of the first control token after an answer in the chat template; None if none."""
        _, answer, rest = self._turns.rpartition(_ANSWER)
        ids = self.tokenizer.encode(rest, special=True) if answer else []
        return next((id for id in ids if self.tokenizer.is_special(id)), None)

    @cached_property
    def _turns(self) -> str:
        """A question and an answer, rendered; "" without a template, or if it raises an error."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
        try:
            return self.template.render(turns, add_generation_prompt=False) if self.template else ""
        except TemplateError:
            return ""


def used_templates(templates: dict[str, str]) -> dict[str, str]:
    """Return the templates that this package uses; other templates need not be sent to devices."""
    return {name: source for name, source in templates.items() if name == TOOL_USE}
