"""Find the tokens that two vocabularies share.

Two tokens are equal if they mean the same bytes. Their spelling may differ: "Ġthe" (byte-level) and
"▁the" (SentencePiece), "Ċ" and "<0x0A>". If several tokens of one vocabulary mean the same bytes,
only the canonical token is shared. Special tokens are equal if their strings are equal; no special
token equals a text token. The tokens that end a turn are equal even if their names differ. Tokens
that begin a text are not shared: no answer needs one, and SmolLM2's token also begins a message.

The drafter's distribution is renormalised over the shared tokens. The result is the q that is
sampled and sent, so the distribution of the output is unchanged. A token that is not shared is
never drafted, which only costs acceptance (Timor et al. 2025, token-level intersection).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import PairMismatchError
from pilotfish.base.struct_types import gathered
from pilotfish.engines.cache import cache_directory, keep_newest, replace_file
from pilotfish.engines.foreign import UNIGRAM_UNSHARED
from pilotfish.engines.token_bytes import BYTE_TOKEN
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.engines.vocabulary import Vocabulary

_log = logging.getLogger("pilotfish.device")

RULE = 1  # version of the rules above; cached files of other versions are ignored
SUFFIX = ".bridge"
MOST_BYTES = 1 << 26  # maximum bytes of a cached file; it has 8 per token
MOST_FILES = 64  # maximum number of cached pairs; the oldest are deleted
MOST_ENCODED = 1024  # maximum byte strings with several tokens; real vocabularies have 256


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """The tokens that two vocabularies share, one to one.

    draft_ids: i64 [n], the drafter's ids, in the order of ``target``.
    target: i64 [n], the target's ids, ascending.
    specials: the shared special tokens: target id → drafter's id.
    draft_size, target_size: sizes of the vocabularies without padding.
    """

    draft_ids: NDArray[np.int64]
    target: NDArray[np.int64]
    specials: dict[int, int]
    draft_size: int
    target_size: int

    @classmethod
    def find(cls, drafter: Vocabulary, target: Vocabulary) -> SharedTokens:
        """Find the shared tokens of a pair, or read them from the cache (in milliseconds).

        Raises `PairMismatchError` if no token is shared, or if a vocabulary is Unigram: all tokens
        of a growing text may change there, so a translated answer would never settle.
        """
        path = cache_directory() / "bridges" / f"{drafter.digest}-{target.digest}{SUFFIX}"
        shared = _read(path, drafter, target)
        if shared is None:
            shared = _find(drafter, target)
            _write(path, shared)
        return shared

    @cached_property
    def to_draft_ids(self) -> NDArray[np.int32]:
        """The drafter's id of each target token, i32 [V_t]; −1 for a token that is not shared."""
        ids = np.full(self.target_size, -1, np.int32)
        ids[self.target] = self.draft_ids
        return ids

    def to_target_ids(
        self, vocabulary_subset: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return the target's id of each drafter token, i64 [V_d]; V_t for tokens not shared.

        vocabulary_subset: i64 [N], the tokens that the drafter's head was cut to; then the result
        has only these tokens, [N].
        """
        places = np.full(self.draft_size, self.target_size, np.int64)
        places[self.draft_ids] = self.target
        return places if vocabulary_subset is None else places[vocabulary_subset]

    def __len__(self) -> int:
        return len(self.target)


def _find(drafter: Vocabulary, target: Vocabulary) -> SharedTokens:
    """Compare two vocabularies."""
    if drafter.tokenizer.is_unigram or target.tokenizer.is_unigram:
        raise PairMismatchError(
            f"{drafter.model} cannot draft for {target.model}: {UNIGRAM_UNSHARED}."
        )
    draft_texts, draft_specials = _tokens(drafter)
    target_texts, target_specials = _tokens(target)
    # target id → drafter's id
    pairs = {id: draft_texts[data] for data, id in target_texts.items() if data in draft_texts}
    if not pairs:
        raise PairMismatchError(
            f"{drafter.model} cannot draft for {target.model}: their vocabularies share no token. "
            "Use a drafter whose tokenizer has more in common with the target's (pilotfish "
            "export bridge DRAFT TARGET counts the shared tokens)."
        )
    specials = {
        id: draft_specials[piece]
        for piece, id in target_specials.items()
        if piece in draft_specials
    }
    _join_turn_ends(specials, drafter, target)
    ids = sorted((pairs | specials).items())
    return SharedTokens(
        target=np.array([id for id, _ in ids], np.int64),
        draft_ids=np.array([draft_id for _, draft_id in ids], np.int64),
        specials=specials,
        draft_size=drafter.vocab_size,
        target_size=target.vocab_size,
    )


def _tokens(vocabulary: Vocabulary) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return the canonical ids by bytes, and the special tokens' ids by string.

    End tokens are special even if the tokenizer treats them as text.
    """
    tokenizer = vocabulary.tokenizer
    ends = set(vocabulary.eos_ids)
    specials: dict[str, int] = {}
    texts: dict[bytes, int] = {}
    duplicates: dict[bytes, list[int]] = {}
    for id in range(min(vocabulary.vocab_size, tokenizer.vocab_size)):
        if id in ends or tokenizer.is_special(id):
            specials[tokenizer.piece(id)] = id
        elif data := tokenizer.token_bytes(id):
            first = texts.setdefault(data, id)
            if first != id:
                duplicates.setdefault(data, [first]).append(id)
    for data, ids in islice(duplicates.items(), MOST_ENCODED):
        texts[data] = _canonical(tokenizer, data, ids)
    specials.pop("", None)  # an end token that the tokenizer lacks has this string
    return texts, specials


def _canonical(tokenizer: Tokenizer, data: bytes, ids: Iterable[int]) -> int:
    """Choose the canonical id among tokens of the same bytes.

    The first choice is the token that encodes the bytes as text, then a token that is no byte
    token, then the token with the lowest id.
    """
    with suppress(UnicodeDecodeError):
        encoded = tokenizer.encode(data.decode("utf-8"))
        if len(encoded) == 1 and encoded[0] in ids:
            return encoded[0]
    return min(ids, key=lambda id: (bool(BYTE_TOKEN.fullmatch(tokenizer.piece(id))), id))


def _join_turn_ends(specials: dict[int, int], drafter: Vocabulary, target: Vocabulary) -> None:
    """Map the target's turn end to the drafter's, unless one of them already has a partner by name.

    The drafter's turn end then has no other partner, even if it has another token's name.
    """
    draft_end, target_end = drafter.turn_end, target.turn_end
    if (
        draft_end is None
        or target_end is None
        or draft_end >= drafter.vocab_size
        or target_end >= target.vocab_size
    ):
        return
    by_name = [(id, specials[id]) for id in target.eos_ids if specials.get(id) in drafter.eos_ids]
    if any(id == target_end or draft_id == draft_end for id, draft_id in by_name):
        return
    for id in [id for id, draft_id in specials.items() if draft_id == draft_end]:
        del specials[id]
    specials[target_end] = draft_end


class _StoredPair(msgspec.Struct, frozen=True, array_like=True):
    """The shared tokens in a cached file, after the SHA-256 of their msgpack; ids are <i4."""

    rule: int
    drafter: str  # digest
    target: str
    own_ids: bytes
    target_ids: bytes
    specials: dict[int, int]


def _write(path: Path, shared: SharedTokens) -> None:
    """Write the shared tokens to the cache, if possible."""
    drafter, target = path.stem.split("-")
    own_ids, target_ids = (ids.astype("<i4").tobytes() for ids in (shared.draft_ids, shared.target))
    content = msgspec.msgpack.encode(
        _StoredPair(RULE, drafter, target, own_ids, target_ids, shared.specials)
    )
    try:
        replace_file(path, hashlib.sha256(content).digest(), content)
        keep_newest(path.parent, f"*{SUFFIX}", MOST_FILES)
    except OSError as error:
        _log.info("shared tokens are not cached: %s", error)


def _read(path: Path, drafter: Vocabulary, target: Vocabulary) -> SharedTokens | None:
    """Read cached shared tokens; None if the file is missing, damaged, or of another pair."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as opened:
            digest, content = opened.read(32), opened.read(MOST_BYTES)
        if hashlib.sha256(content).digest() != digest:
            raise ValueError("it is damaged")
        file = msgspec.msgpack.decode(content, type=gathered(_StoredPair))
        if (file.rule, file.drafter, file.target) != (RULE, drafter.digest, target.digest):
            raise ValueError("it belongs to another pair")
        shared = SharedTokens(
            draft_ids=np.frombuffer(file.own_ids, "<i4").astype(np.int64),
            target=np.frombuffer(file.target_ids, "<i4").astype(np.int64),
            specials=file.specials,
            draft_size=drafter.vocab_size,
            target_size=target.vocab_size,
        )
        _check(shared)
        with suppress(OSError):
            path.touch()  # marks the file as used
    except (OSError, ValueError, msgspec.DecodeError) as error:
        _log.warning("%s is not used: %s", path, error)
        return None
    return shared


def _check(shared: SharedTokens) -> None:
    """Raise `ValueError` unless the map is one-to-one within both vocabularies."""
    draft_ids, target, specials = shared.draft_ids, shared.target, shared.specials
    if not 0 < len(draft_ids) == len(target):
        raise ValueError("it does not hold pairs of tokens")
    if target[0] < 0 or target[-1] >= shared.target_size or (np.diff(target) <= 0).any():
        raise ValueError("its target ids do not ascend within the vocabulary")
    if (
        draft_ids.min() < 0
        or draft_ids.max() >= shared.draft_size
        or len(np.unique(draft_ids)) < len(draft_ids)
    ):
        raise ValueError("its drafter ids are invalid or repeated")
    if any(
        not 0 <= id < shared.target_size or draft_id < 0 or shared.to_draft_ids[id] != draft_id
        for id, draft_id in specials.items()
    ):
        raise ValueError("its special tokens are not shared")
