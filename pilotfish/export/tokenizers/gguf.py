"""The tokenizer of a GGUF file, from its metadata.

Supported tokenizer models: "gpt2" (byte-level BPE, split by one of `pretokenizers`), "llama"
(SentencePiece BPE, with merges derived from scores), "gemma4" (SentencePiece BPE with merges) and
"t5" (SentencePiece Unigram). llama.cpp is the reference for their ids, except that `add_eos_token`
is ignored, because prompts are continued.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from pilotfish.engines.tokenizer import converting_errors
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.fields import format_value
from pilotfish.export.tokenizers.pretokenizers import PRETOKENIZERS, Recipe
from pilotfish.export.tokenizers.spelling import put_before, spell
from pilotfish.export.tokenizers.tables import merges_by_score, pair

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # tokenizer.ggml.token_type
NO_TOKEN = 2**32 - 1  # id that means "no token", llama.cpp's LLAMA_TOKEN_NULL
PADDING = re.compile(r"\[PAD\d+\]")  # names that converters give to rows without a token
TEMPLATE = "tokenizer.chat_template"
# Names of tokens that llama.cpp always treats as ends, because old files (Llama 3) state only the
# end of a document. Exception: in gpt-oss, `<|end|>` ends only a part of an answer.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>")
HARMONY_END, HARMONY_RETURN = "<|end|>", "<|return|>"


class GgufVocabulary:
    """The tokenizer of a GGUF file.

    Attributes:
        tokenizer_json: content of a `tokenizer.json`.
        size: number of tokens, without the unused tokens at the end, which pad the embedding.
        bos_id: id that begins a text; None without one.
        eos_ids: ids that end a generation, from the file's keys and from known names.
        special_tokens: name → token that templates can write: bos_token and eos_token.

    Raises:
        ExportError: if the metadata are damaged, or the tokenizer is not supported.
    """

    def __init__(self, metadata: Mapping[str, object], path: Path) -> None:
        self._metadata, self._path = metadata, path
        tokens: list[str] = self._list("tokens", str)
        kinds: list[int] = list(self._list("token_type", int))
        if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
            raise ExportError(f"{path}: the vocabulary is damaged (token types or repeated tokens)")
        while kinds and (kinds[-1] == UNUSED or PADDING.fullmatch(tokens[len(kinds) - 1])):
            kinds.pop()
        self.size = len(kinds)
        self._tokens, self._kinds = tokens[: self.size], kinds
        self.bos_id = self._id("bos_token_id")
        self.tokenizer_json: str = self._build().to_str()
        ends = [self._end_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        known = [id for id in ends if id is not None]
        self.eos_ids = list(dict.fromkeys([*known, *self._turn_ends()]))
        named = {"bos_token": self.bos_id, "eos_token": ends[0]}
        self.special_tokens = {
            name: self._tokens[id] for name, id in named.items() if id is not None
        }

    def _build(self) -> tokenizers.Tokenizer:
        builders = {
            "gpt2": self._byte_level,
            "llama": self._sentencepiece,
            "gemma4": self._sentencepiece,
            "t5": self._unigram,
        }
        model = self._metadata.get("tokenizer.ggml.model")
        if not isinstance(model, str) or model not in builders:
            raise ExportError(
                f"{self._path}: the tokenizer model {format_value(model)} is not supported; "
                "supported are " + ", ".join(builders)
            )
        tokenizer = builders[model](model)
        # A Unigram model would match the unknown token's name in a text.
        added = (UNKNOWN, CONTROL, USER_DEFINED) if model == "t5" else (CONTROL, USER_DEFINED)
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind != USER_DEFINED, normalized=False)
                for token, kind in zip(self._tokens, self._kinds, strict=True)
                if token and kind in added
            ]
        )
        if self.bos_id is not None and self._adds_bos(model):
            put_before(tokenizer, self._tokens[self.bos_id], self.bos_id)
        return tokenizer

    def _adds_bos(self, model: object) -> bool:
        """Whether BOS precedes a raw text, according to the file or llama.cpp's default."""
        if model == "gemma4":  # the files of gemma4 wrongly state false
            return True
        usual = model == "llama" or (model == "gpt2" and self._recipe().adds_bos)
        return self._flag("add_bos_token", usual=usual)

    def _recipe(self) -> Recipe:
        name = self._metadata.get("tokenizer.ggml.pre", "default")
        recipe = PRETOKENIZERS.get(name) if isinstance(name, str) else None
        if recipe is None:
            raise ExportError(
                f"{self._path}: the pre-tokenizer {format_value(name)} is not supported; "
                "supported are " + ", ".join(PRETOKENIZERS)
            )
        return recipe

    def _byte_level(self, _: str) -> tokenizers.Tokenizer:
        """Build a byte-level BPE with the file's merges (GPT-2)."""
        recipe = self._recipe()
        tokenizer = self._build_bpe(self._merges(), ignore_merges=recipe.ignore_merges)
        tokenizer.pre_tokenizer = recipe.build()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self, model: str) -> tokenizers.Tokenizer:
        """Build a SentencePiece BPE with the file's merges (Gemma 4), or by scores (Llama 2)."""
        if model == "gemma4":
            merges, prefix = self._merges(), False
        else:
            triples = zip(self._tokens, self._kinds, self._scores(), strict=True)
            scores = {token: score for token, kind, score in triples if kind == NORMAL}
            merges, prefix = merges_by_score(scores), self._flag("add_space_prefix", usual=True)
        unknown = self._id("unknown_token_id")
        tokenizer = self._build_bpe(
            merges,
            unk_token=None if unknown is None else self._tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        spell(tokenizer, "always" if prefix else "never")
        return tokenizer

    def _unigram(self, _: str) -> tokenizers.Tokenizer:
        """Build a SentencePiece Unigram model (T5)."""
        if self._flag("treat_whitespace_as_suffix"):
            raise ExportError(
                f"{self._path}: a tokenizer that puts spaces after words is not supported"
            )
        table = list(zip(self._tokens, map(float, self._scores()), strict=True))
        has_map = self._metadata.get("tokenizer.ggml.precompiled_charsmap") is not None
        stored = self._list("precompiled_charsmap", int) if has_map else []
        with converting_errors(f"{self._path}: the tokenizer is damaged", ExportError):
            unknown = self._id("unknown_token_id")
            tokenizer = tokenizers.Tokenizer(models.Unigram(table, unknown, False))
            spell(
                tokenizer,
                "always" if self._flag("add_space_prefix") else "never",
                collapse=self._flag("remove_extra_whitespaces"),
                table=bytes(byte % 256 for byte in stored),
            )
        return tokenizer

    def _flag(self, key: str, *, usual: bool = False) -> bool:
        return bool(self._metadata.get(f"tokenizer.ggml.{key}", usual))

    def _merges(self) -> list[tuple[str, str]]:
        return [pair(merge) for merge in self._list("merges", str)]

    def _scores(self) -> list[float]:
        return self._list("scores", (int, float))[: self.size]

    def _build_bpe(self, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
        vocabulary = {token: id for id, token in enumerate(self._tokens)}
        with converting_errors(f"{self._path}: the merges do not fit the vocabulary", ExportError):
            return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **options))

    def _id(self, key: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, int) and 0 <= value < self.size else None

    def _end_id(self, key: str) -> int | None:
        """Return an end id; refuse an id without a token, because texts would not end."""
        value = self._metadata.get(f"tokenizer.ggml.{key}", NO_TOKEN)
        if value != NO_TOKEN and self._id(key) is None:
            raise ExportError(
                f"{self._path}: tokenizer.ggml.{key} {format_value(value)} is not in the "
                f"vocabulary of {self.size} tokens"
            )
        return self._id(key)

    def _turn_ends(self) -> list[int]:
        """Return the ids of the tokens in TURN_ENDS that occur in the chat template."""
        template = gguf_templates(self._metadata)[0] or ""
        names = {name for name in TURN_ENDS if name in template}
        if HARMONY_RETURN in self._tokens:
            names.discard(HARMONY_END)
        tokens = enumerate(zip(self._tokens, self._kinds, strict=True))
        return [id for id, (token, kind) in tokens if kind == CONTROL and token in names]

    def _list(self, key: str, kinds: type | tuple[type, ...]) -> list[Any]:
        values = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
            raise ExportError(f"{self._path}: tokenizer.ggml.{key} is missing or damaged")
        return values


def gguf_templates(metadata: Mapping[str, object]) -> tuple[str | None, dict[str, str]]:
    """Return the default chat template, None without one, and all others by name."""
    names = metadata.get(f"{TEMPLATE}s")
    entries = {
        name: metadata.get(f"{TEMPLATE}.{name}")
        for name in (names if isinstance(names, list) else ())
    }
    stated = metadata.get(TEMPLATE)
    named = {name: source for name, source in entries.items() if isinstance(source, str)}
    default = stated if isinstance(stated, str) else named.get("default")
    return default, {name: source for name, source in named.items() if name != "default"}
