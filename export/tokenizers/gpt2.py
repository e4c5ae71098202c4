"""GPT-2's pair of files, vocab.json and merges.txt, as in OPT's checkpoints."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models

from pilotfish.engines.tokenizer import complaining
from pilotfish.export.errors import ExportError
from pilotfish.export.sources.json_object import read_object
from pilotfish.export.tokenizers.pretokenizers import PRETOKENIZERS
from pilotfish.export.tokenizers.tables import pair
from pilotfish.reading import reading, text

GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")


def gpt2_tokenizer_json(directory: Path) -> str:
    """Make a tokenizer.json of GPT-2's vocab.json and merges.txt, as in OPT's checkpoints.

    Raises:
        ExportError: if the files are damaged or belong to another kind of tokenizer.
    """
    settings = read_object(directory / "tokenizer_config.json")
    kind = settings.get("tokenizer_class")
    if kind not in GPT2_CLASSES:
        raise ExportError(f"{directory}: a {kind!r:.60} without tokenizer.json is not supported")
    vocabulary = read_object(directory / "vocab.json")
    path = directory / "merges.txt"
    with reading(lambda problem: ExportError(f"{path} cannot be read: {problem}")):
        lines = text(path).splitlines()
        merges = [pair(line) for line in lines if line and not line.startswith("#version")]
    with complaining(f"{directory}: the tokenizer is damaged", ExportError):
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    stated = [settings.get(f"{role}_token") for role in ("bos", "eos", "unk", "pad")]
    # A special token is a string, or an object with its string as `content`.
    special = [token.get("content") if isinstance(token, dict) else token for token in stated]
    known = [token for token in special if isinstance(token, str) and token in vocabulary]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in known])
    tokenizer.pre_tokenizer = PRETOKENIZERS["gpt-2"].build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()
