"""Read the vocabulary of a Hugging Face directory, or of a folder of ONNX Runtime GenAI."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.fields import format_value
from pilotfish.export.sources.huggingface_tokenizer import (
    DirectoryTokenizer,
    drop_tokens_beyond,
    read_templates,
    token_ids,
)


class DirectoryVocabulary(NamedTuple):
    """A vocabulary, the files that it was read from, and the tokens that were left out."""

    vocabulary: Vocabulary
    files: list[Path]
    left_out: list[str]


def read_vocabulary(
    path: Path,
    model: str,
    rows: int,
    limit: str,
    stated: Sequence[Mapping[str, Any]],
    ignored: Collection[str] = (),
) -> DirectoryVocabulary:
    """Read tokenizer, chat templates, and begin and end tokens.

    Args:
        path: the directory.
        model: the model's name.
        rows: number of tokens that the model has; special tokens beyond are left out.
        limit: what limits this number, for errors.
        stated: objects with bos_token_id and eos_token_id; the first one that states an id counts.
        ignored: keys of the tokenizer's settings to ignore; "chat_template" omits the templates.

    Raises:
        ExportError: if the tokenizer is unusable or has more tokens than the model, or if an end
            token is not among them.
    """
    template, named = read_templates(path, ignored)
    tokenizer = DirectoryTokenizer(path, ignored)
    templates = [template or "", *named.values()]
    tokenizer.expect_tokens(templates)
    text, left_out = drop_tokens_beyond(tokenizer.text, rows, templates)
    try:
        size = Tokenizer.from_json(text).vocab_size
    except ArtifactError as error:
        raise ExportError(f"{path}: the tokenizer is unusable: {error}") from None
    if size > rows:
        raise ExportError(f"{path}: the tokenizer has {size} tokens, but {limit}")
    ids = token_ids(text)
    special, ends = tokenizer.special_tokens(ids), _end_ids(path, stated, size)
    end = ids.get(special.get("eos_token", ""))
    begins = (values.get("bos_token_id") for values in stated)
    vocabulary = Vocabulary(
        model=model,
        tokenizer_json=text,
        vocab_size=size,
        bos_id=next((id for id in begins if isinstance(id, int) and 0 <= id < size), None),
        eos_ids=ends if end is None or end in ends else [*ends, end],
        chat_template=template,
        chat_templates=named,
        special_tokens=special,
    )
    return DirectoryVocabulary(vocabulary, tokenizer.files, left_out)


def _end_ids(path: Path, objects: Sequence[Mapping[str, Any]], size: int) -> list[int]:
    """Return the ids that end a generation, from the first object that states such ids."""
    for values in objects:
        stated = values.get("eos_token_id")
        if stated is not None:
            ids = stated if isinstance(stated, list) else [stated]
            if all(isinstance(id, int) and 0 <= id < size for id in ids):
                return list(dict.fromkeys(ids))
            raise ExportError(
                f"{path}: eos_token_id {format_value(stated)} is not in the vocabulary of {size} "
                "tokens"
            )
    return []
