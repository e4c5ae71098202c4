"""Where a drafter agrees with its target: one reading of an answer, instead of rounds over a link.

In:  a drafter with its bridge, a prompt, and the target's answer. Out: whether the drafter, behind
     the prompt and the answer's first t tokens, drafts the target's next one, for each t; and what
     follows from that.

Drafts are only compared behind accepted ones, and these are the target's own tokens. So where both
choose without chance, or by the same noise (`speculation.agreement`), what every protocol and window
accepts follows from these answers alone: exactly where both have one vocabulary, but for ties,
since wide passes round differently from those of one token. Across a bridge later drafts of a round
stand behind its own drafts, token for token, where here the text is tokenised anew: this differs at
times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import PromptTooLongError
from pilotfish.device_runtime.bridge import Prompt
from pilotfish.device_runtime.drafting import Drafter, ModelDrafter
from pilotfish.speculation.distributions import Floats, Sampling
from pilotfish.wire.committed_tokens import common_prefix
from pilotfish.wire.protocols import SamplingParams
from pilotfish.wire.protocols.ahead import draft_with_margin

Ids = NDArray[np.uint32]
Agreed = NDArray[np.bool_]

GREEDY = SamplingParams(sampling=Sampling(temperature=0.0), seed=0)
_ROWS = 64  # of logits at a time: 64 · 152k · 4 bytes are 39 MB


def agreement(
    drafter: Drafter, prompt: Prompt, answer: Sequence[int] | Ids, sampling: SamplingParams = GREEDY
) -> Agreed:
    """Compare the drafter's choice with each token of an answer [n]; bool [n].

    The answer is the target's under the same law. Where a drafter knows of nothing it is wrong. It
    takes the answer as said: later ones may repeat it. `PromptTooLongError`: the drafter has no
    room for both.
    """
    told = np.asarray(answer, dtype=np.uint32)
    drafter.start(prompt)
    text = np.concatenate([prompt.ids, told])
    drafts = np.full(len(told), -1, dtype=np.int64)
    since = len(prompt.ids)
    if isinstance(drafter, ModelDrafter):
        found = _read(drafter, text, since)
    else:
        found = _asked(drafter, text, since)
    for places, logits in found:
        if sampling.sampling.greedy:
            drafts[places] = logits.argmax(axis=1)
        else:
            for place, row in zip(places, logits, strict=True):
                drafts[place] = draft_with_margin(row, sampling, since + int(place))[0]
    drafter.end(text)
    agreed: Agreed = drafts == told
    return agreed


def _asked(drafter: Drafter, text: Ids, since: int) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """Yield each place of the answer i64 [1] at which a drafter knows of something, and logits."""
    none = text[:0]
    for place in range(len(text) - since):
        level = drafter.predict_next(text[: since + place], none)
        if level is not None:
            yield np.array([place]), level.logits


def _read(
    drafter: ModelDrafter, text: Ids, since: int
) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """Yield places of the answer i64 [m] and the logits [m, V] there, all places once.

    In wide passes over the whole text; after these, one by one, the places where the text so far
    is of other tokens than as a part of the whole.
    """
    if since == len(text):
        return
    whole = drafter.bridge.context(text[:-1]).copy()
    if len(whole) >= drafter.context:
        raise PromptTooLongError(
            f"{drafter.name} takes {drafter.context} tokens, and this prompt and its "
            f"answer are {len(whole) + 1} of its own."
        )
    ends = np.empty(len(text) - since, dtype=np.int64)  # of each place's text within the whole
    others: list[tuple[int, int, NDArray[Any]]] = []  # place, what is of the whole, the rest
    for place in range(len(ends)):
        own = drafter.bridge.context(text[: since + place])
        shared = common_prefix(own, whole)
        ends[place] = len(own) if shared == len(own) else -1
        if shared < len(own):
            others.append((place, shared, own[shared:].copy()))
    first = int(ends[ends > 0].min(initial=len(whole)))
    for begin in range(first - 1, len(whole), _ROWS):
        end = min(begin + _ROWS, len(whole))
        places = np.flatnonzero((begin < ends) & (ends <= end))
        if len(places):
            logits = drafter.rows(whole[:end], end - begin)
            yield places, logits[ends[places] - begin - 1]
    # the last ones first, so that what was read of the whole is used by all
    for place, shared, rest in sorted(others, key=lambda other: -other[1]):
        own = np.concatenate([whole[:shared], rest])
        yield np.array([place]), drafter.rows(own, 1)


def accepted_by_round(agreed: Agreed, window: int) -> list[int]:
    """Count the drafts that each round of an answer accepts, with windows of so many tokens.

    agreed: bool [n]. The last round may commit what lies beyond the answer.
    """
    found, at = [], 0
    while at < len(agreed):
        met = agreed[at : at + window]
        run = len(met) if met.all() else int(met.argmin())
        found.append(run)
        at += run + 1
    return found


def by_depth(agreed: Agreed, depths: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count how often a draft stood so deep in a run, and was right there; i64 [depths] each.

    agreed: bool [n]. A run begins with the answer and behind every token that was not drafted; its
    first draft has depth 0. Deeper ones than there are count at the last depth.
    """
    reached, right = np.zeros(depths, dtype=np.int64), np.zeros(depths, dtype=np.int64)
    wrong = np.flatnonzero(~agreed)
    begins = np.concatenate([[0], wrong + 1])
    for begin, end in zip(begins, np.append(wrong, len(agreed)), strict=True):
        run = np.minimum(np.arange(end - begin), depths - 1)
        np.add.at(right, run, 1)
        np.add.at(reached, run, 1)
        if end < len(agreed):
            reached[min(end - begin, depths - 1)] += 1
    return reached, right
