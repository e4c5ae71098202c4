"""Pairs of vocabularies that overlap partly, and a synthetic drafter of another one.

The drafter uses a real bridge: it reads the committed text and the draft in its own tokens, and its
logits are projected to the target's.
"""

from functools import cache

import numpy as np

from pilotfish.bridge import Pair
from pilotfish.engines.vocabulary import Vocabulary
from tests.support.enumeration import Model
from tests.support.rounds import PROMPT, draft_window
from tests.support.tiny_tokenizer import tiny_tokenizer

# The drafter's and the target's tokens of each pair, without the end tokens, which all pairs share;
# "nothing else" shares no others.
WORDS = {
    # the drafter reads the target's "b", "a" as "ba", its "ab" as "a", "b", and its "c" not at all
    "partial": (["d", "b", "a", "ba", "dd"], ["a", "b", "ab", "c"]),
    "one text token": (["d", "e", "c", "dc", "de", "cc"], ["a", "c", "b"]),
    "nothing else": (["d", "e", "c", "dc", "de", "cc"], ["a", "c", "b"]),
    "the target has more": (["b", "a"], ["a", "b", "ab", "ba"]),
    "the drafter has more": ([*"cdefgh", "b", "a", "aa", "ab", "bb", "cd"], ["a", "b", "aa"]),
}


# A drafter's tokens, beside a tiny model of six: A to E and an end.
SMALL = ["D", "B", "A", "E", "BA", "DD"]

END, TARGETS_END = "<the end>", "<end>"  # the drafter's and the target's end token


def vocabulary(tokens, end, *, ends=True):
    """Make a tiny model's vocabulary, with ``end`` after the tokens; ends: ``end`` ends answers."""
    size = len(tokens) + 1
    return Vocabulary(
        model=end,
        tokenizer_json=tiny_tokenizer(size, tokens, end),
        vocab_size=size,
        bos_id=None,
        eos_ids=[size - 1] if ends else [],
        chat_template=None,
    )


@cache
def pair_of(words):
    """Make the pair of this name in `WORDS`."""
    drafter, target = WORDS[words]
    ends = words != "nothing else"
    return Pair(vocabulary(drafter, END, ends=ends), vocabulary(target, TARGETS_END, ends=ends))


def ids(tokens):
    """Return the ids, u32 [n]."""
    return np.array(tokens, dtype=np.uint32)


def drafting_across(pair, model, away=0.0):
    """Make a `draft_window` for `play_round` with ``model``, of the drafter's vocabulary.

    away: subtracted from the shared tokens' logits; keeps their ratios.
    """
    bridge = pair.bridge()
    bridge.start(pair.prompt(PROMPT))

    @cache
    def after(committed, path):
        ours = (*bridge.context(ids(committed)).tolist(), *bridge.to_draft_ids(ids(path)).tolist())
        row = model.logits(ours[-2:])
        row[pair.shared.draft_ids] -= np.float32(away)
        return bridge.project(row[None])[0].copy()

    def window(setting, exchange, law, committed):
        return draft_window(setting, exchange, law, committed, lambda path: after(committed, path))

    return window


def drafter_of(pair, seed, kind="random"):
    """Make a synthetic drafter for the pair."""
    return Model(pair.drafter.vocab_size, seed, 1, kind)
