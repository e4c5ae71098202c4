"""All the ways that a round can go, each with its probability: what the exactness tests run on.

The rules take chance through coins that are told a probability, and drafting picks from weights.
`ways` replays a round with one script of outcomes after another until all have been seen, so what
is enumerated is the code that really runs; `output_law` adds up what comes out. The statistics for
what cannot be enumerated, the keyed draws themselves, stand here too.
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
    """Follows a script of outcomes, and beyond it takes the first that is possible."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = script
        self._possible: list[int] = []  # of each decision, how many outcomes there were
        self._taken: list[int] = []  # and which of these it was
        self.probability = 1.0

    def pick(self, shares: Sequence[float] | NDArray[np.float64]) -> int:
        """An index of ``shares`` [n], which sum to 1."""
        possible = [index for index, share in enumerate(shares) if share > 0.0]
        at = len(self._taken)
        taken = self._script[at] if at < len(self._script) else 0
        self._possible.append(len(possible))
        self._taken.append(taken)
        self.probability *= float(shares[possible[taken]])
        return possible[taken]

    def coin(self, probability: float) -> bool:
        """Did what has this probability happen?"""
        assert 0.0 <= probability <= 1.0
        return self.pick((probability, 1.0 - probability)) == 0

    def next_script(self) -> list[int] | None:
        """The script that comes after what was taken, depth first; None: all were seen."""
        taken, possible = self._taken.copy(), self._possible.copy()
        while taken and taken[-1] == possible[-1] - 1:
            taken.pop()
            possible.pop()
        if not taken:
            return None
        taken[-1] += 1
        return taken


def ways(play: Callable[[Chance], T]) -> Iterator[tuple[T, float]]:
    """What ``play`` returns in each way that it can go, and how probable that is."""
    script: list[int] | None = []
    while script is not None:
        chance = Chance(script)
        yield play(chance), chance.probability
        script = chance.next_script()


@dataclass(frozen=True)
class Ended:
    """How a round ended: these tokens were accepted, and ``weights`` [V] are sampled after them."""

    tokens: Prefix
    weights: Floats


def output_law(
    play: Callable[[Chance], Ended], p: Callable[[Prefix], Floats], length: int
) -> NDArray[np.float64]:
    """The law of the first ``length`` tokens when a round goes all ways, f64 [V] * length.

    p: the target's law after a prefix, [V]. What follows a short round is drawn from it, which is
    the claim for the rounds after this one (induction).
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
    """The target's own law of the ``length`` tokens after a prefix, f64 [V] * length."""
    if not length:
        return np.ones(())
    shares = p(prefix) / p(prefix).sum(dtype=np.float64)
    return np.stack(
        [share * target_law(p, length - 1, (*prefix, x)) for x, share in enumerate(shares)]
    )


def tv(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Total variation distance of two laws."""
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
    """One round as the device drafts it, level by level, and the edge verifies it.

    predicted: the acceptance that the drafter expects after a prefix. ``window="auto"``: the
    window ends after the level at which the product of these falls below ``enough`` everywhere.
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
    """Independent samples of q."""
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
    """One round of split verification (`dssd`) of a chain, p rounded to ``bits`` bits."""
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
    """An offset for each interval of (0, 1) in which `systematic` gives the same: its middle."""
    low, high = pick_interval([p], bits, chance)
    return (low + high) / 2


def pick_interval(laws: Sequence[Floats], bits: int, chance: Chance) -> tuple[float, float]:
    """Such an interval for all of these p at once. It borders on where a 2ᵇCᵥ + u is whole."""
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

    kind: how they lie; see `KINDS`. Target and drafter differ by ``side``, 0 and 1.
    """

    vocab: int
    seed: int
    side: int
    kind: str = "random"

    def logits(self, prefix: Prefix) -> NDArray[np.float32]:
        """The logits after a prefix."""
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


# of either end; half of them such that nothing is certain
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
    """p or the dense q after a prefix, f32 [V]."""
    return cache(lambda prefix: probabilities(model.logits(prefix)[None], sampling)[0])


def p_value(counts: NDArray[np.integer], expected: NDArray[np.float64]) -> float:
    """Upper tail of χ² by Wilson and Hilferty; cells that expect less than 5 are pooled.

    0 where something happened that has probability 0.
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
