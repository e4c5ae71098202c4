"""Where a drafter agrees with its target: one reading of an answer, instead of rounds over a link.

In:  a drafter with its bridge, a prompt, and the target's answer. Out: whether the drafter, behind
     the prompt and the answer's first t tokens, drafts the target's next one, for each t; and what
     follows from that.

Drafts are only compared behind accepted ones, and these are the target's own tokens. So where both
choose without chance, or by the same noise (`speculation.coupling`), what every protocol and window
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
    expected = np.asarray(answer, dtype=np.uint32)
    drafter.start(prompt)
    text = np.concatenate([prompt.ids, expected])
    drafts = np.full(len(expected), -1, dtype=np.int64)
    start = len(prompt.ids)
    if isinstance(drafter, ModelDrafter):
        predictions = _read(drafter, text, start)
    else:
        predictions = _asked(drafter, text, start)
    for positions, logits in predictions:
        if sampling.sampling.greedy:
            drafts[positions] = logits.argmax(axis=1)
        else:
            for position, row in zip(positions, logits, strict=True):
                drafts[position] = draft_with_margin(row, sampling, start + int(position))[0]
    drafter.end(text)
    agreed: Agreed = drafts == expected
    return agreed


def _asked(drafter: Drafter, text: Ids, start: int) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """Yield each place of the answer i64 [1] at which a drafter knows of something, and logits."""
    no_drafts = text[:0]
    for position in range(len(text) - start):
        level = drafter.predict_next(text[: start + position], no_drafts)
        if level is not None:
            yield np.array([position]), level.logits


def _read(
    drafter: ModelDrafter, text: Ids, start: int
) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """Yield places of the answer i64 [m] and the logits [m, V] there, all places once.

    In wide passes over the whole text; after these, one by one, the places where the text so far
    is of other tokens than as a part of the whole.
    """
    if start == len(text):
        return
    full_context = drafter.bridge.context(text[:-1]).copy()
    if len(full_context) >= drafter.context:
        raise PromptTooLongError(
            f"{drafter.name} takes {drafter.context} tokens, and this prompt and its "
            f"answer are {len(full_context) + 1} of its own."
        )
    lengths = np.empty(len(text) - start, dtype=np.int64)  # of each place's text within the whole
    retokenized: list[tuple[int, int, NDArray[Any]]] = []  # place, what is of the whole, the rest
    for position in range(len(lengths)):
        context = drafter.bridge.context(text[: start + position])
        shared_length = common_prefix(context, full_context)
        lengths[position] = len(context) if shared_length == len(context) else -1
        if shared_length < len(context):
            retokenized.append((position, shared_length, context[shared_length:].copy()))
    first = int(lengths[lengths > 0].min(initial=len(full_context)))
    for begin in range(first - 1, len(full_context), _ROWS):
        end = min(begin + _ROWS, len(full_context))
        positions = np.flatnonzero((begin < lengths) & (lengths <= end))
        if len(positions):
            logits = drafter.rows(full_context[:end], end - begin)
            yield positions, logits[lengths[positions] - begin - 1]
    # the last ones first, so that what was read of the whole is used by all
    for position, shared_length, tail in sorted(retokenized, key=lambda other: -other[1]):
        context = np.concatenate([full_context[:shared_length], tail])
        yield np.array([position]), drafter.rows(context, 1)


def accepted_by_round(agreed: Agreed, window: int) -> list[int]:
    """Count the drafts that each round of an answer accepts, with windows of so many tokens.

    agreed: bool [n]. The last round may commit what lies beyond the answer.
    """
    accepted, start = [], 0
    while start < len(agreed):
        drafts = agreed[start : start + window]
        run = len(drafts) if drafts.all() else int(drafts.argmin())
        accepted.append(run)
        start += run + 1
    return accepted


def by_depth(agreed: Agreed, depths: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count how often a draft stood so deep in a run, and was right there; i64 [depths] each.

    agreed: bool [n]. A run begins with the answer and behind every token that was not drafted; its
    first draft has depth 0. Deeper ones than there are count at the last depth.
    """
    reached, right = np.zeros(depths, dtype=np.int64), np.zeros(depths, dtype=np.int64)
    wrong = np.flatnonzero(~agreed)
    begins = np.concatenate([[0], wrong + 1])
    for begin, end in zip(begins, np.append(wrong, len(agreed)), strict=True):
        depths_of_run = np.minimum(np.arange(end - begin), depths - 1)
        np.add.at(right, depths_of_run, 1)
        np.add.at(reached, depths_of_run, 1)
        if end < len(agreed):
            reached[min(end - begin, depths - 1)] += 1
    return reached, right
