"""SentencePiece's tokenizer.model, BPE or Unigram, converted to a tokenizer.json.

In: a directory with tokenizer.model and, if present, tokenizer_config.json, added_tokens.json and
special_tokens_map.json with further tokens. The ids of a text equal SentencePiece's, with two
exceptions: no space is put before a text that begins with a user-defined piece, and a character map
(nmt_nfkc) is applied to grapheme clusters, as in transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from pilotfish.base.reading import read_content, reading_file
from pilotfish.engines.tokenizer import converting_errors
from pilotfish.export.export_errors import ExportError
from pilotfish.export.tokenizers.added import AddedTokens, read_added
from pilotfish.export.tokenizers.model_proto import (
    BPE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    parse_model,
)
from pilotfish.export.tokenizers.spelling import Prefix, put_before, spell
from pilotfish.export.tokenizers.tables import merges_by_score

MODEL = "tokenizer.model"


def sentencepiece_tokenizer_json(directory: Path) -> str:
    """Convert the tokenizer.model in `directory` to a tokenizer.json.

    Raises:
        ExportError: if a file is damaged, or a tokenizer.json cannot express the model.
    """
    path = directory / MODEL
    model = _parse(path)
    _expect_known(model, path)
    added = read_added(directory)
    unknown = next((id for id, piece in enumerate(model.pieces) if piece.type == UNKNOWN), None)
    tokenizer = _build_model(model, unknown, path)
    spell(
        tokenizer,
        _prefix(model, added),
        collapse=model.normalizer_spec.remove_extra_whitespaces,
        table=model.normalizer_spec.precompiled_charsmap,
    )
    known = {
        id: AddedToken(piece.piece, special=piece.type != USER_DEFINED, normalized=False)
        for id, piece in enumerate(model.pieces)
        if piece.type in (UNKNOWN, CONTROL, USER_DEFINED)
    }
    added.add_to(tokenizer, known, str(directory))
    _add_bos(tokenizer, model, added)
    return tokenizer.to_str()


def _parse(path: Path) -> Any:
    """Read the file as a `ModelProto` (a class without type annotations)."""
    with reading_file(lambda problem: ExportError(f"{path} cannot be read: {problem}")):
        data = read_content(path)
    try:
        return parse_model(data)
    except ValueError as error:
        if _is_tiktoken(data):
            raise ExportError(
                f"{path} is in tiktoken's form, which does not state how text is split: such a "
                "model needs a tokenizer.json"
            ) from None
        raise ExportError(f"{path} is not a SentencePiece model: {error}") from None


def _is_tiktoken(data: bytes) -> bool:
    """Whether a file is in tiktoken's form: each line has a token in base64 and a number."""
    token, _, number = data.partition(b"\n")[0].partition(b" ")
    return number.strip().isdigit() and token.isascii()


def _expect_known(model: Any, path: Path) -> None:
    """Refuse models that a tokenizer.json cannot express."""
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    texts = {piece.piece for piece in model.pieces}
    reasons = {
        "is neither BPE nor Unigram": trainer.model_type not in (UNIGRAM, BPE),
        "puts spaces after words": trainer.treat_whitespace_as_suffix,
        "does not escape spaces": not normalizer.escape_whitespaces,
        "maps characters back when it decodes": model.denormalizer_spec.precompiled_charsmap,
        "has disabled tokens": any(piece.type == UNUSED for piece in model.pieces),
        "contains a token twice": len(texts) != len(model.pieces),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason:
        raise ExportError(
            f"{path} {reason}, which is not supported: give the model a tokenizer.json"
        )


def _build_model(model: Any, unknown: int | None, path: Path) -> tokenizers.Tokenizer:
    """Build the tokenizer with its model, BPE or Unigram."""
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    fallback = model.trainer_spec.byte_fallback
    with converting_errors(f"{path} is damaged", ExportError):
        if model.trainer_spec.model_type == UNIGRAM:
            return tokenizers.Tokenizer(models.Unigram(pieces, unknown, fallback))
        scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
        return tokenizers.Tokenizer(
            models.BPE(
                {piece: id for id, (piece, _) in enumerate(pieces)},
                merges_by_score(scores),
                unk_token=None if unknown is None else pieces[unknown][0],
                fuse_unk=True,
                byte_fallback=fallback,
            )
        )


def _prefix(model: Any, added: AddedTokens) -> Prefix:
    """Choose the rule for a space before a text."""
    if not model.normalizer_spec.add_dummy_prefix:
        return "never"
    if added.settings.get("legacy") is False:
        return "first"
    return "once" if any(piece.type == USER_DEFINED for piece in model.pieces) else "always"


def _add_bos(tokenizer: tokenizers.Tokenizer, model: Any, added: AddedTokens) -> None:
    """Put BOS before a text unless the settings say no, as in transformers."""
    token = added.role("bos_token") or model.trainer_spec.bos_piece
    id = tokenizer.token_to_id(token)
    if id is not None and added.settings.get("add_bos_token", model.trainer_spec.bos_id >= 0):
        put_before(tokenizer, token, id)
