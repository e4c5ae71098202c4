"""Enumerate all outcomes of a round with their probabilities, for the exactness tests.

The rules draw from coins with given probabilities, and drafting picks from weights. `ways` replays
a round with one script of outcomes after another until all are seen, so the production code itself
is enumerated; `output_law` adds up the results. Statistics for the keyed draws, which cannot be
enumerated, are here too.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotfish.speculation.candidates import choose
from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.speculation.rows import Row
from pilotfish.speculation.split import systematic
from pilotfish.speculation.tree import Expansion, Tree, verify

Prefix = tuple[int, ...]
T = TypeVar("T")


class Chance:
    """Follows a script of outcomes, and after it takes the first possible one."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = script
        self._possible: list[int] = []  # number of outcomes of each decision
        self._taken: list[int] = []  # the outcome of each decision
        self.probability = 1.0

    def pick(self, shares: Sequence[float] | NDArray[np.float64]) -> int:
        """Pick an index of ``shares`` [n], which sum to 1."""
        possible = [index for index, share in enumerate(shares) if share > 0.0]
        at = len(self._taken)
        taken = self._script[at] if at < len(self._script) else 0
        self._possible.append(len(possible))
        self._taken.append(taken)
        self.probability *= float(shares[possible[taken]])
        return possible[taken]

    def coin(self, probability: float) -> bool:
        """Decide an event of this probability."""
        assert 0.0 <= probability <= 1.0
        return self.pick((probability, 1.0 - probability)) == 0

    def next_script(self) -> list[int] | None:
        """Return the next script, depth first; None after the last."""
        taken, possible = self._taken.copy(), self._possible.copy()
        while taken and taken[-1] == possible[-1] - 1:
            taken.pop()
            possible.pop()
        if not taken:
            return None
        taken[-1] += 1
        return taken


def ways(play: Callable[[Chance], T]) -> Iterator[tuple[T, float]]:
    """Yield each result of ``play`` with its probability."""
    script: list[int] | None = []
    while script is not None:
        chance = Chance(script)
        yield play(chance), chance.probability
        script = chance.next_script()


@dataclass(frozen=True)
class Ended:
    """The end of a round: the accepted tokens, and the weights [V] sampled after them."""

    tokens: Prefix
    weights: Floats


def output_law(
    play: Callable[[Chance], Ended], p: Callable[[Prefix], Floats], length: int
) -> NDArray[np.float64]:
    """Compute the law of the first ``length`` tokens over all outcomes, f64 [V] * length.

    p: the target's law after a prefix, [V]. Tokens after a short round are drawn from it, which is
    the claim for the next rounds (induction).
    """
    ends: dict[Prefix, NDArray[np.float64]] = {}
    for ended, probability in ways(play):
        share = probability * (ended.weights / ended.weights.sum(dtype=np.float64))
        ends[ended.tokens] = ends.get(ended.tokens, 0.0) + share
    law = np.zeros((len(p(())),) * length)
    for tokens, weights in ends.items():
        for token, weight in enumerate(weights):
            if weight:
                prefix = (*tokens, token)
                law[prefix] += weight * target_law(p, length - len(prefix), prefix)
    return law


def target_law(
    p: Callable[[Prefix], Floats], length: int, prefix: Prefix = ()
) -> NDArray[np.float64]:
    """Compute the target's law of the ``length`` tokens after a prefix, f64 [V] * length."""
    if not length:
        return np.ones(())
    shares = p(prefix) / p(prefix).sum(dtype=np.float64)
    return np.stack(
        [share * target_law(p, length - 1, (*prefix, x)) for x, share in enumerate(shares)]
    )


def tv(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Compute the total variation distance of two laws."""
    return float(np.abs(a - b).sum()) / 2


def play_round(
    expansion: Expansion,
    q: Callable[[Prefix], Row],
    p: Callable[[Prefix], Floats],
    chance: Chance,
    *,
    predicted: Callable[[Prefix], float] = lambda _: 1.0,
    enough: float = 0.0,
) -> Ended:
    """Play one round: draft level by level as the device does, and verify as the edge does.

    predicted: the acceptance that the drafter expects after a prefix. With ``window="auto"`` the
    window ends after the level where their product is below ``enough`` everywhere.
    """
    tree, rows, prefixes, hopes = Tree(), [], [()], [1.0]
    for count in expansion:
        parents = [prefixes[node] for node in tree.level]
        level = [q(parent) for parent in parents]
        drawn = [draw(row, count, chance) for row in level]
        hopes = [hope * predicted(parent) for hope, parent in zip(hopes, parents, strict=True)]
        rows += level
        tree.grow(drawn)
        prefixes += [tuple(tree.tokens(tree.path(node))) for node in tree.level]
        if max(hopes) < enough:
            break
        hopes = [hope for hope, tokens in zip(hopes, drawn, strict=True) for _ in set(tokens)]
    walk = verify(
        tree.candidates,
        tree.ids,
        rows.__getitem__,
        lambda node: p(prefixes[node]),
        lambda _, probability: chance.coin(probability),
    )
    return Ended(prefixes[walk.node], walk.weights)


def draw(row: Row, count: int, chance: Chance) -> list[int]:
    """Draw independent samples of q."""
    shares = row.probabilities()
    return [row.token(chance.pick(shares)) for _ in range(count)]


def play_split_round(
    length: int,
    q: Callable[[Prefix], Row],
    p: Callable[[Prefix], Floats],
    chance: Chance,
    *,
    bits: int,
    offset: Callable[[Floats, int, Chance], float] | None = None,
) -> Ended:
    """Play one round of split verification (`dssd`) of a chain, with p rounded to ``bits`` bits."""
    window: Prefix = ()
    for _ in range(length):
        window += tuple(draw(q(window), 1, chance))
    for at, token in enumerate(window):
        before = p(window[:at])
        counts = systematic(before, bits, (offset or dither)(before, bits, chance))
        choice = choose([token], q(window[:at]), counts, chance.coin)
        if choice.residual is not None:
            return Ended(window[:at], choice.residual)
    return Ended(window, p(window))


def dither(p: Floats, bits: int, chance: Chance) -> float:
    """Pick the middle of an interval of (0, 1) in which `systematic` gives the same result."""
    low, high = pick_interval([p], bits, chance)
    return (low + high) / 2


def pick_interval(laws: Sequence[Floats], bits: int, chance: Chance) -> tuple[float, float]:
    """Pick such an interval for several p at once; at its borders a 2ᵇCᵥ + u is an integer."""
    borders = [0.0, 1.0]
    for p in laws:
        running = np.cumsum(p, dtype=np.float64)
        borders.extend(np.mod(-(2.0**bits) * (running / running[-1]), 1.0))
    borders = np.unique(borders)
    at = chance.pick(np.diff(borders))
    return float(borders[at]), float(borders[at + 1])


@dataclass(frozen=True)
class Model:
    """A synthetic model: logits f32 [V] after each prefix, fixed functions of it and the seed.

    kind: of the logits; see `KINDS`. Target and drafter differ by ``side``, 0 and 1. memory: the
    tokens before the next one that `tests.support.rounds` passes on.
    """

    memory = 2
    vocab: int
    seed: int
    side: int
    kind: str = "random"

    def logits(self, prefix: Prefix) -> NDArray[np.float32]:
        """Return the logits after a prefix."""
        shared = np.random.default_rng([self.seed, *prefix])
        own = np.random.default_rng([self.seed, 7 + self.side, *prefix])
        values = 1.5 * own.standard_normal(self.vocab, np.float32)
        half = shared.permutation(self.vocab) < self.vocab // 2  # bool [V], at least one each
        if self.kind == "equal":
            return shared.standard_normal(self.vocab, np.float32)
        if self.kind == "disjoint":
            values[half == bool(self.side)] -= 1e4
        if self.kind == "overlapping":
            values[own.permutation(self.vocab) < self.vocab // 2] -= 1e4
        if self.kind == f"one-hot {'pq'[self.side]}" or self.kind == "both one-hot":
            values[own.integers(self.vocab)] += 1e4
        return values


KINDS = (
    "random",
    "equal",
    "disjoint",
    "overlapping",
    "one-hot p",
    "one-hot q",
    "both one-hot",
)


# of either end; half of them without certain tokens
samplings = st.one_of(
    st.builds(Sampling, temperature=st.sampled_from([1.0, 1.7]), top_k=st.sampled_from([0, 2])),
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.3, 1.0]),
        top_k=st.sampled_from([0, 1, 3]),
        top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    ),
)
kinds = st.one_of(st.just("random"), st.sampled_from(KINDS))


def law_of(model: Model, sampling: Sampling) -> Callable[[Prefix], Floats]:
    """Return a function for p, or the dense q, after a prefix, f32 [V]."""
    return cache(lambda prefix: probabilities(model.logits(prefix)[None], sampling)[0])


def p_value(counts: NDArray[np.integer], expected: NDArray[np.float64]) -> float:
    """Compute the upper tail of χ² by Wilson and Hilferty; pools cells that expect less than 5.

    Returns 0 if an event of probability 0 has happened.
    """
    if counts[expected <= 0.0].any():
        return 0.0
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return 1.0
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    df = len(wanted) - 1
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))


def distribution_of(row: Row, vocab: int) -> NDArray[np.float64]:
    """Return the whole distribution of a row, f64 [V]."""
    full = np.zeros(vocab)
    full[row.support] = row.probabilities()
    return full
