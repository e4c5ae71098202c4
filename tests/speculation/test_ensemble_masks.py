"""Ensembles of processed logits: masks, what is rebuilt under them, and rounds by enumeration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import MalformedError
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.ensemble import (
    SCHEMES,
    Scheme,
    aggregate,
    as_logits,
    restrict,
    top_rows,
    top_rows_by_mass,
)
from pilotfish.speculation.logits_options import LogitsOptions, LogitsProcessor, node_paths
from pilotfish.speculation.masks import Masks
from pilotfish.wire.codecs.masks import decode_masks, encode_masks
from tests.support.enumeration import Model
from tests.support.examples import examples
from tests.support.rounds import EXACT, ONE, PROMPT, Setting, draft_window
from tests.support.shaped import shaped, shapings
from tests.wire.test_protocol_outcomes import both_laws

ROUNDING = 2e-6  # float32's

pytestmark = pytest.mark.filterwarnings("error")  # 0/0, ∞ − ∞ and the like


class Fence:
    """A constraint that depends on answer and path: a table forbids tokens after the last token."""

    def __init__(self, vocab: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.table = rng.random((vocab + 1, vocab)) < 0.5  # allowed after each token, or at first
        self.table[np.arange(vocab + 1), rng.integers(vocab, size=vocab + 1)] = True

    def allowed(self, answer: Sequence[int]) -> np.ndarray:
        return self.table[answer[-1] if len(answer) else -1]

    def forbid(
        self, logits: np.ndarray, answer: np.ndarray, paths: Sequence[Sequence[int]]
    ) -> list[int]:
        for row, path in zip(logits, paths, strict=True):
            row[~self.allowed([*answer.tolist(), *path])] = -np.inf
        return []

    def forced(self, answer: np.ndarray, path: Sequence[int]) -> list[int]:
        return []


@st.composite
def masked(draw: st.DrawFn) -> tuple[list[np.ndarray], list[float], np.ndarray, int]:
    """Logits of M workers [n, V], weights, marks of allowed tokens [n, V], K."""
    vocab, count = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    workers = [
        rng.normal(0.0, draw(st.sampled_from([0.1, 2.0, 10.0])), (count, vocab)).astype(np.float32)
        for _ in range(draw(st.integers(1, 3)))
    ]
    allowed = rng.random((count, vocab)) < draw(st.sampled_from([0.02, 0.3, 0.9]))
    allowed[np.arange(count), rng.integers(vocab, size=count)] = True
    weights = [draw(st.floats(0.05, 5.0)) for _ in workers]
    return workers, weights, allowed, draw(st.integers(1, vocab))


def rebuilt(row: np.ndarray, allowed: np.ndarray, k: int, scheme: Scheme) -> np.ndarray:
    """p̃ of one worker's row in float64, by (5) or (6) over the allowed tokens alone."""
    p = np.where(allowed, np.exp(row.astype(np.float64) - row[allowed].max()), 0.0)
    p /= p.sum()
    chosen = [t for t in sorted(range(len(p)), key=lambda t: (-p[t], t))[:k] if allowed[t]]
    inside = np.zeros(len(p), bool)
    inside[chosen] = True
    outside = allowed & ~inside
    if not outside.any():
        return p
    if scheme == "renormalise":
        return np.where(inside, p, 0.0) / p[inside].sum()
    return np.where(inside, p, 0.0) + outside * (1.0 - p[inside].sum()) / outside.sum()


@given(masked(), st.sampled_from(SCHEMES))
@examples(200)
def test_only_allowed_tokens_are_rebuilt(
    case: tuple[list[np.ndarray], list[float], np.ndarray, int], scheme: Scheme
) -> None:
    workers, weights, allowed, k = case
    vocab, masks = allowed.shape[1], Masks.pack(allowed)
    processed = [np.where(allowed, z, np.float32(-np.inf)) for z in workers]
    answers = [restrict(top_rows(z, 1.0, k), masks) for z in processed]
    total = aggregate(weights, answers, vocab, scheme, masks)
    shares = np.array(weights) / sum(weights)
    wanted = sum(
        share * np.stack([rebuilt(*rows, k, scheme) for rows in zip(z, allowed, strict=True)])
        for share, z in zip(shares, workers, strict=True)
    )
    np.testing.assert_allclose(total, wanted, rtol=2e-5, atol=ROUNDING)
    assert not total[~allowed].any()
    # as many tokens as are allowed are as good as all
    whole = [top_rows(z, 1.0, vocab) for z in processed]
    if k >= allowed.sum(axis=1).max():
        np.testing.assert_array_equal(total, aggregate(weights, whole, vocab, scheme))


@given(masked(), st.floats(0.05, 0.999))
def test_a_mass_is_one_of_the_masked_distribution(
    case: tuple[list[np.ndarray], list[float], np.ndarray, int], mass: float
) -> None:
    (z, *_), _, allowed, _ = case
    processed = np.where(allowed, z, np.float32(-np.inf))
    answers = top_rows_by_mass(processed, 1.0, mass, z.shape[1])
    for row, marks, answer in zip(processed, allowed, answers, strict=True):
        assert answer.retained_mass[0] >= mass - 1e-6
        assert answer.k <= marks.sum()  # no forbidden token fills the row up
        assert marks[answer.ids[0]].all()
        if answer.k > 1:
            assert top_rows(row[None], 1.0, answer.k - 1).retained_mass[0] < mass + 1e-6


@given(masked())
def test_masks_cross_the_wire(case: tuple[Any, Any, np.ndarray, int]) -> None:
    allowed = case[2]
    masks = Masks.pack(allowed)
    np.testing.assert_array_equal(masks.unpack(), allowed)
    np.testing.assert_array_equal(masks.counts(), allowed.sum(axis=1))
    ids = np.tile(np.arange(allowed.shape[1], dtype=np.uint32), (len(allowed), 1))
    np.testing.assert_array_equal(masks.allows(ids), allowed)
    frame = encode_masks(masks)
    np.testing.assert_array_equal(decode_masks(frame, *allowed.shape).unpack(), allowed)
    rows, vocab = allowed.shape
    for bad, count in [(frame[:-1], rows), (frame, rows + 1), (frame + b"x", rows), (b"", rows)]:
        with pytest.raises(MalformedError):
            decode_masks(bad, count, vocab)
    with pytest.raises(MalformedError, match="allows no token"):
        decode_masks(encode_masks(Masks.pack(np.zeros_like(allowed))), rows, vocab)


@given(shapings(6), st.integers(0, 99), st.booleans(), st.booleans())
@examples(100)
def test_what_is_stated_does_what_the_processor_does(
    options: LogitsOptions, seed: int, constrained: bool, tree: bool
) -> None:
    """In every bit, for chains and trees, whatever was processed before."""
    rng, vocab = np.random.default_rng(seed), 6
    fence = Fence(vocab, seed) if constrained else None
    text = rng.integers(0, vocab, 9).astype(np.uint32)
    ids = rng.integers(0, vocab, 4)
    parents = np.array([-1, -1, 0, 2]) if tree else None
    rows = rng.normal(0.0, 2.0, (5, vocab)).astype(np.float32)
    processor = LogitsProcessor(options, 5, fence)
    paths = node_paths(ids.tolist(), parents)
    stated, dead = processor.state(text, paths, vocab)
    assert not dead
    there = rows.copy()
    stated.process(there, np.concatenate([text, ids]), parents)
    processor.process(rows, text, paths)
    np.testing.assert_array_equal(there, rows)


class AverageModel:
    """A federation's logits as a target's: its workers process, cut, and average their own."""

    memory = 10  # all tokens

    def __init__(self, case: Case) -> None:
        self.case = case

    def logits(self, tokens: tuple[int, ...]) -> np.ndarray:
        case, sequence = self.case, np.array(tokens, np.uint32)
        processor = LogitsProcessor(case.options, len(PROMPT), case.fence)
        stated, _ = processor.state(sequence, [()], case.vocab)
        answers = []
        for model in case.workers:
            row = model.logits(tokens[-2:])[None].copy()
            stated.process(row, sequence, None)
            answers.append(top_rows(row, case.temperature, case.k))
        if stated.masks is not None:
            answers = [restrict(rows, stated.masks) for rows in answers]
        total = aggregate(case.weights, answers, case.vocab, case.scheme, stated.masks)
        return as_logits(total, case.temperature)[0]


class Case:
    """A federation of three tokens' worth of choices, and its law from first principles."""

    def __init__(self, seed: int, options: LogitsOptions, k: int, scheme: Scheme, t: float) -> None:
        self.vocab, self.k, self.scheme, self.options, self.temperature = 3, k, scheme, options, t
        self.workers = [Model(self.vocab, seed + each, 0) for each in range(2)]
        self.weights = [0.7, 0.3]
        self.fence = Fence(self.vocab, seed)

    def law(self, answer: tuple[int, ...]) -> np.ndarray:
        """The average of the processed, cut and rebuilt distributions, f64 [V]."""
        text, total = (*PROMPT, *answer), np.zeros(self.vocab)
        for weight, model in zip(self.weights, self.workers, strict=True):
            row = shaped(model.logits(text[-2:]), PROMPT, answer, self.options) / self.temperature
            total += weight * rebuilt(row, self.fence.allowed(answer), self.k, self.scheme)
        return total


@pytest.mark.parametrize(
    ("name", "k", "scheme"),
    [("dsd", 3, "renormalise"), ("tslt", 2, "renormalise"), ("dsd fp32", 1, "spread"),
     ("tree", 3, "spread"), ("adaptive", 1, "renormalise")],
)  # fmt: skip
@given(shapings(3), st.integers(0, 2**20), st.sampled_from([0.6, 1.0]))
@examples(3)
def test_a_round_over_a_federation_has_the_averages_law(
    name: str, k: int, scheme: Scheme, options: LogitsOptions, seed: int, temperature: float
) -> None:
    """Over all outcomes. With K = V the law is Σ w p of the workers' processed distributions."""
    case = Case(seed, options, k, scheme, temperature)

    class Federated(Setting):
        @property
        def models(self) -> tuple[Any, Any]:
            return AverageModel(case), Model(case.vocab, seed, 1)

    sampling = Sampling(temperature=temperature)
    expansion = (2, 1) if EXACT[name].allows_trees else (1, 1)
    setting = Federated(name, expansion, sampling, ONE, vocab=case.vocab)
    got, wanted = both_laws(setting, 0, draft_window, PROMPT, cache(case.law))
    # float32: `as_logits` has each p within 2·10⁻⁵
    np.testing.assert_allclose(got, wanted, rtol=3e-4, atol=1e-6)
