"""Make a `tokenizer.json` of a vocabulary in another form.

In: GGUF metadata (`GgufVocabulary`), or GPT-2's pair of files (`gpt2_tokenizer_json`). GGUF has two
supported models of tokenizer: "gpt2" (byte-level BPE, split by one of `export.pretokenizers`) and
"llama" (SentencePiece BPE with byte fall-back). llama.cpp is the reference for their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from pilotfish.export.errors import ExportError
from pilotfish.export.pretokenizers import PRETOKENIZERS

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
NO_TOKEN = 2**32 - 1  # llama.cpp's LLAMA_TOKEN_NULL
PADDING = re.compile(r"\[PAD\d+\]")  # names that converters give to rows without a token
SPACE_MARK = "▁"
GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")


class GgufVocabulary:
    """The tokenizer of a GGUF file.

    Attributes:
        tokenizer_json: content of a `tokenizer.json`.
        size: number of tokens, unused ones at the end left out (they pad the embedding).
        bos_id, eos_ids: what begins a text; what ends a generation.

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
        self.tokenizer_json: str = self._build().to_str()
        self.bos_id = self._id("bos_token_id")
        ends = [self._end_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        self.eos_ids = list(dict.fromkeys(id for id in ends if id is not None))

    def _build(self) -> tokenizers.Tokenizer:
        model = self._metadata.get("tokenizer.ggml.model")
        if model == "gpt2":
            tokenizer = self._byte_level()
        elif model == "llama":
            tokenizer = self._sentencepiece()
        else:
            raise ExportError(f"{self._path}: the tokenizer model {model!r} is not supported")
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind == CONTROL, normalized=False)
                for token, kind in zip(self._tokens, self._kinds, strict=True)
                if kind in (CONTROL, USER_DEFINED) and token
            ]
        )
        bos = self._id("bos_token_id")
        if bos is not None and self._adds_bos(model):
            token = self._tokens[bos]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{token} $A", special_tokens=[(token, bos)]
            )
        return tokenizer

    def _adds_bos(self, model: object) -> bool:
        """Whether BOS precedes a raw text: as stated, else by llama.cpp's default."""
        usual = model == "llama" or self._metadata.get("tokenizer.ggml.pre") == "llama-bpe"
        return bool(self._metadata.get("tokenizer.ggml.add_bos_token", usual))

    def _byte_level(self) -> tokenizers.Tokenizer:
        """Build GPT-2's kind, whose merges are in the file."""
        name = self._metadata.get("tokenizer.ggml.pre", "default")
        recipe = PRETOKENIZERS.get(name) if isinstance(name, str) else None
        if recipe is None:
            raise ExportError(
                f"{self._path}: the pre-tokenizer {name!r} is not supported; known are "
                + ", ".join(PRETOKENIZERS)
            )
        merges = [_pair(merge) for merge in self._list("merges", str)]
        vocabulary = {token: id for id, token in enumerate(self._tokens)}
        tokenizer = self._with_model(vocabulary, merges, ignore_merges=recipe.ignore_merges)
        tokenizer.pre_tokenizer = recipe.build()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        """Build Llama 2's kind, whose merges follow from the scores."""
        scores: list[float] = self._list("scores", (int, float))[: self.size]
        vocabulary = {token: id for id, token in enumerate(self._tokens)}
        merges = _merges_by_score(self._tokens, self._kinds, scores)
        unknown = self._id("unknown_token_id")
        tokenizer = self._with_model(
            vocabulary,
            merges,
            unk_token=None if unknown is None else self._tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        marks = normalizers.Replace(" ", SPACE_MARK)
        steps = [
            decoders.Replace(SPACE_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
        if self._metadata.get("tokenizer.ggml.add_space_prefix", True):
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks])
            steps.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = marks
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _with_model(
        self, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
    ) -> tokenizers.Tokenizer:
        try:
            return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **options))
        except Exception as error:  # the library raises bare Exception
            raise ExportError(
                f"{self._path}: the merges do not fit the vocabulary: {error}"
            ) from None

    def _id(self, key: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, int) and 0 <= value < self.size else None

    def _end_id(self, key: str) -> int | None:
        """Return an end id; refuse one that is no token, since texts would have no end."""
        value = self._metadata.get(f"tokenizer.ggml.{key}", NO_TOKEN)
        if value != NO_TOKEN and self._id(key) is None:
            raise ExportError(
                f"{self._path}: tokenizer.ggml.{key} {value!r} is not in the vocabulary of "
                f"{self.size} tokens"
            )
        return self._id(key)

    def _list(self, key: str, kinds: type | tuple[type, ...]) -> list[Any]:
        values = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
            raise ExportError(f"{self._path}: tokenizer.ggml.{key} is missing or damaged")
        return values


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
        merges = [_pair(line) for line in lines if line and not line.startswith("#version")]
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


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _merges_by_score(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """List all ways to join two pieces into a third, the best third first.

    SentencePiece joins the neighbours whose union scores highest. Among splits of one union the
    longer left part goes first, as in transformers' conversion.
    """
    score = {
        token: value
        for token, kind, value in zip(tokens, kinds, scores, strict=True)
        if kind == NORMAL
    }
    merges = [
        (token[:cut], token[cut:])
        for token in score
        for cut in range(1, len(token))
        if token[:cut] in score and token[cut:] in score
    ]
    merges.sort(key=lambda pair: (-score[pair[0] + pair[1]], -len(pair[0])))
    return merges
