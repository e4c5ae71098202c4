"""Write the parts that all artifacts have: the tokenizer and the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotfish.engines.artifact import file_sha256
from pilotfish.engines.manifest import MANIFEST_NAME, TOKENIZER_NAME, Manifest
from pilotfish.engines.vocabulary import Vocabulary


def write_manifest(
    directory: Path, vocabulary: Vocabulary, digests: Mapping[str, str], **fields: Any
) -> Manifest:
    """Write tokenizer and manifest into an artifact's directory; return the manifest.

    Args:
        directory: the directory, in which the other files are.
        vocabulary: the model's vocabulary, with all chat templates.
        digests: file name → SHA-256 of the other files.
        fields: the further fields of the manifest.
    """
    tokenizer = directory / TOKENIZER_NAME
    tokenizer.write_text(vocabulary.tokenizer_json, encoding="utf-8")
    manifest = Manifest(
        model=vocabulary.model,
        vocab_size=vocabulary.vocab_size,
        bos_id=vocabulary.bos_id,
        eos_ids=vocabulary.eos_ids,
        chat_template=vocabulary.chat_template,
        chat_templates=vocabulary.chat_templates,
        special_tokens=vocabulary.special_tokens,
        tokenizer_fingerprint=vocabulary.fingerprint,
        files={**digests, TOKENIZER_NAME: file_sha256(tokenizer)},
        **fields,
    )
    (directory / MANIFEST_NAME).write_bytes(manifest.encode())
    return manifest
