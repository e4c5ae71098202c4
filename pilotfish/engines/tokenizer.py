"""Convert text to token ids, and ids to text, at once or while tokens arrive.

In: a `tokenizer.json`. Every token stands for bytes. The text of tokens is their bytes decoded as
UTF-8, with malformed parts replaced by U+FFFD. However ids are split among pushes, the concatenated
output of a `TextStream` equals `decode` of all ids.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any

import tokenizers

from pilotfish.base.reading import read_text, reading_file
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ArtifactError, EngineError, TextTooLongError
from pilotfish.engines.manifest import TOKENIZER_NAME
from pilotfish.engines.token_bytes import byte_scheme
from pilotfish.engines.unigram import check_marks, hide_controls, is_unigram

# No thread pool: texts are encoded one by one in the calling thread, because a pool would take
# cores from the drafter. The library reads this variable at its first encoding.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_CHUNK = 1 << 16  # size (characters) of the parts in which a long text's tokens are counted
_LONGEST_TOKEN = 1 << 10  # maximum bytes of a token; Llama 3's longest token has 128


class Tokenizer:
    """The tokenizer of an artifact.

    Args:
        location: an opened artifact, its directory, or a `tokenizer.json`.

    Attributes:
        special_ids: the ids of the control tokens.

    Raises:
        ArtifactError: if the file is missing, damaged, or of an unknown family.
    """

    def __init__(self, location: Artifact | str | os.PathLike[str]) -> None:
        path = location.path if isinstance(location, Artifact) else Path(location)
        if path.is_dir():
            path = path / TOKENIZER_NAME
        self._load(tokenizer_text(path), str(path))

    @classmethod
    def from_json(cls, text: str, name: str = TOKENIZER_NAME) -> Tokenizer:
        """Make a tokenizer from a `tokenizer.json`'s content; errors call the file `name`."""
        tokenizer = cls.__new__(cls)
        tokenizer._load(text, name)
        return tokenizer

    def _load(self, text: str, name: str) -> None:
        with converting_errors(f"{name} is not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            parsed = json.loads(text)
        if not self._tokenizer.get_vocab_size():
            raise ArtifactError(f"{name} has no tokens")
        self._byte_scheme = byte_scheme(parsed.get("decoder"), name)
        self.is_unigram = is_unigram(parsed)
        if self.is_unigram:
            check_marks(parsed, name)
        self._bytes: dict[int, bytes] = {}  # cache by token id
        self.special_ids = frozenset(self.special_tokens)
        self._tokenizer.no_truncation()  # called because some files request truncation or padding
        self._tokenizer.no_padding()
        self._json = text

    @cached_property
    def _plain_tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer that reads the names of special tokens as plain text.

        A single tokenizer that is switched back and forth would not be thread-safe.
        """
        return _build_plain_tokenizer(self._json)

    @cached_property
    def _later_tokenizer(self) -> tokenizers.Tokenizer:
        """The plain tokenizer for a text's later pieces, where only the first piece gets a "▁"."""
        parsed = json.loads(self._json)
        step = parsed.get("pre_tokenizer")
        later = without_first_space(step, only="first")
        if later == step:
            return self._plain_tokenizer
        return _build_plain_tokenizer(json.dumps(parsed | {"pre_tokenizer": later}))

    @cached_property
    def _continuing_tokenizer(self) -> tokenizers.Tokenizer:
        """The plain tokenizer without the space that some tokenizers put before a text."""
        parsed = json.loads(self._json)
        steps = {name: parsed.get(name) for name in ("normalizer", "pre_tokenizer")}
        without = {name: without_first_space(step) for name, step in steps.items()}
        if without == steps:
            return self._plain_tokenizer
        return _build_plain_tokenizer(json.dumps(parsed | without))

    def encode(self, text: str, *, special: bool = False, most: int | None = None) -> list[int]:
        """Encode `text` without BOS; other Python threads can run during the call.

        Args:
            text: any string; lone surrogates become "?".
            special: whether the name of a control token, such as "<|im_start|>", becomes that token
            (for a rendered chat template) or plain text (for a user's message).
            most: number of tokens at which a text is refused, to bound time and memory. The count
            is approximate: a slightly longer text passes, so check the length of the result.

        This and all other methods that encode raise `TextTooLongError` (see `most`), and
        `ArtifactError` if the tokenizer fails, e.g. in a bad regular expression.
        """
        return self._ids(self._tokenizer if special else self._plain_tokenizer, text, most)

    def encode_later(self, text: str, *, most: int | None = None) -> list[int]:
        """Encode text that follows a special token.

        Names of special tokens in it are plain text.
        """
        return self._ids(self._later_tokenizer, text, most)

    def _ids(self, tokenizer: tokenizers.Tokenizer, text: str, most: int | None) -> list[int]:
        text = text.encode("utf-8", "replace").decode("utf-8")
        if most is not None and len(text) > most:
            self._check_length(tokenizer, text, most)
        ids: list[int] = _encode(tokenizer, text, offsets=False).ids
        return ids

    def _check_length(self, tokenizer: tokenizers.Tokenizer, text: str, most: int) -> None:
        """Count the tokens of the text part by part; raise `TextTooLongError` at more than `most`.

        A cut between parts may add tokens. The count subtracts the bytes of the longest token for
        each part: a cut adds hardly more tokens than that.
        """
        count = 0
        for start in range(0, len(text), _CHUNK):
            part = _encode(tokenizer, text[start : start + _CHUNK], offsets=False)
            count += len(part) - self._longest
            if count > most:
                raise TextTooLongError(f"the text has more than {most} tokens")

    @cached_property
    def _longest(self) -> int:
        """The length (bytes) of the longest token's spelling, at most _LONGEST_TOKEN."""
        pieces = self._tokenizer.get_vocab(with_added_tokens=True)
        return min(max(len(piece.encode("utf-8")) for piece in pieces), _LONGEST_TOKEN)

    def encode_rest(self, text: str) -> tokenizers.Encoding:
        """Encode text that continues another text, so that no space is put before it.

        Names of special tokens are plain text. The result has each token's character offsets and
        word number. The text must have no lone surrogates.
        """
        return _encode(self._continuing_tokenizer, text)

    def byte_token(self, byte: int) -> int | None:
        """Return the id of the token for a single byte; None if the vocabulary has none."""
        id: int | None = self._tokenizer.token_to_id(self._byte_scheme.byte_piece(byte))
        return id

    @cached_property
    def steps(self) -> dict[str, Any]:
        """The part of `tokenizer.json` that describes how text becomes tokens.

        It has "normalizer", "pre_tokenizer", "added_tokens", and "model" without vocabulary and
        merges.
        """
        parsed = json.loads(self._json)
        steps = {name: parsed.get(name) for name in ("normalizer", "pre_tokenizer", "added_tokens")}
        model = {k: v for k, v in parsed["model"].items() if k not in ("vocab", "merges")}
        return steps | {"model": model}

    @cached_property
    def neighbours(self) -> frozenset[str]:
        """All pairs of neighbouring characters in the spellings of tokens."""
        pieces = self._tokenizer.get_vocab(with_added_tokens=True)
        return frozenset(chain.from_iterable(map(character_pairs, pieces)))

    @cached_property
    def beginning(self) -> list[int]:
        """The ids of the tokens that belong before a raw text, such as BOS.

        The list is empty if there are none.
        """
        plain = self._ids(self._tokenizer, "a", None)
        whole: list[int] = _encode(self._tokenizer, "a", whole=True).ids
        # Drop tokens that the tokenizer puts after a text, such as EOS: the model continues the
        # text.
        starts = range(len(whole) - len(plain) + 1 if plain else 0)
        return next(
            (whole[:index] for index in starts if whole[index : index + len(plain)] == plain), []
        )

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Decode `ids`; omit special tokens unless `special`."""
        stream = TextStream(self, special=special)
        return stream.push(ids) + stream.flush()

    def piece(self, id: int) -> str:
        """Return a token's spelling in the vocabulary; "" for an unknown id."""
        return self._tokenizer.id_to_token(id) or ""

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that the token adds to a text; b"" for an unknown id."""
        data = self._bytes.get(id)
        if data is None:
            data = self._bytes[id] = self._byte_scheme.token_bytes(self.piece(id))
        return data

    @cached_property
    def special_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """The control tokens by id, with their spellings and matching rules."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {id: token for id, token in added.items() if token.special}

    def named_controls(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of the control tokens that these texts name."""
        whole = "\n".join(texts)
        return frozenset(
            id for id, token in self.special_tokens.items() if whole and token.content in whole
        )

    def normalized(self, text: str) -> str:
        """Normalize a text, as the search for control tokens with the flag `normalized` does."""
        normalizer = self._tokenizer.normalizer
        text = text.encode("utf-8", "replace").decode("utf-8")
        result: str = text if normalizer is None else normalizer.normalize_str(text)
        return result

    def is_special(self, id: int) -> bool:
        """Whether the id is a control token such as <|im_end|>, not text."""
        return id in self.special_ids

    @property
    def drops_first_space(self) -> bool:
        """Whether decoding drops the first space, which SentencePiece adds when encoding."""
        return self._byte_scheme.drops_first_space

    @cached_property
    def vocab_size(self) -> int:
        """The largest token id + 1."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the token strings in the order of their ids.

        Each string is preceded by its length (bytes of UTF-8) as a little-endian u32. An id without
        a token is 0xFFFFFFFF.
        """
        by_id = {
            id: piece for piece, id in self._tokenizer.get_vocab(with_added_tokens=True).items()
        }
        digest = hashlib.sha256()
        for id in range(self.vocab_size):
            piece = by_id.get(id)
            if piece is None:
                digest.update(b"\xff\xff\xff\xff")
            else:
                data = piece.encode("utf-8")
                digest.update(len(data).to_bytes(4, "little") + data)
        return digest.hexdigest()


def _encode(
    tokenizer: tokenizers.Tokenizer, text: str, *, whole: bool = False, offsets: bool = True
) -> tokenizers.Encoding:
    """Encode a text as a batch of one: the library releases the interpreter's lock for batches.

    whole: whether to add tokens such as BOS. offsets: whether to compute offsets, which takes half
    as much time again.
    """
    encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    with converting_errors("the tokenizer failed at a text"):
        return encode([text], add_special_tokens=whole)[0]


def tokenizer_text(path: Path) -> str:
    """Read a `tokenizer.json` without checks; raise `ArtifactError` if it is not readable text."""
    with reading_file(lambda problem: ArtifactError(f"{path} cannot be read: {problem}")):
        return read_text(path)


@contextmanager
def converting_errors(what: str, kind: type[EngineError] = ArtifactError) -> Iterator[None]:
    """Convert the library's errors (`Exception`, or `BaseException` on a panic) to `kind`."""
    try:
        yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if isinstance(error, kind) or not (panic or isinstance(error, Exception)):
            raise
        raise kind(f"{what}: {error}") from None


class TextStream:
    """A decoder of tokens that arrive a few at a time. Not thread-safe.

    The text that `push` returns is final: an unfinished UTF-8 sequence is held back until more
    tokens arrive. The time of a push depends only on the number of tokens pushed. Control tokens
    are omitted unless ``special`` is true or ``visible`` lists them.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, special: bool = False, visible: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._omitted: frozenset[int] = frozenset()  # ids of the tokens to omit
        if not special:
            self._omitted = tokenizer.special_ids
            if visible:
                self._omitted = self._omitted.difference(visible)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.drops_first_space

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens; return the text that is now complete, which may be empty."""
        token_bytes, omitted = self._tokenizer.token_bytes, self._omitted
        data = b"".join([token_bytes(id) for id in ids if id not in omitted])
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return U+FFFD for an unfinished UTF-8 sequence, else ""; then start a new text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._at_start = self._tokenizer.drops_first_space
        return rest


def _build_plain_tokenizer(text: str) -> tokenizers.Tokenizer:
    """Build a tokenizer of the library that reads names of special tokens as plain text."""
    parsed = json.loads(text)
    if is_unigram(parsed):
        text = json.dumps(hide_controls(parsed))
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True
    # removed, since the processor would add tokens and trim offsets
    tokenizer.post_processor = None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def character_pairs(text: str) -> Iterable[str]:
    """Yield each pair of neighbouring characters."""
    return map(add, text, text[1:])


def without_first_space(step: Any, only: str | None = None) -> Any:
    """Copy a normalizer or pre-tokenizer, changed so that it puts no space before a text.

    only: change only steps with this `prepend_scheme`; None = change all.
    """
    if step is None or (step["type"] == "Prepend" and only is None):
        return None
    if step["type"] == "Sequence":
        [name] = step.keys() - {"type"}
        steps = [without_first_space(part, only) for part in step[name]]
        return {"type": "Sequence", name: [part for part in steps if part is not None]}
    if only is not None and step.get("prepend_scheme") != only:
        return step
    if step["type"] == "Metaspace":  # older files have neither `prepend_scheme` nor `split`
        mark, split = step["replacement"], step.get("split", True)
        return {"type": "Metaspace", "replacement": mark, "prepend_scheme": "never", "split": split}
    return {**step, "add_prefix_space": False} if "add_prefix_space" in step else step
