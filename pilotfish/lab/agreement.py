"""Find the tokens at which a drafter agrees with its target, by reading the target's answer once.

In:  a drafter with its bridge, a prompt, and the target's answer. Out: for each t, whether the
    drafter drafts the target's next token after the prompt and the answer's first t tokens; and
    counts of these agreements.

No rounds over a link are needed. A protocol compares a draft only if all earlier drafts of the
round were accepted, and accepted drafts are the target's tokens. So if both models are greedy, or
draw with the same noise (`speculation.agreement`), the agreement alone determines how many drafts
each protocol and window accepts.

If both models have the same vocabulary, the result is exact, except for ties: a pass over many
    tokens rounds differently
from a pass over one token. Across a bridge it is nearly exact: in a round, drafts are appended
token by token, whereas here the text is tokenised as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import PromptTooLongError
from pilotfish.bridge import Prompt
from pilotfish.drafting.ahead import PassAcceptance
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.drafting.window import Drafter
from pilotfish.speculation.distributions import Floats, Sampling
from pilotfish.speculation.pass_drafts import stream_drafts
from pilotfish.speculation.sequences import common_prefix
from pilotfish.wire.protocols import SamplingParams
from pilotfish.wire.protocols.ahead import draft_with_margin

Ids = NDArray[np.uint32]
Agreed = NDArray[np.bool_]

GREEDY = SamplingParams(sampling=Sampling(temperature=0.0), seed=0)
_ROWS = 64  # rows of logits in one pass; with 152k tokens, 64 · 152k · 4 bytes are 39 MB


@dataclass
class PassesInUse:
    """How many drafts the passes of a drafter make, as it learns from answers under `ahead`.

    target_s: seconds of a target's pass. drafts: number of drafts of the last pass.
    """

    target_s: float
    acceptance: PassAcceptance = field(default_factory=PassAcceptance)
    drafts: int = 1

    def choose(self, drafter: Drafter) -> int:
        """Choose the number of drafts of the next pass, for a target without a link between."""
        self.drafts = stream_drafts(
            self.acceptance.means(drafter.drafts_per_pass),
            drafter.pass_times,
            target_s=self.target_s,
            rtt_s=0.0,
        )
        return self.drafts


def agreement(
    drafter: Drafter,
    prompt: Prompt,
    answer: Sequence[int] | Ids,
    sampling: SamplingParams = GREEDY,
    passes: PassesInUse | None = None,
) -> Agreed:
    """Compute whether the drafter would draft each token of an answer, bool [n].

    answer: target ids, [n]. sampling: the parameters under which the target wrote the answer. A
    position at which the drafter drafts nothing counts as disagreement. Afterwards the drafter is
    in the same state as after a generation of this answer. passes: for a drafter of several drafts
    per pass: how many it makes; the answer is then read as `ahead` drafts it, with a new pass after
    each wrong draft. None: one. Raises `PromptTooLongError` if prompt and answer exceed the
    drafter's context.
    """
    expected = np.asarray(answer, dtype=np.uint32)
    drafter.start(prompt)
    text = np.concatenate([prompt.ids, expected])
    start = len(prompt.ids)
    if passes is not None and drafter.drafts_per_pass > 1:
        by_passes = _read_pass_by_pass(drafter, text, start, sampling, passes)
        drafter.end(text)
        return by_passes
    drafts = np.full(len(expected), -1, dtype=np.int64)
    for positions, logits in predictions(drafter, text, start):
        if sampling.sampling.greedy:
            drafts[positions] = logits.argmax(axis=1)
        else:
            for position, row in zip(positions, logits, strict=True):
                drafts[position] = draft_with_margin(row, sampling, start + int(position))[0]
    drafter.end(text)
    agreed: Agreed = drafts == expected
    return agreed


def _read_pass_by_pass(
    drafter: Drafter, text: Ids, start: int, sampling: SamplingParams, passes: PassesInUse
) -> Agreed:
    """Compute whether each token after the first ``start`` of a text is drafted, bool [n]."""
    if drafter.remaining_context(text[:-1]) < 1:
        raise PromptTooLongError(
            f"The context of drafter {drafter.name} is {drafter.context} tokens, which is too "
            "short for this prompt and its answer."
        )
    agreed: Agreed = np.zeros(len(text) - start, dtype=np.bool_)
    no_drafts, at = text[:0], 0
    while at < len(agreed):
        most = min(passes.choose(drafter), len(agreed) - at)
        level = drafter.predict_next(text[: start + at], no_drafts, most)
        if level is None:
            at += 1
            continue
        for place, row in enumerate(level.logits):
            token = draft_with_margin(row, sampling, start + at)[0]
            agreed[at] = token == text[start + at]
            passes.acceptance.count(place, bool(agreed[at]))
            at += 1
            if not agreed[at - 1]:
                break
    return agreed


def predictions(
    drafter: Drafter, text: Ids, start: int
) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """Predict each token of a text u32 [n] after the first ``start``, from the tokens before it.

    Yields m positions (from 0 after ``start``), i64 [m], with their logits over the target's
    tokens, [m, V]; leaves out positions at which the drafter drafts nothing. The drafter must have
    started with this prompt. Raises `PromptTooLongError` if the text exceeds its context.
    """
    if isinstance(drafter, ModelDrafter):
        return _predict_in_wide_passes(drafter, text, start)
    return _predict_one_by_one(drafter, text, start)


def _predict_one_by_one(
    drafter: Drafter, text: Ids, start: int
) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """Yield each position at which the drafter drafts, i64 [1], with the logits, [1, V]."""
    no_drafts = text[:0]
    for position in range(len(text) - start):
        level = drafter.predict_next(text[: start + position], no_drafts)
        if level is not None:
            yield np.array([position]), level.logits


def _predict_in_wide_passes(
    drafter: ModelDrafter, text: Ids, start: int
) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """Yield all positions of the answer, m at a time, i64 [m], with their logits, [m, V].

    Wide passes over the whole text serve most positions. At the other positions, the text so far,
    tokenised alone, is not a prefix of the whole text's tokens. Each of these positions gets a
    separate pass at the end.
    """
    if start == len(text):
        return
    full_context = drafter.bridge.context(text[:-1]).copy()
    if len(full_context) >= drafter.context:
        raise PromptTooLongError(
            f"The context of drafter {drafter.name} is {drafter.context} tokens, but this "
            f"prompt and its answer have {len(full_context) + 1} tokens in its vocabulary."
        )
    # number of drafter tokens before each position; -1: these tokens are no prefix of the whole
    # text's tokens
    lengths = np.empty(len(text) - start, dtype=np.int64)
    # each entry: position, length of the prefix shared with the whole text's tokens, remaining
    # tokens
    retokenized: list[tuple[int, int, NDArray[Any]]] = []
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
    # the longest shared prefix first, so that each later pass finds its prefix in the cache
    for position, shared_length, tail in sorted(retokenized, key=lambda other: -other[1]):
        context = np.concatenate([full_context[:shared_length], tail])
        yield np.array([position]), drafter.rows(context, 1)


def count_accepted(agreed: Agreed, window: int) -> list[int]:
    """Compute the number of accepted drafts in each round, with windows of ``window`` tokens.

    agreed: whether each token of the answer is drafted correctly, bool [n]. The last round may
    commit tokens beyond the answer.
    """
    accepted, start = [], 0
    while start < len(agreed):
        drafts = agreed[start : start + window]
        run = len(drafts) if drafts.all() else int(drafts.argmin())
        accepted.append(run)
        start += run + 1
    return accepted


def count_by_depth(agreed: Agreed, depths: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count all drafts and the right drafts at each depth of a run; i64 [depths] each.

    agreed: whether each token of the answer is drafted correctly, bool [n]. A run begins at the
    start of the answer and after each wrong draft; its first draft has depth 0. The last depth
    also counts all deeper drafts.
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
