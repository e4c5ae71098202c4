"""GPT-2's vocab.json and merges.txt, as in OPT's checkpoints, converted to a tokenizer.json.

Added tokens come from the directory's other files (`added`).
"""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models

from pilotfish.base.reading import read_text, reading_file
from pilotfish.engines.tokenizer import converting_errors
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.json_object import read_object
from pilotfish.export.tokenizers.added import read_added
from pilotfish.export.tokenizers.pretokenizers import PRETOKENIZERS
from pilotfish.export.tokenizers.tables import pair

GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")


def gpt2_tokenizer_json(directory: Path) -> str:
    """Convert vocab.json and merges.txt in `directory` to a tokenizer.json.

    Raises:
        ExportError: if the files are damaged or belong to another kind of tokenizer, or an added
            token would not get its stated id.
    """
    settings = read_object(directory / "tokenizer_config.json")
    kind = settings.get("tokenizer_class")
    if kind not in GPT2_CLASSES:
        raise ExportError(f"{directory}: a {kind!r:.60} without tokenizer.json is not supported")
    vocabulary = read_object(directory / "vocab.json")
    path = directory / "merges.txt"
    with reading_file(lambda problem: ExportError(f"{path} cannot be read: {problem}")):
        lines = read_text(path).splitlines()
        merges = [pair(line) for line in lines if line and not line.startswith("#version")]
    with converting_errors(f"{directory}: the tokenizer is damaged", ExportError):
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    read_added(directory).add_to(tokenizer, {}, str(directory))
    tokenizer.pre_tokenizer = PRETOKENIZERS["gpt-2"].build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()
