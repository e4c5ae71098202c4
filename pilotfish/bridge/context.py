"""Translate a growing answer from the target's tokens to the drafter's.

In:  the target's ids of the answer so far. Out: the drafter's ids of the same bytes.

Rule: the drafter's tokenizer encodes each stretch of text as a whole, as the continuation of a
text. So the result depends on the answer alone, not on the parts in which the answer arrived. A
stretch ends at the answer's end, at a special token, and at bytes that are not UTF-8 (an incomplete
character may still become valid). Each byte that is not UTF-8 is one token.

Only new tokens cost time: only the end of the last stretch, after the last *cut*, is encoded again.
A cut is possible where (1) later text cannot change a token before the cut, and (2) the text after
the cut is encoded as if it stood alone. `choose_cut` has a rule for each of two families of
vocabularies; texts of other tokenizers are never cut. If a rule is wrong for an unusual pattern,
drafts get worse but the output stays the same.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Set
from itertools import chain, groupby
from typing import Any
from unicodedata import category

import numpy as np
import tokenizers
from numpy.typing import NDArray

from pilotfish.engines.token_bytes import SPACE_MARK
from pilotfish.engines.tokenizer import Tokenizer, character_pairs, without_first_space
from pilotfish.engines.unigram import flatten_steps

RAW = re.compile("([\udc80-\udcff]+)")  # bytes that are not UTF-8, decoded by "surrogateescape"
# Patterns that look back, or test for the text's beginning: with these patterns, (2) is uncertain.
LOOKS_BEHIND = re.compile(r"\(\?<|\\[ABGKby]|(?:^|[(|])\^")
# Number of characters that must be known after a cut. In GPT-4o's pattern "don't" is one word but
# "don'" is two, and 'll is the longest ending.
LOOK_AHEAD = 3
MARKS = (" ", SPACE_MARK)
MARK_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
# With these settings of a BPE model, the tokens of a part of a word depend on the rest of the word.
WHOLE_WORD_RULES = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")

# (text, its encoding) -> numbers of characters and of tokens before the cut; (0, 0): no cut
Cut = Callable[[str, tokenizers.Encoding], tuple[int, int]]


class ContextTranslator:
    """Translates one growing answer at a time. Not thread-safe.

    Args:
        target, drafter: the tokenizers of the answer and of the drafter.
        specials: target's special token → the drafter's; other special tokens are dropped.
    """

    def __init__(self, target: Tokenizer, drafter: Tokenizer, specials: Mapping[int, int]) -> None:
        self._target, self._drafter, self._specials = target, drafter, specials
        self._cut = choose_cut(drafter)
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._byte_ids: dict[int, list[int]] = {}  # the drafter's tokens of bytes seen so far
        self.restart()

    def restart(self) -> None:
        """Begin another answer."""
        self._decoder.reset()  # drops the bytes of an incomplete character
        self._answer = np.empty(0, np.uint32)  # target ids u32 [n] of the last call
        self._settled = np.empty(0, np.int64)  # drafter's ids i64 [m] that no longer change
        self._text = ""  # text after the settled ids
        self._encoded, self._tail = "", list[int]()  # encoded part of this text, and its ids

    def translate(self, answer: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return the drafter's ids [m] of an answer of target ids [n].

        If the answer continues the answer of the last call, only its new tokens cost time.
        """
        known = len(self._answer)
        if not np.array_equal(answer[:known], self._answer):
            self.restart()
            known = 0
        if len(answer) > known:
            self._grow(answer[known:].tolist())
            self._answer = np.array(answer, np.uint32)  # a copy: the caller may change its array
        partial, _ = self._decoder.getstate()
        tail = [*self._tail, *self._raw_ids(partial)]
        return np.concatenate([self._settled, np.array(tail, np.int64)])

    def _grow(self, ids: list[int]) -> None:
        """Append target ids to the answer."""
        settled: list[int] = []
        for special, run in groupby(ids, self._target.is_special):
            if special:
                settled += self._read(self._decoder.decode(b"", final=True))
                settled += self._finish()
                settled += [self._specials[id] for id in run if id in self._specials]
            else:
                data = b"".join(map(self._target.token_bytes, run))
                settled += self._read(self._decoder.decode(data))
        if self._text != self._encoded:
            encoding = self._drafter.encode_rest(self._text)
            characters, tokens = self._cut(self._text, encoding)
            settled += encoding.ids[:tokens]
            self._text, self._tail = self._text[characters:], encoding.ids[tokens:]
            self._encoded = self._text
        self._settled = np.concatenate([self._settled, np.array(settled, np.int64)])

    def _read(self, decoded: str) -> list[int]:
        """Append decoded text; returns the ids of stretches that end at bytes other than UTF-8."""
        text, *others = RAW.split(decoded)
        self._text += text
        settled: list[int] = []
        for raw, text in zip(others[::2], others[1::2], strict=True):
            settled += self._finish() + self._raw_ids(raw.encode("utf-8", "surrogateescape"))
            self._text = text
        return settled

    def _finish(self) -> list[int]:
        """End the current stretch of text and return its token ids."""
        ids: list[int] = self._drafter.encode_rest(self._text).ids if self._text else []
        self._text = ""
        return ids

    def _raw_ids(self, data: bytes) -> list[int]:
        """Return the drafter's ids of bytes that are not UTF-8."""
        for byte in data:
            if byte not in self._byte_ids:
                id = self._drafter.byte_token(byte)
                replacement = self._drafter.encode_rest("\ufffd").ids if id is None else [id]
                self._byte_ids[byte] = replacement
        return [id for byte in data for id in self._byte_ids[byte]]


def choose_cut(tokenizer: Tokenizer) -> Cut:
    """Choose the rule by which texts of this tokenizer are cut."""
    if not _added_tokens_ignore_context(tokenizer.steps):
        return _no_cut
    if _splits_into_words(tokenizer.steps):
        return _cut_between_words(_added_pairs(tokenizer.steps))
    if _merges_all(tokenizer):
        return _cut_between_unmerged(tokenizer.neighbours | _added_pairs(tokenizer.steps))
    return _no_cut


def _no_cut(text: str, encoding: tokenizers.Encoding) -> tuple[int, int]:
    return 0, 0


def _cut_between_words(pairs: Set[str]) -> Cut:
    """Cut before a word, for a vocabulary that splits text into words and merges within words.

    Patterns match from left to right, so the tokens from a word's beginning on do not depend on the
    text before. The beginning of a word is certain if the match before it ended at a character of
    another kind (adjacent characters of one kind may be one match), and if no contraction is
    possible. A normalizer (NFC) changes nothing across a character that composes with no character
    before it.
    """

    def cut(text: str, encoding: tokenizers.Encoding) -> tuple[int, int]:
        offsets, words = encoding.offsets, encoding.word_ids
        last = len(text) - LOOK_AHEAD
        for token in range(len(offsets) - 1, 0, -1):
            at = offsets[token][0]
            if (
                words[token] != words[token - 1]
                and 0 < at <= last
                and _are_separable(text[at - 1], text[at])
                and text[at - 1 : at + 1] not in pairs
            ):
                return at, token
        return 0, 0

    return cut


def _are_separable(left: str, right: str) -> bool:
    """Whether adjacent characters are of different kinds, and no normal form composes them."""
    # Marks compose with the letters before them, and are reordered. Letters that compose with the
    # character before them (Hangul's vowels and finals) compose with letters only.
    return _kind(left) != _kind(right) and category(right)[0] in "LNPSZ"


def _kind(character: str) -> str:
    """Return the kind: Z for white space, L for a letter, N for a number, O for all others."""
    major = "Z" if character.isspace() else category(character)[0]
    return major if major in "ZLN" else "O"


def _cut_between_unmerged(pairs: Set[str]) -> Cut:
    """Cut between characters that are adjacent in no token, and so are never merged.

    This rule is for a vocabulary that merges across words.
    """

    def cut(text: str, encoding: tokenizers.Encoding) -> tuple[int, int]:
        marked = text.replace(" ", SPACE_MARK)
        for at in range(len(marked) - 1, 0, -1):
            if marked[at - 1 : at + 1] not in pairs:
                return at, bisect_left(encoding.offsets, (at,))
        return 0, 0

    return cut


def _relevant_added_tokens(steps: dict[str, Any]) -> list[dict[str, Any]]:
    """List the added tokens that matter for literal text: all of them, or none if all are special.

    The tokenizer finds added tokens that are not special before any other step. It ignores the
    special ones, but they hide other added tokens that overlap with them.
    """
    added: list[dict[str, Any]] = steps["added_tokens"] or []
    return [] if all(token["special"] for token in added) else added


def _added_pairs(steps: dict[str, Any]) -> Set[str]:
    """Return the pairs of adjacent characters in added tokens; no cut may separate a pair."""
    contents = [
        token["content"].replace(" ", mark)
        for token in _relevant_added_tokens(steps)
        for mark in MARKS
    ]
    return frozenset(chain.from_iterable(map(character_pairs, contents)))


def _added_tokens_ignore_context(steps: dict[str, Any]) -> bool:
    """Whether the tokenizer finds added tokens regardless of context and normal forms."""
    rules = ["single_word", "lstrip", "rstrip"]
    if any(flatten_steps(steps["normalizer"])):
        rules.append("normalized")
    plain = [token for token in _relevant_added_tokens(steps) if not token["special"]]
    return not any(token[rule] for token in plain for rule in rules)


def _splits_into_words(steps: dict[str, Any]) -> bool:
    """Whether the tokenizer is byte-level and splits text in known ways."""
    kinds = {step["type"] for step in flatten_steps(steps["normalizer"])}
    splits = list(flatten_steps(steps["pre_tokenizer"]))
    return (
        kinds <= {"NFC"}
        and any(step["type"] == "ByteLevel" for step in splits)
        and all(_is_known_split(step) for step in splits)
    )


def _is_known_split(split: dict[str, Any]) -> bool:
    if split["type"] != "Split":
        return split["type"] in ("ByteLevel", "Digits", "Punctuation")
    pattern = split["pattern"].get("Regex")
    whole = split["behavior"] == "Isolated" or (split["behavior"] == "Removed" and split["invert"])
    return whole and pattern is not None and not LOOKS_BEHIND.search(pattern)


def _merges_all(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer is SentencePiece's BPE: it replaces spaces by marks, then merges."""
    model = tokenizer.steps["model"]
    merges = model["type"] == "BPE" and not any(model.get(name) for name in WHOLE_WORD_RULES)
    # Several characters that have no token must not become one unknown token.
    keeps_unknown_apart = not model.get("fuse_unk") or (
        model.get("byte_fallback") and None not in map(tokenizer.byte_token, range(256))
    )
    normalizer = list(flatten_steps(without_first_space(tokenizer.steps["normalizer"])))
    splits = list(flatten_steps(without_first_space(tokenizer.steps["pre_tokenizer"])))
    marked = normalizer == [MARK_SPACES]
    left = [step for step in splits if not _does_nothing(step, marked)]
    marks = (marked and not left) or (
        not normalizer
        and len(left) == 1
        and left[0]["type"] == "Metaspace"
        and left[0]["replacement"] == SPACE_MARK
    )
    return merges and keeps_unknown_apart and marks


def _does_nothing(step: dict[str, Any], marked: bool) -> bool:
    """Whether a pre-tokenizer step changes nothing; marked: spaces are already replaced."""
    names = ("type", "split", "prepend_scheme", "replacement")
    settings = tuple(map(step.get, names))
    return settings in [("Metaspace", False, "never", mark) for mark in MARKS[: 1 + marked]]
