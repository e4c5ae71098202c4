"""GPT-2's pair of files, vocab.json and merges.txt, as in OPT's checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models

from pilotfish.export.errors import ExportError
from pilotfish.export.tokenizers.pretokenizers import PRETOKENIZERS
from pilotfish.export.tokenizers.tables import pair

GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")


def gpt2_tokenizer_json(directory: Path) -> str:
    """Make a tokenizer.json of GPT-2's vocab.json and merges.txt, as in OPT's checkpoints.

    Raises:
        ExportError: if the files are damaged or belong to another kind of tokenizer.
    """
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
        vocabulary = json.loads((directory / "vocab.json").read_text("utf-8"))
        lines = (directory / "merges.txt").read_text("utf-8").splitlines()
        kind = settings.get("tokenizer_class")
        if kind not in GPT2_CLASSES:
            raise ExportError(f"{directory}: a {kind} without tokenizer.json is not supported")
        merges = [pair(line) for line in lines if line and not line.startswith("#version")]
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    except ExportError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ExportError(f"{directory}: the tokenizer is damaged: {error}") from None
    stated = [settings.get(f"{role}_token") for role in ("bos", "eos", "unk", "pad")]
    # A special token is a string, or an object with its string as `content`.
    special = [token.get("content") if isinstance(token, dict) else token for token in stated]
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in special if t in vocabulary]
    )
    tokenizer.pre_tokenizer = PRETOKENIZERS["gpt-2"].build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()
