"""Check a `tokenizer.json` that came over a network.

The tokenizers library obeys everything in the file: padding to a billion tokens, replacements that
lengthen the text again and again, tables that abort the process. So before the library reads a
foreign file, this module checks that the file contains only step types that language models use,
within bounds.
One cost stays unbounded: the time in which a regular expression splits a text. The library stops a
match after ten million steps (with a typed error), but it may start a match at every character.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pilotfish.base.struct_types import gathered
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.unigram import is_unigram

MAX_TOKENS = 1 << 20
UNIGRAM_UNSHARED = (
    "a Unigram vocabulary cannot be sent: drafter and target must both have it in their own files"
)
# maximum characters of a chat template; compiling one of this size takes seconds
MAX_TEMPLATE = 1 << 19
MAX_GROWTH = 64  # maximum number of characters that the normalizer may make of one character
_MAX_ADDED_TOKENS = 1 << 16
# maximum number of characters in all added tokens; each character takes some 70 bytes of memory
_MAX_ADDED_TEXT = 1 << 20
_MAX_STEP_CHARACTERS = 1 << 15  # maximum size (characters of JSON) of the steps' description

_Id = Annotated[int, Meta(ge=0, lt=MAX_TOKENS)]
_Pattern = dict[str, Annotated[str, Meta(max_length=1 << 13)]]  # {"Regex": …} or {"String": …}
_Empty = Annotated[str, Meta(max_length=0)]


class _Step(Struct, frozen=True, tag_field="type", tag=lambda name: name.lstrip("_")):
    """A step of a tokenizer; its type selects the subclass.

    Fields that are not listed are harmless.
    """


class _NFC(_Step, frozen=True): ...


class _NFD(_Step, frozen=True): ...


class _NFKC(_Step, frozen=True): ...


class _NFKD(_Step, frozen=True): ...


class _Lowercase(_Step, frozen=True): ...


class _Prepend(_Step, frozen=True):
    prepend: Annotated[str, Meta(max_length=MAX_GROWTH)]


class _Replace(_Step, frozen=True):
    pattern: _Pattern
    content: Annotated[str, Meta(max_length=MAX_GROWTH)]


class _Normalizers(_Step, frozen=True, tag="Sequence", forbid_unknown_fields=True):
    normalizers: list[_Normalizer]


class _Split(_Step, frozen=True):
    pattern: _Pattern


class _ByteLevel(_Step, frozen=True): ...


class _Digits(_Step, frozen=True): ...


class _Punctuation(_Step, frozen=True): ...


class _Whitespace(_Step, frozen=True): ...


class _WhitespaceSplit(_Step, frozen=True): ...


class _Metaspace(_Step, frozen=True):
    replacement: Annotated[str, Meta(max_length=1)]
    prepend_scheme: str = "always"


class _PreTokenizers(_Step, frozen=True, tag="Sequence", forbid_unknown_fields=True):
    pretokenizers: list[_PreTokenizer]


class _SpecialToken(Struct, frozen=True):
    ids: Annotated[list[_Id], Meta(max_length=8)]


_Template = Annotated[
    list[Any], Meta(max_length=16)
]  # parts of the template, in which the text may be inserted several times


class _TemplateProcessing(_Step, frozen=True):
    single: _Template
    pair: _Template
    special_tokens: dict[str, _SpecialToken]


class _RobertaProcessing(_Step, frozen=True): ...


class _Processors(_Step, frozen=True, tag="Sequence", forbid_unknown_fields=True):
    processors: list[_Processor]


class _ByteFallback(_Step, frozen=True): ...


class _Fuse(_Step, frozen=True): ...


class _Strip(_Step, frozen=True):
    start: int
    stop: int


class _Decoders(_Step, frozen=True, tag="Sequence", forbid_unknown_fields=True):
    decoders: list[_Decoder]


_Normalizer = _NFC | _NFD | _NFKC | _NFKD | _Lowercase | _Prepend | _Replace | _Normalizers
_PreTokenizer = (
    _Split | _ByteLevel | _Digits | _Punctuation | _Whitespace | _WhitespaceSplit | _Metaspace
    | _PreTokenizers
)  # fmt: skip
_Processor = _ByteLevel | _TemplateProcessing | _RobertaProcessing | _Processors
_Decoder = _ByteLevel | _Replace | _ByteFallback | _Fuse | _Strip | _Metaspace | _Decoders


class _Bpe(Struct, frozen=True):
    vocab: Annotated[dict[str, _Id], Meta(max_length=MAX_TOKENS)]
    merges: list[Any]
    dropout: None = None
    continuing_subword_prefix: _Empty | None = None
    end_of_word_suffix: _Empty | None = None
    type: Literal["BPE"] = "BPE"


class _Added(Struct, frozen=True):
    id: _Id
    content: Annotated[str, Meta(min_length=1, max_length=1024)]


class _TokenizerFile(Struct, frozen=True):
    model: _Bpe
    added_tokens: Annotated[list[_Added], Meta(max_length=_MAX_ADDED_TOKENS)] = []
    normalizer: _Normalizer | None = None
    pre_tokenizer: _PreTokenizer | None = None
    post_processor: _Processor | None = None
    decoder: _Decoder | None = None


def check_foreign(text: str) -> None:
    """Raise `ArtifactError` unless the `tokenizer.json` has only steps known to be harmless."""
    try:
        content = json.loads(text, object_pairs_hook=_unique_object)
        if isinstance(content, dict) and is_unigram(content):
            raise ArtifactError(UNIGRAM_UNSHARED)
        file = msgspec.convert(content, gathered(_TokenizerFile))
        growth = _growth(file.normalizer)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"this tokenizer is not of a supported kind: {error}") from None
    if growth > MAX_GROWTH:
        raise ArtifactError("this tokenizer lengthens text too much before it splits it")
    added = growth * sum(len(token.content) for token in file.added_tokens)
    if added > _MAX_ADDED_TEXT:
        raise ArtifactError("this tokenizer's added tokens are longer than any language model's")
    steps = {name: part for name, part in content.items() if name not in ("model", "added_tokens")}
    if len(json.dumps(steps)) > _MAX_STEP_CHARACTERS:
        raise ArtifactError("this tokenizer has more steps than any language model's")


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; refuse repeated keys, because JSON readers disagree on their meaning."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a JSON object has the same key twice")
    return result


def _growth(normalizer: _Normalizer | None) -> int:
    """Bound the number of characters that the normalizer can make of one character."""
    if isinstance(normalizer, _Replace):
        return max(1, len(normalizer.content))
    growth = 1
    for step in normalizer.normalizers if isinstance(normalizer, _Normalizers) else ():
        growth *= _growth(step)
    return growth
