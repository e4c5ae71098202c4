"""Small SentencePiece models, trained here: BPE and Unigram, with all that they may be told."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sentencepiece

from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.export.tokenizers.sentencepiece import sentencepiece_tokenizer_json
from tests.support.tokenizer_strings import CJK, CODE, PROSE

TEXTS = [*PROSE, *CODE, *CJK, "aaaa aaaaa aaa bababab abababa"] * 5


@cache
def trained(model_type: str, **changes: Any) -> bytes:
    """The file of a model of some 600 tokens; changes: the trainer's options, lists as tuples."""
    usual = {
        "vocab_size": 600,
        "hard_vocab_limit": False,
        "byte_fallback": True,
        "character_coverage": 0.98,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "minloglevel": 2,
    }
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=file,
        model_type=model_type,
        **{
            name: list(value) if isinstance(value, tuple) else value
            for name, value in {**usual, **changes}.items()
        },
    )
    return file.getvalue()


def write_model(folder: Path, data: bytes, **files: Mapping[str, Any]) -> Path:
    """Write a directory with tokenizer.model, and objects by the names of JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(data)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder


def read_model(data: bytes, **files: Mapping[str, Any]) -> Tokenizer:
    with TemporaryDirectory() as folder:
        text = sentencepiece_tokenizer_json(write_model(Path(folder), data, **files))
    return Tokenizer.from_json(text)


@cache
def unigram() -> Tokenizer:
    return read_model(trained("unigram"))
